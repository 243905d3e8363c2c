#!/usr/bin/env bash
# safetensors 0.8.0 writes a temporary file and renames it over the target. The file that save_file leaves has
# mode 0600 whatever the umask or the mode of the file before, so other users of a shared disk can no longer
# read the model. If the target is a symbolic link, the link is replaced and the file behind it keeps the old
# weights. 0.7.0 wrote into the target: mode by the umask, an existing mode kept, a link followed. The mode is
# known upstream (safetensors issue 782); it comes from the change that fixed saving over a mapped file (764).
# Remedy: os.chmod after save_file, and os.path.realpath(target) where links are used.
#
# Output seen (2026-11-28, CPython 3.11, numpy 2.4.6, Linux): the eight lines of EXPECTED.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/save.py" <<'PYTHON'
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


os.umask(0o022)
print("safetensors", safetensors.__version__)
with tempfile.TemporaryDirectory() as name:
    target, link, behind = (Path(name) / part for part in ("new", "link", "behind"))
    save_file({"w": np.zeros(4, np.float32)}, target)
    print("new file", mode(target))
    target.chmod(0o664)
    save_file({"w": np.zeros(4, np.float32)}, target)
    print("file that had 0o664", mode(target))
    save_file({"w": np.zeros(4, np.float32)}, behind)
    link.symlink_to(behind)
    save_file({"w": np.ones(4, np.float32)}, link)
    print("link kept", link.is_symlink(), "- new weights behind it", bool(load_file(behind)["w"].all()))
PYTHON
for version in 0.7.0 0.8.0; do
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 "safetensors==$version"
    "$folder/venv/bin/python" "$folder/save.py" >> "$folder/seen"
done
cat > "$folder/EXPECTED" <<'TEXT'
safetensors 0.7.0
new file 0o644
file that had 0o664 0o664
link kept True - new weights behind it True
safetensors 0.8.0
new file 0o600
file that had 0o664 0o600
link kept False - new weights behind it False
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: safetensors 0.8.0 saves with mode 0600 and replaces links"
