#!/usr/bin/env bash
# safetensors 0.8.0 raises FileNotFoundError if there is no file to read. If it cannot write a file it raises
# SafetensorError, which is not an OSError and has no errno: the number of the system's error is only in the text.
# So `except OSError` around save_file catches neither a missing folder nor a full disk, and a program that
# wants to tell a full disk from a wrong tensor has to search the message for "os error 28".
# The script sets a limit on the size of files in place of a full disk ("os error 27"); it needs no root.
#
# Output seen (2026-11-28, CPython 3.11, numpy 2.4.6, Linux): the four lines of EXPECTED.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
"$folder/venv/bin/python" - "$folder" > "$folder/seen" <<'PYTHON'
import re
import resource
import signal
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

folder = Path(sys.argv[1])
weights = {"w": np.zeros(10_000, np.float32)}


def report(what, do):
    try:
        do()
    except Exception as error:
        print(f"{what}: {type(error).__name__}, an OSError {isinstance(error, OSError)},", end=" ")
        print(f"errno {getattr(error, 'errno', None)}, text {re.findall('os error [0-9]+', str(error))}")


report("read, no such file", lambda: load_file(folder / "none.safetensors"))
report("write, no such folder", lambda: save_file(weights, folder / "none" / "w.safetensors"))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write above the limit is an error, EFBIG
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
report("Python, above the limit", lambda: (folder / "plain").write_bytes(bytes(40_000)))
report("write, above the limit", lambda: save_file(weights, folder / "w.safetensors"))
PYTHON
cat > "$folder/EXPECTED" <<'TEXT'
read, no such file: FileNotFoundError, an OSError True, errno None, text []
write, no such folder: SafetensorError, an OSError False, errno None, text ['os error 2']
Python, above the limit: OSError, an OSError True, errno 27, text []
write, above the limit: SafetensorError, an OSError False, errno None, text ['os error 27']
TEXT
diff "$folder/EXPECTED" "$folder/seen"
echo "still so: safetensors 0.8.0 reports failed writes without an errno"
