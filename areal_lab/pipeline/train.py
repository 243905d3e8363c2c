"""Train from Python: build a configuration, call `train`, iterate over the steps.

    for report in train(load_config("arithmetic", ["total_train_steps=20"])):
        print(report.step, report.reward_mean)

The run has its own thread and event loop, so it works in a notebook whose loop is already running.
Callers that have a loop call `pipeline.run.run`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import ProblemSet
from areal_lab.pipeline.progress import Display, Silent
from areal_lab.pipeline.run import RunResult, prepare, run
from areal_lab.pipeline.state import StopSignal
from areal_lab.pipeline.step_report import StepReport
from areal_lab.preflight.check import notes
from areal_lab.rewards.service import RewardFunction

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )


class TrainingRun:
    """A run in progress; iterate over it once. Leaving the loop early saves and stops the run."""

    def __init__(
        self,
        config: TrainConfig,
        problems: ProblemSet,
        reward_fn: RewardFunction | None,
        loss: Callable[..., HasLoss] | None,
        display: Display,
    ) -> None:
        self._stop = StopSignal()
        self._reports: queue.SimpleQueue[StepReport | RunResult | BaseException] = (
            queue.SimpleQueue()
        )
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        """What ended the run after the caller left its loop; raised when results are read."""
        self._thread = threading.Thread(
            target=self._work,
            args=(config, problems, reward_fn, loss, display),
            name="areal_lab run",
        )

    @property
    def folder(self) -> Path:
        """The run folder, once the run has ended."""
        return self._ended().folder

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`, once the run has ended."""
        return self._ended().summary

    def __iter__(self) -> Iterator[StepReport]:
        """Start the run and yield a report after each step.

        Raises:
            Exception: whatever ended the run early, such as `ChildDied`.
        """
        if self._thread.ident is not None:
            raise RuntimeError("a run can be iterated over once; call train(...) again")
        self._thread.start()
        try:
            while not isinstance(message := self._reports.get(), RunResult):
                if isinstance(message, BaseException):
                    raise message
                yield message
            self._result = message
        finally:  # also when the caller breaks out of its loop, or presses Ctrl-C
            self._stop.request()
            self._thread.join()
            self._keep_end()

    def _keep_end(self) -> None:
        while not self._reports.empty():
            match self._reports.get():
                case RunResult() as result:
                    self._result = result
                case BaseException() as error:
                    self._error = error
                case _:
                    pass  # a step that ended after the caller left

    def _ended(self) -> RunResult:
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RuntimeError("the run has not ended: iterate over it first")
        return self._result

    def _work(
        self,
        config: TrainConfig,
        problems: ProblemSet,
        reward_fn: RewardFunction | None,
        loss: Callable[..., HasLoss] | None,
        display: Display,
    ) -> None:
        try:
            result = asyncio.run(
                run(
                    config,
                    problems,
                    reward_fn=reward_fn,
                    loss=loss,
                    on_step=self._reports.put,
                    display=display,
                    stop=self._stop,
                )
            )
        except BaseException as error:  # delivered to the caller's thread
            self._reports.put(error)
        else:
            self._reports.put(result)


def train(
    config: TrainConfig,
    *,
    problems: ProblemSet | None = None,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | None = None,
    display: Display | None = None,
) -> TrainingRun:
    """Check a configuration and return the run, which starts when it is iterated over.

    Args:
        config: see `areal_lab.config.schema`; `load_config` makes one from YAML and overrides.
        problems: train on these instead of `config.dataset`.
        reward_fn: score with this instead of `config.reward.fn`; may be defined in a notebook.
        loss: train with this policy loss instead of the one that `config.actor` names; it has the
            signature of `areal_lab.functional.PolicyLoss` and may be defined in a notebook.
        display: where to show progress; None shows nothing, and issues its notes as warnings.

    Raises:
        ConfigError: one line per problem, before any process starts.
    """
    checked = prepare(config, problems, loss)
    if display is None:
        for note in notes(config):
            warnings.warn(note, stacklevel=2)
    return TrainingRun(config, checked, reward_fn, loss, display or Silent())
