"""What a finished environment lacks: a look that takes a second, since it imports nothing.

    environment() --ready?--> its Python, its packages, the files of each --> ready | broken

A package is missed if the requirements pin it, a file if its package's list (RECORD) has it.
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


def examined(found: Environment) -> Environment:
    """The environment, broken if it should be ready and lacks something."""
    if found.condition is not Condition.READY:
        return found
    requirements = requirements_file(found.backend, found.build)
    lacks = next(chain(_without(found.folder, requirements), _python(found.folder)), "")
    return replace(found, condition=Condition.BROKEN, lacks=lacks) if lacks else found


def _without(folder: Path, requirements: Path) -> Iterator[str]:
    """Packages that are not there, and files of those that are."""
    infos = sorted(folder.glob("lib/python3*/site-packages/*.dist-info"))
    present = {canonicalize_name(info.name.partition("-")[0]) for info in infos}
    for line in pinned(requirements):
        needed = Requirement(line)
        if needed.specifier and canonicalize_name(needed.name) not in present:
            yield f"{needed.name} is not in it"
    for info in infos:
        name = info.name.removesuffix(".dist-info")
        try:
            text = (info / "RECORD").read_text(encoding="utf-8", errors="replace")
            rows = list(csv.reader(text.splitlines()))
        except (OSError, csv.Error):
            yield f"{name} has lost its list of files"
            continue
        for file, *_ in filter(None, rows):
            # Compiled files come and go.
            if "__pycache__" not in file and not os.path.lexists(info.parent / file):
                yield f"{name} has lost {file}"


def _python(folder: Path) -> Iterator[str]:
    """What is wrong with its Python: one that was replaced by another looks elsewhere."""
    command = [str(folder / "bin" / "python"), "-I", "-c", _PURELIB]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_PYTHON_S
        )
    except (OSError, subprocess.SubprocessError):
        yield "its Python does not run"
        return
    place = Path(ended.stdout.strip())
    if not place.is_dir() or not any(place.glob("*.dist-info")):
        yield f"its Python looks for packages in {place}, where none are"
