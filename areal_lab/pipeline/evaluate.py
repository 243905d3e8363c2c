"""Mean sampled reward on problems that are never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lab.data.problems import Problem
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.rollout import RolledOut, Rollout

_SAID_TIMES = 4
"""How often an evaluation says how far it is."""


@dataclass(frozen=True, slots=True)
class HeldOutReward:
    """Rewards on held-out problems."""

    problem_means: tuple[float, ...]
    """Mean reward of each problem's samples, over those that were judged."""
    unjudged: int
    """Samples whose reward function failed or timed out: counted, not scored."""


async def measure(
    rollout: Rollout,
    problems: Sequence[Problem],
    *,
    samples: int,
    when: str,
    display: Display,
) -> HeldOutReward:
    """Draw `samples` answers to each problem with the weights the engines hold.

    Every call draws with the same seeds, so that before and after a run the same draws meet
    different weights.

    Args:
        when: as in "before training", for the display.
    """
    total, done = len(problems), 0
    every = max(1, total // _SAID_TIMES)
    display.phase(f"held-out problems {when}: 0 of {total}, {samples} samples each")

    def one_more() -> None:
        nonlocal done
        done += 1
        if done % every == 0 and done < total:
            display.phase(f"held-out problems {when}: {done} of {total}")

    rolled = await rollout.held_out(problems, samples=samples, done=one_more)
    judged = [_judged(answers) for answers in rolled]
    return HeldOutReward(
        problem_means=tuple(sum(r) / len(r) for r in judged if r),
        unjudged=total * samples - sum(len(rewards) for rewards in judged),
    )


def _judged(answers: RolledOut) -> list[float]:
    return [outcome.reward for outcome in answers.outcomes if outcome.status == "ok"]
