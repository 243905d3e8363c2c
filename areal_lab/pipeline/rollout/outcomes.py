"""What became of each sample, counted apart: a missing reward is no reward of 0.

right       its reward is at least 1, or that of its last turn (before a discount of turns)
wrong       any other reward
no_answer   the same, and it was cut off (length, turns or context), or its reward function said so
timed_out   the reward function, or the agent, took too long
crashed     it raised, or its process ended
refused     there is no reward: it returned None, or a program ended its session without one

A reward function may tell one of the last four of a sample that it scored (a program that did not
end, an answer in no form), by a component of that name that is not 0. The reward is then still what
it returned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, Literal, TypeAlias, get_args

from areal_lab.agents.workflow import Episode
from areal_lab.rewards.wire import TOLD

Outcome: TypeAlias = Literal["right", "wrong", "no_answer", "timed_out", "crashed", "refused"]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
CORRECT: Final = 1.0
"""Smallest reward of a correct sample."""
ROUNDING: Final = 1e-9
_UNSCORED: Final[Mapping[str, Outcome]] = {
    "timeout": "timed_out",
    "error": "crashed",
    "refused": "refused",
    "abandoned": "refused",
}


def outcome_of(sample: Episode) -> Outcome:
    """What became of a sample."""
    scored = sample.outcome
    if scored.status != "ok":
        return _UNSCORED[scored.status]
    for told in TOLD:
        if scored.rewards.get(told, 0.0):
            return told
    last = sample.turns[-1].reward if sample.turns else None
    if max(scored.reward, -math.inf if last is None else last) >= CORRECT - ROUNDING:
        return "right"
    return "no_answer" if sample.truncated else "wrong"


def counted(outcomes: Iterable[str]) -> dict[str, int]:
    """How many samples have each outcome; all of them are named."""
    found = Counter(outcomes)
    return {name: found[name] for name in OUTCOMES}


def outcome_metrics(samples: Iterable[Episode]) -> dict[str, float]:
    """Shares of the samples of a batch, all of which have a reward."""
    found = counted(map(outcome_of, samples))
    total = max(1, sum(found.values()))
    return {f"{name}_share": found[name] / total for name in ("right", "no_answer")}
