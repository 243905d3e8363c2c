"""The virtual environment of TRL, separate from this project's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-trl"
PYTHON = ENVIRONMENT / "bin" / "python"

_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_STAMP = ENVIRONMENT / ".requirements"
"""A copy of the requirements that the environment was created from."""


def is_ready() -> bool:
    """Whether the environment exists and has the current requirements."""
    return _STAMP.is_file() and _STAMP.read_text() == _wanted()


def make() -> Path:
    """Create the environment if it is not ready; return its interpreter."""
    if not is_ready():
        print(f"installing TRL into {ENVIRONMENT} (once; about two minutes)", file=sys.stderr)
        if not PYTHON.exists():
            subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
        pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        options = ["--constraint", str(ROOT / "constraints.txt"), "--requirement"]
        # Standard output is for the figures.
        subprocess.run([*pip, *options, str(_REQUIREMENTS)], check=True, stdout=sys.stderr)
        _STAMP.write_text(_wanted())
    return PYTHON


def _wanted() -> str:
    return _REQUIREMENTS.read_text() + (ROOT / "constraints.txt").read_text()
