"""Rewards on problems that are never trained on, sampled from the weights that the engines hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_lab.control.events import Version
from areal_lab.data.problems import Problem
from areal_lab.pipeline.evaluation_results import pass_at
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.runlog.held_out import Measured, measured_of

_PROGRESS_MESSAGES = 4
"""Progress messages of one evaluation."""


@dataclass(frozen=True, slots=True)
class HeldOutReward:
    """Rewards on held-out problems."""

    problem_means: tuple[float, ...]
    """Mean reward of each problem's samples, over those that were scored."""
    unscored: int
    """Samples without a reward because the reward function failed or timed out."""
    tokens: Mapping[Version, int] = field(default_factory=dict)
    """Response tokens by the version that sampled them."""
    pass_at: Mapping[str, float] = field(default_factory=dict)
    """pass@k by k, of problems with k scored samples."""

    def measured(self, version: Version) -> Measured | None:
        """The line of held_out.jsonl; None if no problem was scored.

        Args:
            version: that the engines held at the beginning.
        """
        return measured_of(
            version,
            self.problem_means,
            tokens=self.tokens,
            unscored=self.unscored,
            pass_at=self.pass_at,
        )


async def measure(
    rollout: Rollout,
    problems: Sequence[Problem],
    *,
    samples: int,
    ks: Sequence[int] = (),
    done: Callable[[], None] = lambda: None,
) -> HeldOutReward:
    """Sample `samples` responses to each problem with the weights the engines hold.

    Every call uses the same seeds, so measurements of a run differ in the weights only.

    Args:
        ks: the k of each pass@k.
        done: called when a problem's responses are scored.
    """
    groups = await rollout.held_out(problems, samples=samples, done=lambda *_: done())
    rewards = [_rewards(group) for group in groups]
    found = {k: await asyncio.to_thread(pass_at, rewards, k) for k in ks}  # loads torch
    return HeldOutReward(
        problem_means=tuple(sum(values) / len(values) for values in rewards if values),
        unscored=len(problems) * samples - sum(len(values) for values in rewards),
        tokens=_tokens(groups),
        pass_at={str(k): one["mean"] for k, one in found.items() if one is not None},
    )


def announced(display: Display, what: str, *, total: int, samples: int) -> Callable[[], None]:
    """Show that `total` problems are measured; returns what to call after each of them.

    Args:
        what: such as "held-out problems before training".
    """
    done, every = 0, max(1, total // _PROGRESS_MESSAGES)
    display.phase(f"{what}: 0 of {total}, {samples} samples each")

    def count_problem() -> None:
        nonlocal done
        done += 1
        if done % every == 0 and done < total:
            display.phase(f"{what}: {done} of {total}")

    return count_problem


def _rewards(group: ScoredGroup) -> list[float]:
    outcomes = [sample.outcome for sample in group.samples]
    return [outcome.reward for outcome in outcomes if outcome.status == "ok"]


def _tokens(groups: Sequence[ScoredGroup]) -> dict[Version, int]:
    counts: Counter[Version] = Counter()
    for group in groups:
        for sample in group.samples:
            for part in sample.segments:
                counts[part.version] += len(part.tokens)
    return dict(sorted(counts.items()))
