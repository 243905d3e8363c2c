"""Report of one training step for the caller of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_lab.control.events import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A finished training step. Times are in seconds since the start of training."""

    step: int
    """Number of the step, counted from 1, which is also the version that it produced."""
    total_steps: int
    version: Version
    time_s: float
    """Time at which the step ended."""
    step_s: float
    """Seconds since the previous step ended, including waiting."""
    tokens_per_s: float
    """Generated tokens per second, over all samples that ended since the previous step."""
    reward_mean: float
    loss: float
    lag_token_mean: float
    lag_token_max: float
    """Largest number of versions between the weights trained and those that generated a token."""
    metrics: Mapping[str, float]
    """All measurements of the trainer, and the counts of the run."""
    evaluating: str = ""
    """`evaluating step 20: 37/128` while held-out problems are measured."""

    @classmethod
    def of(
        cls,
        version: Version,
        metrics: Mapping[str, float],
        *,
        total_steps: int,
        time_s: float,
        step_s: float,
        tokens: int,
        evaluating: str = "",
    ) -> StepReport:
        """Make the report of the step that produced `version`.

        Args:
            version: version of the weights after the step.
            metrics: measurements of the trainer, and counts of the run.
            total_steps: steps of the whole run.
            time_s: time at which the step ended.
            step_s: seconds since the previous step ended.
            tokens: generated tokens of the samples that ended since then.
            evaluating: see `StepReport.evaluating`.
        """
        return cls(
            step=version,
            total_steps=total_steps,
            version=version,
            time_s=time_s,
            step_s=step_s,
            tokens_per_s=tokens / step_s if step_s > 0 else 0.0,
            reward_mean=metrics["reward_mean"],
            loss=metrics["loss"],
            lag_token_mean=metrics["lag_token_mean"],
            lag_token_max=metrics["lag_token_max"],
            metrics=metrics,
            evaluating=evaluating,
        )

    @property
    def line(self) -> dict[str, float]:
        """The step's line in `metrics.jsonl`."""
        return {
            "step": self.step,
            "version": self.version,
            "time_s": self.time_s,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            **self.metrics,
        }
