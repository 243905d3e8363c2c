"""Mean sampled reward on problems that are never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lab.data.problems import Problem
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.rollout import Rollout, ScoredGroup

_PROGRESS_MESSAGES = 4
"""Progress messages of one evaluation."""


@dataclass(frozen=True, slots=True)
class HeldOutReward:
    """Rewards on held-out problems."""

    problem_means: tuple[float, ...]
    """Mean reward of each problem's samples, over those that were scored."""
    unscored: int
    """Samples without a reward because the reward function failed or timed out."""


async def measure(
    rollout: Rollout,
    problems: Sequence[Problem],
    *,
    samples: int,
    when: str,
    display: Display,
) -> HeldOutReward:
    """Sample `samples` responses to each problem with the weights the engines hold.

    Every call uses the same seeds, so measurements before and after a run differ in the weights
    only.

    Args:
        when: such as "before training", for the display.
    """
    total, done = len(problems), 0
    every = max(1, total // _PROGRESS_MESSAGES)
    display.phase(f"held-out problems {when}: 0 of {total}, {samples} samples each")

    def count_problem(*_: object) -> None:
        nonlocal done
        done += 1
        if done % every == 0 and done < total:
            display.phase(f"held-out problems {when}: {done} of {total}")

    groups = await rollout.held_out(problems, samples=samples, done=count_problem)
    rewards = [_rewards(group) for group in groups]
    return HeldOutReward(
        problem_means=tuple(sum(values) / len(values) for values in rewards if values),
        unscored=total * samples - sum(len(values) for values in rewards),
    )


def _rewards(group: ScoredGroup) -> list[float]:
    return [outcome.reward for outcome in group.outcomes if outcome.status == "ok"]
