"""Train from Python: build a configuration, call `train`, and iterate over the run or hold it.

    for report in train(load_config("arithmetic", ["total_train_steps=20"])):
        print(report.step, report.reward_mean)

    run = train(config).start()           returns at once
    run.snapshot(), run.reports           what it does, and what it has done
    run.pause(), run.set_eta(4), run.resume(), run.stop()
    run.wait()                            until it has ended; raises its error

The run has its own thread and event loop, so it works in a notebook whose loop is already running.
Callers that have a loop call `pipeline.run.run`. A run that nothing refers to any more is stopped,
and one that still runs when the program ends is cancelled; `start_run` starts one that outlives it.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import ProblemSet
from areal_lab.live.attach import AttachedRun, attach_run
from areal_lab.live.presence import mark_ended
from areal_lab.live.snapshot import Snapshot
from areal_lab.pipeline.progress import Display, Silent
from areal_lab.pipeline.requests import make_reachable
from areal_lab.pipeline.resume.recovery import Recovery, find_recovery
from areal_lab.pipeline.run import RunResult, prepare, prepare_recovery, run
from areal_lab.pipeline.state import StopSignal
from areal_lab.pipeline.step_report import StepReport
from areal_lab.preflight.check import notes
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.folder import RunFolder

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )

END_S: Final = 15.0
"""Longest wait, when the program ends, for a cancelled run to stop its processes; those that are
left then stop by themselves (`host.processes`)."""
_NOT_STARTED = "the run has not started: iterate over it, or call start()"
_running: dict[threading.Thread, _Work] = {}
"""The runs of this program that have not ended."""


@dataclass(slots=True, kw_only=True)
class _Work:
    """A run in its thread; refers to nothing that refers to its `TrainingRun`."""

    config: TrainConfig
    problems: ProblemSet
    reward_fn: RewardFunction | None
    loss: Callable[..., HasLoss] | None
    display: Display
    folder: RunFolder
    recovery: Recovery | None = None
    stop: StopSignal = field(default_factory=StopSignal)
    reports: list[StepReport] = field(default_factory=list)
    result: RunResult | None = None
    error: BaseException | None = None
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified at each report and at the end."""
    _loop: asyncio.AbstractEventLoop | None = None
    _task: asyncio.Task[Any] | None = None
    _cancelled: bool = False

    def work(self) -> None:
        """Run to the end, in the run's thread."""
        result, error = None, None
        try:
            result = asyncio.run(self._run())
        except BaseException as raised:  # kept for the caller's thread
            error = raised
        with suppress(OSError, ValueError):  # it has, unless it was cancelled before it began
            mark_ended(self.folder.path)
        with self.changed:
            self.result, self.error, self.ended = result, error, True
            self.changed.notify_all()
        _running.pop(threading.current_thread(), None)

    def cancel(self) -> None:
        """End at once, as the second Ctrl-C does in a terminal. From any thread."""
        self._cancelled = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    async def _run(self) -> RunResult:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await run(
            self.config,
            self.problems,
            reward_fn=self.reward_fn,
            loss=self.loss,
            on_step=self._add,
            display=self.display,
            stop=self.stop,
            folder=self.folder,
            recovery=self.recovery,
        )

    def _add(self, report: StepReport) -> None:
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()


