"""Environments of clients: `python -m tests.real_clients.environments` installs what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.environments import ROOT, Environments

CLIENTS: Final = Environments(
    what="clients",
    folder=ROOT / ".venv-agents",
    requirements=Path(__file__).with_name("requirements"),
    target="test-agents",
    takes="two minutes; 1.4 GB for all 10",
)

if __name__ == "__main__":
    sys.exit(CLIENTS.install_missing())
