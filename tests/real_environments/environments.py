"""Environment libraries; `python -m tests.real_environments.environments` installs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.environments import ROOT, Environments

LIBRARIES: Final = Environments(
    what="environment libraries",
    folder=ROOT / ".venv-environments",
    requirements=Path(__file__).with_name("requirements"),
    target="test-environments",
    takes="three minutes; 1.2 GB",
)

if __name__ == "__main__":
    sys.exit(LIBRARIES.install_missing())
