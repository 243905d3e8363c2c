"""The `areal-lab` command as a child process that ends with its parent, as in a sweep.

python -m areal_lab.cli.watched train tiny eta=2
"""

from areal_lab.cli.app import main
from areal_lab.host.processes import watch_parent

if __name__ == "__main__":
    watch_parent()
    main()