class TrainingRun:
    """A run in this program: iterate over its steps, or start it and hold it.

    Iterating starts it; leaving that loop early saves and stops it. After `start` it continues by
    itself, and a loop over it only follows. Methods may be called from any thread.
    """

    def __init__(
        self,
        config: TrainConfig,
        problems: ProblemSet,
        reward_fn: RewardFunction | None,
        loss: Callable[..., HasLoss] | None,
        display: Display,
        *,
        recovery: Recovery | None = None,
    ) -> None:
        self._inputs: dict[str, Any] = {
            "config": config,
            "problems": problems,
            "reward_fn": reward_fn,
            "loss": loss,
            "display": display,
            "recovery": recovery,
        }
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None
        self._attached: AttachedRun | None = None
        self._followed = False
        """Whether iterating has started it."""

    def start(self) -> TrainingRun:
        """Start the run in a thread and return it at once.

        Raises:
            RuntimeError: if it was started before.
            OSError: if the run folder cannot be made.
        """
        if self._work is not None:
            raise RuntimeError("a run is started once; call train(...) again for another one")
        recovery: Recovery | None = self._inputs["recovery"]
        folder = recovery.folder if recovery else RunFolder.create(self._inputs["config"])
        make_reachable(folder.path)
        self._attached = attach_run(folder.path)
        self._work = _Work(**self._inputs, folder=folder)
        # A daemon, so that a run that hangs cannot keep the program from ending.
        self._thread = threading.Thread(target=self._work.work, name="areal_lab run", daemon=True)
        _running[self._thread] = self._work
        self._thread.start()
        weakref.finalize(self, self._work.stop.request).atexit = False
        return self

    @property
    def folder(self) -> Path:
        """The run folder, from `start` on.

        Raises:
            RuntimeError: if the run has not started.
        """
        return self._begun().folder.path

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """The steps so far; never waits."""
        return () if self._work is None else tuple(self._work.reports)

    @property
    def running(self) -> bool:
        """Whether the run was started and has not ended."""
        return self._work is not None and not self._work.ended

    @property
    def error(self) -> BaseException | None:
        """What ended the run early; None if nothing did, or it still runs."""
        return None if self._work is None else self._work.error

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`, once the run has ended.

        Raises:
            RuntimeError: if it has not ended.
            Exception: what ended it early.
        """
        if self.error is not None:
            raise self.error
        result = None if self._work is None else self._work.result
        if result is None:
            raise RuntimeError(
                _NOT_STARTED if self._work is None else "the run has not ended: wait() for it"
            )
        return result.summary

    def snapshot(self) -> Snapshot:
        """What the run does and waits for now; never waits itself.

        Raises:
            RuntimeError: if the run has not started.
        """
        return self._control().snapshot()

    def pause(self) -> str:
        """See `AttachedRun.pause`."""
        return self._control().pause()

    def resume(self) -> str:
        """See `AttachedRun.resume`."""
        return self._control().resume()

    def set_eta(self, eta: float) -> str:
        """See `AttachedRun.set_eta`."""
        return self._control().set_eta(eta)

    def stop(self, *, at_once: bool = False) -> None:
        """Request the end after the running step, which is saved; returns at once.

        Args:
            at_once: do not finish the step, and save nothing, as the second Ctrl-C.
        """
        work = self._begun()
        if at_once:
            work.cancel()
        else:
            work.stop.request()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended; returns whether it has. Ctrl-C ends the wait, not the run.

        Args:
            timeout_s: None waits without a limit.

        Raises:
            Exception: what ended the run early, such as `ChildDied`.
        """
        work = self._begun()
        with work.changed:
            work.changed.wait_for(lambda: work.ended, timeout_s)
        if work.error is not None:
            raise work.error
        return work.ended

    def __iter__(self) -> Iterator[StepReport]:
        """Start the run if necessary, and yield a report after each step, from the first one on.

        Raises:
            Exception: whatever ended the run early, such as `ChildDied`.
        """
        if self._followed:
            raise RuntimeError("a run can be iterated over once; call train(...) again")
        started_here = self._work is None
        if started_here:
            self._followed = True
            self.start()
        work, thread = self._begun(), self._thread
        assert thread is not None
        try:
            yield from _reports(work)
            if work.error is not None:
                raise work.error
        finally:  # also when the caller breaks out of its loop, or presses Ctrl-C
            if started_here:
                work.stop.request()
                thread.join()

    def __repr__(self) -> str:
        return "<run, not started>" if self._attached is None else repr(self._attached)

    def _begun(self) -> _Work:
        if self._work is None:
            raise RuntimeError(_NOT_STARTED)
        return self._work

    def _control(self) -> AttachedRun:
        self._begun()
        assert self._attached is not None, "start sets both"
        return self._attached


def _reports(work: _Work) -> Iterator[StepReport]:
    """The reports as they come, until the end."""
    given = 0
    while True:
        with work.changed:
            while len(work.reports) == given and not work.ended:
                work.changed.wait()
            new = work.reports[given:]
        if not new:
            return
        given += len(new)
        yield from new


def _end_with_the_program() -> None:
    """Cancel the runs that still run when the program ends, and wait until they have ended."""
    running = dict(_running)
    for work in running.values():
        work.cancel()
    until_s = time.monotonic() + END_S
    for thread in running:
        thread.join(max(0.0, until_s - time.monotonic()))


# Before the executors stop, which a run needs to stop its processes; atexit comes after that. The
# last to register is the first to be called, so theirs has to be there.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_end_with_the_program)


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
    _warn_of_notes(config, display)
    return TrainingRun(config, checked, reward_fn, loss, display or Silent())


def resume_run(
    folder: Path | str,
    overrides: Sequence[str] = (),
    *,
    problems: ProblemSet | None = None,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | None = None,
    display: Display | None = None,
) -> TrainingRun:
    """Check that a run can continue from its newest checkpoint, in its folder, and return it.

    Problems and functions that were given to `train` are given again.

    Args:
        folder: of a run that ended or was killed.
        overrides: changed settings, as `total_train_steps=60`; a run keeps most of them.

    Raises:
        ConfigError: one line per problem, before anything in the folder is changed.
    """
    recovery = find_recovery(folder, overrides)
    checked = prepare_recovery(recovery, problems, reward_fn, loss)
    _warn_of_notes(recovery.config, display)
    return TrainingRun(
        recovery.config, checked, reward_fn, loss, display or Silent(), recovery=recovery
    )


def _warn_of_notes(config: TrainConfig, display: Display | None) -> None:
    if display is None:
        for note in notes(config):
            warnings.warn(note, stacklevel=3)
