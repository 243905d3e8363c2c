"""A reward function that stops where a test wants it, once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from tests.pipeline.rewards import even_digits

WANTED, RELEASED = "wanted", "released"
"""Files: the next completion is to be held; it need not be held any longer."""
_POLL_S: Final = 0.01
_LONGEST_S: Final = 60.0


def held(completion: str, example: dict[str, Any], *, folder: str) -> float:
    """Say which process scores, and wait until the test has struck."""
    claim = Path(folder) / f"scores-{os.getpid()}"
    try:
        (Path(folder) / WANTED).rename(claim)
    except FileNotFoundError:
        return even_digits(completion, example)
    until_s = time.monotonic() + _LONGEST_S
    while not (Path(folder) / RELEASED).exists() and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return even_digits(completion, example)


def who_scores(folder: Path) -> int | None:
    """The process that holds a completion; None if none does."""
    return next((int(one.name.partition("-")[2]) for one in folder.glob("scores-*")), None)
