"""Validators of deployment files: `python -m tests.cluster.deploy.validators.environments` installs
what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.environments import ROOT, Environments

VALIDATORS: Final = Environments(
    what="validators",
    folder=ROOT / ".venv-deploy",
    requirements=Path(__file__).with_name("requirements"),
    target="test-deploy",
    takes="half a minute; 0.4 GB",
)

if __name__ == "__main__":
    sys.exit(VALIDATORS.install_missing())
