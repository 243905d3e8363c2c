"""`docs/import.md`: the outputs of `areal-lab import`, each below its command. A test compares."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from areal_lab.cli.outputs import WIDTH

PAGE: Final = Path(__file__).parents[2] / "docs" / "import.md"
_SHOWN: Final = re.compile(r"(?<=```\n\$ )areal-lab ([^\n]+)\n.*?\n(?=```)", flags=re.S)


def page() -> str:
    """The page with the outputs of its commands.

    Raises:
        subprocess.CalledProcessError: a command fails.
    """
    return _SHOWN.sub(_with_output, PAGE.read_text(encoding="utf-8"))


def _with_output(found: re.Match[str]) -> str:
    """A command and what it prints."""
    printed = subprocess.run(
        [sys.executable, "-m", "areal_lab", *shlex.split(found[1])],
        cwd=PAGE.parents[1],
        env=os.environ | {"COLUMNS": str(WIDTH), "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    ).stdout
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    return "\n".join([f"areal-lab {found[1]}", *lines, ""])
