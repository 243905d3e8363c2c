"""Random number streams: one generator for each seed, purpose and block."""

from __future__ import annotations

from typing import Final

import numpy as np

LENGTHS: Final = 1
REWARDS: Final = 2
TOOLS: Final = 3
ENGINE_FAILURES: Final = 4
TRAINER_FAILURES: Final = 5
STRAGGLERS: Final = 6
EQUAL_REWARDS: Final = 7
TURNS: Final = 8


def stream(seed: int, purpose: int, number: int) -> np.random.Generator:
    """The generator of block `number` of the stream that one purpose has under a seed."""
    return np.random.default_rng([seed, purpose, number])
