"""A group that was generated and scored, and its trajectories.

Outcome of each sample; a missing reward is not counted as a reward of 0:

right       the reward, or that of the last turn (before a discount of turns), is at least 1
wrong       the reward is less than 1
no_answer   as wrong, but the response was cut off (length, turns or context)
timed_out   the reward function or the agent took too long
crashed     the reward function or the agent raised, or its process ended
refused     the reward function returned None, or a program ended its session without a reward

A reward function may also set one of the last four outcomes for a sample that it scored, such as a
program that did not end or a completion without an answer. It returns a component of that name
that is not 0 then; the reward stays what the function returned.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from areal_lab.agents.workflow import Episode
from areal_lab.control.events import GroupId
from areal_lab.control.sampling import DynamicSampling
from areal_lab.data.images import PlacedImage
from areal_lab.data.problems import Problem
from areal_lab.data.trajectory import Trajectory
from areal_lab.metrics.glossary import ENVIRONMENT
from areal_lab.rewards.wire import TOLD
from areal_lab.runlog.records import TurnTimes

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """One group, generated and scored."""

    problem: Problem
    samples: tuple[Episode, ...]
    completions: tuple[tuple[str, ...], ...]
    """Text of each row of each sample, written by the model and its environment."""
    prompt_tokens: tuple[int, ...]
    started_s: float
    generated_s: float
    scored_s: float
    """Seconds since the epoch."""
    turns: tuple[TurnTimes, ...] = ()
    """Turns in the order of their ends; empty without a workflow of turns. Times include waits for
    a paused or lost engine."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt."""

    def trajectories(self, group: GroupId) -> tuple[Trajectory, ...]:
        """Return the samples as trajectories; the status of every outcome must be ok."""
        return tuple(
            Trajectory(
                group=group,
                sample=index,
                row=number,
                prompt_tokens=row.prompt_tokens,
                parts=row.parts,
                finish_reason=sample.end,
                reward=sample.outcome.reward,
                rewards=sample.outcome.rewards,
                turn_returns=row.turn_returns,
                images=self._images_of(row.prompt_tokens),
            )
            for index, sample in enumerate(self.samples)
            for number, row in enumerate(sample.rows)
        )

    def _images_of(self, prompt_tokens: tuple[int, ...]) -> tuple[PlacedImage, ...]:
        """Return the images of a row: those of the group if the row continues its prompt."""
        continues = prompt_tokens[: len(self.prompt_tokens)] == self.prompt_tokens
        return self.images if continues else ()

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def failure(self) -> str | None:
        """Reason why the group cannot be trained on, or None."""
        for sample in self.samples:
            if sample.outcome.status != "ok":
                return f"reward {sample.outcome.status}"
            if not sample.segments:
                return "no token was generated"
        return None

    def why_filtered(self, sampling: DynamicSampling | None, *, mask_truncated: bool) -> str | None:
        """Return the reason why the group is not trained on, or None.

        Args:
            sampling: rule of dynamic sampling, if it is on.
            mask_truncated: responses that were cut off have no loss.
        """
        if sampling is None or self.failure:
            return self.failure
        masked = [i for i, one in enumerate(self.samples) if mask_truncated and one.truncated]
        return sampling.rejects([one.outcome.reward for one in self.samples], masked)


def tool_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """Return metrics of tool use in a batch; empty without workflows of several turns."""
    samples = [sample for group in groups for sample in group.samples if sample.turns]
    if not samples:
        return {}
    outcomes = Counter(
        outcome for sample in samples for turn in sample.turns for _, outcome in turn.calls
    )
    calls = outcomes.total()
    return {
        "tool_calls_mean": calls / len(samples),
        "tool_user_share": sum(any(t.tool for t in s.turns) for s in samples) / len(samples),
        "tool_failure_share": (calls - outcomes["ok"]) / max(1, calls),
        "tool_malformed_share": outcomes["malformed"] / max(1, calls),
        "tool_timeout_share": outcomes["timeout"] / max(1, calls),
    }


def environment_metrics(samples: Iterable[Episode]) -> dict[str, float]:
    """Return the mean of each measurement of an environment, over the samples that have it.

    Names have only characters that trackers accept: others become `_`.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.metrics.items():
            values[ENVIRONMENT + _NOT_IN_NAMES.sub("_", name)].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


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
    """Return the outcome of a sample."""
    scored = sample.outcome
    if scored.status != "ok":
        return _UNSCORED[scored.status]
    for outcome in TOLD:
        if scored.rewards.get(outcome, 0.0):
            return outcome
    last = sample.turns[-1].reward if sample.turns else None
    if max(scored.reward, -math.inf if last is None else last) >= CORRECT - ROUNDING:
        return "right"
    return "no_answer" if sample.truncated else "wrong"


def counted(outcomes: Iterable[str]) -> dict[str, int]:
    """Return the number of samples for each outcome, including 0."""
    found = Counter(outcomes)
    return {name: found[name] for name in OUTCOMES}


def outcome_metrics(samples: Iterable[Episode]) -> dict[str, float]:
    """Return the shares of outcomes in a batch whose samples all have a reward."""
    found = counted(map(outcome_of, samples))
    total = max(1, sum(found.values()))
    return {f"{name}_share": found[name] / total for name in ("right", "no_answer")}
