"""Compare losses by training with each loss and several seeds.

    comparison = compare_losses({"PPO": None, "mine": my_loss}, load_config("tiny"), seeds=3)
    for step in comparison:
        print(step.run, "of", comparison.runs, step.loss, step.seed, step.report.reward_mean)
    comparison.results.final_rewards()

Runs are sequential, because the trainer and the engine of one run use two cores. The outer loop is
over seeds, so all losses have an equal number of runs after a stop.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from areal_lab.config.functions import load_function
from areal_lab.config.given import Source, given_texts
from areal_lab.config.load import train_config
from areal_lab.config.schema import TrainConfig
from areal_lab.pipeline.train import TrainingRun, train
from areal_lab.runlog.seeds import SeedResults, SeedRun
from areal_lab.shell.step_report import StepReport

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )

Loss: TypeAlias = "Callable[..., HasLoss] | str | None"
"""A loss function, its import path `module:function`, or None for the loss of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonStep:
    """A training step of one of the runs."""

    loss: str
    seed: int
    run: int
    """Number of the run, counted from 1."""
    report: StepReport


class LossComparison:
    """Runs of several losses with several seeds; iterating over it once makes the runs.

    A failed run is listed with its error, and the others continue. Leaving the loop early stops the
    current run and keeps the results of complete ones.
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
        """Results of the runs that have ended so far."""
        return SeedResults(tuple(self._done))

    def __iter__(self) -> Iterator[ComparisonStep]:
        """Make the runs, and yield after each training step.

        Raises:
            RuntimeError: the runs were made before.
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
            except Exception as raised:  # the other runs continue
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
    losses: Mapping[str, Loss] | Iterable[str],
    config: TrainConfig | Source,
    *,
    seeds: int | Sequence[int] = 3,
) -> LossComparison:
    """Check all runs and return them; iterating over the result makes them.

    All losses get the same seeds: the same problems in the same order, and the same random numbers.
    The runs are asynchronous, so a repetition differs in the weights that generated each token.

    Args:
        losses: losses by their names in the results (see `Loss`), also functions of a notebook; or
            a list of named losses (`["gspo", "dapo"]`).
        config: settings of all runs except the seed, or an argument of `load_config`. Pictures are
            not drawn.
        seeds: number of seeds, from `config.seed` on, or a list of seeds.

    Raises:
        ValueError: there is no loss or no seed, or a named loss does not exist.
        ConfigError: one line per problem, before any process starts.
    """
    config = train_config(config)
    if not isinstance(losses, Mapping):
        losses = {name: name for name in given_texts(losses, "losses")}
    numbers = _numbers(seeds, config.seed)
    if not losses:
        raise ValueError("losses is empty, but must have at least one, such as {'PPO': None}")
    if not numbers:
        raise ValueError(f"seeds is {seeds!r}, but must give at least one, such as 3 or [1, 2, 3]")
    functions = {
        name: load_function(loss) if isinstance(loss, str) and ":" in loss else loss
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


def _numbers(seeds: object, first: int) -> list[int]:
    try:
        if isinstance(seeds, Iterable) and not isinstance(seeds, str):
            return [operator.index(seed) for seed in seeds]
        if isinstance(seeds, SupportsIndex):
            return list(range(first, first + operator.index(seeds)))
    except TypeError:
        pass
    raise ValueError(
        f"seeds is {seeds!r:.60}, but must be a number or a list of seeds: 3 or [1, 2, 3]"
    )


def _measured(run: TrainingRun, *, complete: bool) -> dict[str, Any]:
    """Return the measurements of a run as fields of `SeedRun`."""
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
    except RuntimeError:  # the folder could not be made
        return ""


def _as_file_name(name: str) -> str:
    words = "".join(character if character.isalnum() else " " for character in name).split()
    return "-".join(words).lower()[:60] or "loss"
