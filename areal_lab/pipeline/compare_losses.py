"""Compare losses by training with each of them, with several seeds.

    comparison = compare_losses({"PPO": None, "mine": my_loss}, load_config("tiny"), seeds=3)
    for step in comparison:
        print(step.run, "of", comparison.runs, step.loss, step.seed, step.report.reward_mean)
    comparison.results.final_rewards()

One run after the other: each is a trainer, an engine and this process, which take two cores. Seeds
are the outer loop, so that what there is after a stop has as many runs of each loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from areal_lab.config.functions import load_function
from areal_lab.config.schema import TrainConfig
from areal_lab.pipeline.step_report import StepReport
from areal_lab.pipeline.train import TrainingRun, train
from areal_lab.runlog.seeds import SeedResults, SeedRun

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )

Loss: TypeAlias = "Callable[..., HasLoss] | str | None"
"""A loss function, `module:function` which is imported here, or None for the config's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonStep:
    """A training step of one of the runs."""

    loss: str
    seed: int
    run: int
    """Number of the run, from 1."""
    report: StepReport


class LossComparison:
    """Runs of several losses with several seeds; iterate over it once, which makes them.

    A run that fails is listed with its error, and the others are made. Leaving the loop early stops
    the running one and keeps those that are complete.
    """

    def __init__(self, planned: Sequence[tuple[str, int, TrainingRun]], total_steps: int) -> None:
        self._planned = list(planned)
        self._done: list[SeedRun] = []
        self.runs = len(self._planned)
        """Number of runs."""
        self.total_steps = total_steps
        """Training steps of all runs together."""

    @property
    def results(self) -> SeedResults:
        """The runs that have ended so far."""
        return SeedResults(tuple(self._done))

    def __iter__(self) -> Iterator[ComparisonStep]:
        """Make the runs, and yield after each training step.

        Raises:
            RuntimeError: if this was iterated over before.
        """
        planned, self._planned = self._planned, []
        if not planned:
            raise RuntimeError("the runs were made: call compare_losses(...) again for others")
        for number, (loss, seed, run) in enumerate(planned, 1):
            began_s = time.monotonic()
            status: Literal["complete", "failed", "stopped"] = "stopped"
            error = ""
            try:
                for report in run:
                    yield ComparisonStep(loss=loss, seed=seed, run=number, report=report)
                status = "complete"
            except Exception as raised:  # the other runs are made nevertheless
                status, error = "failed", str(raised) or type(raised).__name__
            finally:
                self._done.append(
                    SeedRun(
                        loss=loss,
                        seed=seed,
                        status=status,
                        wall_s=time.monotonic() - began_s,
                        error=error,
                        **_measured(run, complete=status == "complete"),
                    )
                )


def compare_losses(
    losses: Mapping[str, Loss],
    config: TrainConfig,
    *,
    seeds: int | Sequence[int] = 3,
) -> LossComparison:
    """Check all runs, and return them; they are made when the result is iterated over.

    All losses see the same seeds: the same problems in the same order, and the same random numbers.
    The runs are asynchronous nevertheless, so that a repetition differs by which weights generated
    which token.

    Args:
        losses: by the name to show; see `Loss`. Functions may be defined in a notebook.
        config: of every run, but for its seed. Pictures are not drawn.
        seeds: how many, from `config.seed` on, or which.

    Raises:
        ValueError: if there is no loss or no seed, or a named loss does not exist.
        ConfigError: one line per problem, before any process starts.
    """
    numbers = range(config.seed, config.seed + seeds) if isinstance(seeds, int) else list(seeds)
    if not losses:
        raise ValueError("losses is empty, but must have at least one, as {'PPO': None}")
    if not numbers:
        raise ValueError(f"seeds is {seeds!r}, but must give at least one, as 3 or [1, 2, 3]")
    functions = {
        name: load_function(loss) if isinstance(loss, str) else loss
        for name, loss in losses.items()
    }
    planned = []
    for seed in numbers:
        for name, function in functions.items():
            changed: dict[str, Any] = {
                "seed": seed,
                "plots": False,
                "experiment_name": f"{config.experiment_name}-{_as_file_name(name)}-seed-{seed}",
            }
            planned.append((name, seed, train(config.with_settings(changed), loss=function)))
    return LossComparison(planned, len(planned) * config.total_train_steps)


def _measured(run: TrainingRun, *, complete: bool) -> dict[str, Any]:
    """What a run measured, as fields of `SeedRun`."""
    summary = run.summary if complete else {}
    return {
        "rewards": tuple(report.reward_mean for report in run.reports),
        "held_out_before": _mean(summary.get("reward_before")),
        "held_out_after": _mean(summary.get("reward_after")),
        "lag_mean": _mean(summary.get("lag", {}).get("token")),
        "folder": _folder(run),
    }


def _mean(measured: Mapping[str, Any] | None) -> float | None:
    return None if measured is None else float(measured["mean"])


def _folder(run: TrainingRun) -> str:
    try:
        return str(run.folder)
    except RuntimeError:  # it could not be made
        return ""


def _as_file_name(name: str) -> str:
    words = "".join(character if character.isalnum() else " " for character in name).split()
    return "-".join(words).lower() or "loss"
