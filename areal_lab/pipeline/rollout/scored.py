"""A group that was generated and scored, and the trajectories that it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from areal_lab.agents.workflow import Episode
from areal_lab.control.events import EngineId, GroupId
from areal_lab.data.images import PlacedImage
from areal_lab.data.problems import Problem
from areal_lab.data.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One turn of a sample, as an engine performed it."""

    sample: int
    engine: EngineId
    start_s: float
    end_s: float
    """Seconds since the epoch; waiting for a paused or lost engine is part of it."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """One group, generated and scored."""

    problem: Problem
    samples: tuple[Episode, ...]
    completions: tuple[tuple[str, ...], ...]
    """Text of each row of each sample: what the model and its environment wrote."""
    prompt_tokens: tuple[int, ...]
    started_s: float
    generated_s: float
    scored_s: float
    """Seconds since the epoch."""
    turns: tuple[SampledTurn, ...] = ()
    """By their end; empty without a workflow of turns."""
    images: tuple[PlacedImage, ...] = ()
    """Of the prompt."""

    def trajectories(self, group: GroupId) -> tuple[Trajectory, ...]:
        """The samples as trajectories; requires that every outcome is ok."""
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
        """The images of a row, whose prompt continues that of the group if it has them."""
        continues = prompt_tokens[: len(self.prompt_tokens)] == self.prompt_tokens
        return self.images if continues else ()

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def failure(self) -> str | None:
        """Why the group cannot be trained on, or None."""
        for sample in self.samples:
            if sample.outcome.status != "ok":
                return f"reward {sample.outcome.status}"
            if not sample.segments:
                return "no token was generated"
        return None


def tool_metrics(groups: Iterable[ScoredGroup]) -> dict[str, float]:
    """How the samples of a batch used tools; empty without workflows of several turns."""
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
