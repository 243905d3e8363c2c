"""Runs with rewards that a test plants."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from reproductions.learning.runs import Run

BEFORE = 0.5


def run(seed: int, reward: float, *, hours: float = 10.0, drift: float = 0.1, **choice: str) -> Run:
    """A run whose reward grows from `BEFORE` in a line, in ten measurements over its hours.

    It is at `reward` after 90 of its 100 steps.
    """
    steps = range(0, 101, 10)
    slope = (reward - BEFORE) / 90
    return Run(
        choice=choice,
        seed=seed,
        before=BEFORE,
        reward=reward,
        drift=drift,
        lag=1.0,
        clip_fraction=0.01,
        steps=100,
        hours=hours,
        cpu_s=30.0,
        curve=[(step, hours * step / 100, BEFORE + slope * step) for step in steps],
        training=[reward] * 10,
    )


def grid(
    reward: Callable[[str, str], float],
    *,
    staleness: tuple[str, ...] = ("0", "4", "8", "inf"),
    seeds: tuple[int, ...] = (1, 2, 3),
    rate: str = "1e-4",
) -> list[dict[str, Any]]:
    """Runs by staleness and objective; a seed adds its hundredth, and each run a little noise."""
    noise = Random(1)
    return [
        run(
            seed,
            reward(eta, objective) + 0.01 * seed + noise.uniform(-0.003, 0.003),
            hours=30.0 if eta == "0" else 10.0,
            staleness=eta,
            objective=objective,
            rate=rate,
        ).to_json()
        for eta in staleness
        for objective in ("naive", "decoupled")
        for seed in seeds
    ]
