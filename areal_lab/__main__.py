"""`python -m areal_lab` is the command `areal-lab`."""

from areal_lab.cli.app import main

if __name__ == "__main__":
    main()
