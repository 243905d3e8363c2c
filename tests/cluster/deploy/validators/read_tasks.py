"""Read SkyPilot tasks, one JSON object a line: an empty line back for each that is valid, else why
it is not. Run by SkyPilot's own Python."""

from __future__ import annotations

import json
import sys

import sky  # type: ignore[import-not-found]  # in an environment of its own

for line in sys.stdin:
    said = ""
    try:
        sky.Task.from_yaml_config(json.loads(line))
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
    print(said, flush=True)
