"""Verify that nothing is missing from a finished environment, in a second and without imports.

    environment() --ready?--> its Python, its packages, the files of each --> ready | broken

Checked are the packages that the requirements pin, and the files in each package's RECORD.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_lab.engines.launch.environments import Condition, Environment, pinned, requirements_file

_PYTHON_S: Final = 20.0
_PURELIB: Final = "import sysconfig; print(sysconfig.get_path('purelib'))"


def verify(found: Environment) -> Environment:
    """The environment, marked as broken if it counts as ready but something is missing."""
    if found.condition is not Condition.READY:
        return found
    requirements = requirements_file(found.backend, found.build)
    missing = next(chain(_missing(found.folder, requirements), _python(found.folder)), "")
    return replace(found, condition=Condition.BROKEN, missing=missing) if missing else found


def _missing(folder: Path, requirements: Path) -> Iterator[str]:
    """Missing packages, and missing files of installed packages."""
    infos = sorted(folder.glob("lib/python3*/site-packages/*.dist-info"))
    present = {canonicalize_name(info.name.partition("-")[0]) for info in infos}
    for line in pinned(requirements):
        needed = Requirement(line)
        if needed.specifier and canonicalize_name(needed.name) not in present:
            yield f"package {needed.name} is missing"
    for info in infos:
        name = info.name.removesuffix(".dist-info")
        try:
            text = (info / "RECORD").read_text(encoding="utf-8", errors="replace")
            rows = list(csv.reader(text.splitlines()))
        except (OSError, csv.Error):
            yield f"the file list of {name} is missing"
            continue
        for file, *_ in filter(None, rows):
            # Compiled files may be missing.
            if "__pycache__" not in file and not os.path.lexists(info.parent / file):
                yield f"{file} of {name} is missing"


def _python(folder: Path) -> Iterator[str]:
    """Problems of its Python; if it was replaced, it may look for packages elsewhere."""
    command = [str(folder / "bin" / "python"), "-I", "-c", _PURELIB]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_PYTHON_S
        )
    except (OSError, subprocess.SubprocessError):
        yield "its Python does not run"
        return
    packages = Path(ended.stdout.strip())
    if not packages.is_dir() or not any(packages.glob("*.dist-info")):
        yield f"its Python looks for packages in {packages}, which has none"
