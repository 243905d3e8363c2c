"""Train from Python: make a configuration, call `train`, and iterate over the run or start it.

    for report in train(load_config("arithmetic", ["total_train_steps=20"])):
        print(report.step, report.reward_mean)

    run = train(config).start()           returns immediately
    run.snapshot(), run.reports           live status, finished steps
    run.pause(), run.set_eta(4), run.resume(), run.stop()
    run.wait()                            returns at the end of the run; raises its error

The run has a separate thread and event loop, so it works in a notebook with a running loop. Callers
that have a loop call `pipeline.run.run`. A run is stopped if its object is garbage-collected, and
canceled if the program ends. `start_run` starts a run that continues after the end of the program.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_lab.config.given import Overrides, Source, given_path
from areal_lab.config.load import train_config
from areal_lab.config.problem import refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.live.attach import AttachedRun, attach_run
from areal_lab.live.presence import mark_ended
from areal_lab.live.snapshot import Snapshot
from areal_lab.pipeline.resume.recovery import Recovery, find_recovery, resolve_recovery
from areal_lab.pipeline.run import RunResult, run
from areal_lab.resolve.resolved import Resolved, resolve
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display, Silent
from areal_lab.shell.requests import make_reachable
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )

END_S: Final = 15.0
"""Maximum wait at the end of the program for a canceled run to stop its processes; later they stop
by themselves (`host.processes`)."""
_NOT_STARTED = "the run has not started: iterate over it, or call start()"
_running: dict[threading.Thread, _Work] = {}
"""Runs of this program that have not ended."""


@dataclass(slots=True, kw_only=True)
class _Work:
    """A run in its thread, without references to its `TrainingRun`, which may be collected."""

    resolved: Resolved
    display: Display
    folder: RunFolder
    recovery: Recovery | None = None
    stop: StopSignal = field(default_factory=StopSignal)
    reports: list[StepReport] = field(default_factory=list)
    result: RunResult | None = None
    error: BaseException | None = None
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified of each report and of the end."""
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
        with suppress(OSError, ValueError):  # needed only if the run was canceled before its start
            mark_ended(self.folder.path)
        with self.changed:
            self.result, self.error, self.ended = result, error, True
            self.changed.notify_all()
        _running.pop(threading.current_thread(), None)

    def cancel(self) -> None:
        """End immediately, as after the second Ctrl-C in a terminal. Any thread may call this."""
        self._cancelled = True
        loop, task = self._loop, self._task
        if loop is not None and task is not None and not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)

    async def _run(self) -> RunResult:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        return await run(
            self.resolved,
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
    """A run in this program: iterate over its steps, or start it in the background.

    Iterating starts the run, and leaving that loop early saves and stops it. After `start`, the run
    does not depend on loops over it. Methods may be called from any thread.
    """

    def __init__(
        self, resolved: Resolved, display: Display, *, recovery: Recovery | None = None
    ) -> None:
        self._resolved, self._display, self._recovery = resolved, display, recovery
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None
        self._attached: AttachedRun | None = None
        self._followed = False
        """True if iterating has started the run."""

    def start(self) -> TrainingRun:
        """Start the run in a thread and return immediately.

        Raises:
            RuntimeError: the run was started before.
            OSError: the run folder cannot be made.
        """
        if self._work is not None:
            raise RuntimeError("a run is started once; call train(...) again for another one")
        resolved, recovery = self._resolved, self._recovery
        folder = recovery.folder if recovery else RunFolder.create(resolved.config)
        make_reachable(folder.path)
        self._attached = attach_run(folder.path)
        self._work = _Work(
            resolved=resolved, display=self._display, folder=folder, recovery=recovery
        )
        # A daemon thread, so a hung run cannot keep the program from ending.
        self._thread = threading.Thread(target=self._work.work, name="areal_lab run", daemon=True)
        _running[self._thread] = self._work
        self._thread.start()
        weakref.finalize(self, self._work.stop.request).atexit = False
        return self

    @property
    def folder(self) -> Path:
        """Run folder, available after `start`.

        Raises:
            RuntimeError: the run has not started.
        """
        return self._require_started().folder.path

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """Reports of the steps so far; never waits."""
        return () if self._work is None else tuple(self._work.reports)

    @property
    def running(self) -> bool:
        """True from the start of the run to its end."""
        return self._work is not None and not self._work.ended

    @property
    def error(self) -> BaseException | None:
        """Error that ended the run; None without an error or during the run."""
        return None if self._work is None else self._work.error

    @property
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`, available after the end of the run.

        Raises:
            RuntimeError: the run has not ended.
            Exception: the error that ended the run.
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
        """Return the live status of the run; never waits.

        Raises:
            RuntimeError: the run has not started.
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
        """Request a stop after the running step, which is saved; returns immediately.

        Args:
            at_once: stop immediately without saving, as after the second Ctrl-C.
        """
        work = self._require_started()
        if at_once:
            work.cancel()
        else:
            work.stop.request()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the run; Ctrl-C ends the wait, not the run.

        Args:
            timeout_s: maximum wait; None waits without a limit.

        Returns:
            True if the run has ended.

        Raises:
            Exception: the error that ended the run, such as `ChildDied`.
        """
        work = self._require_started()
        with work.changed:
            work.changed.wait_for(lambda: work.ended, timeout_s)
        if work.error is not None:
            raise work.error
        return work.ended

    def __iter__(self) -> Iterator[StepReport]:
        """Start the run if necessary, and yield the report of each step, from the first one on.

        Raises:
            RuntimeError: the run was iterated over before.
            Exception: the error that ended the run, such as `ChildDied`.
        """
        if self._followed:
            raise RuntimeError("a run can be iterated over once; call train(...) again")
        started_here = self._work is None
        if started_here:
            self._followed = True
            self.start()
        work, thread = self._require_started(), self._thread
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

    def _require_started(self) -> _Work:
        if self._work is None:
            raise RuntimeError(_NOT_STARTED)
        return self._work

    def _control(self) -> AttachedRun:
        self._require_started()
        assert self._attached is not None, "start sets both"
        return self._attached


def _reports(work: _Work) -> Iterator[StepReport]:
    """Yield the reports until the end of the run."""
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
    """Cancel the running trainings at the end of the program, and wait for their ends."""
    running = dict(_running)
    for work in running.values():
        work.cancel()
    until_s = time.monotonic() + END_S
    for thread in running:
        thread.join(max(0.0, until_s - time.monotonic()))


# A run needs thread executors to stop its processes, and atexit runs after these have stopped. The
# last registered function is called first, so the executors' one must be registered before.
importlib.import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_end_with_the_program)


def train(
    config: TrainConfig | Source,
    *,
    problems: object = None,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | str | Mapping[str, Any] | None = None,
    advantage: Callable[..., Any] | str | Mapping[str, Any] | None = None,
    display: Display | None = None,
) -> TrainingRun:
    """Check a configuration and return the run, which starts when it is iterated over.

    Args:
        config: settings of the run (`areal_lab.config.schema`), or an argument of `load_config`: a
            name, a path, or settings by name.
        problems: problems instead of `config.dataset`: a `ProblemSet`; a list or iterable of
            problems or rows; a frame, a table or a data set of `datasets`, whose fields `dataset`
            names; a path; or a pair of these, for training and for evaluation.
        reward_fn: reward function instead of `config.reward.fn`; may be defined in a notebook.
        loss: policy loss instead of `config.actor.loss`, with the signature of
            `areal_lab.functional.PolicyLoss`; may be defined in a notebook. Or a value for
            `actor.loss`, such as a name.
        advantage: advantages instead of `config.actor.advantage`: a function of `(rewards [N],
            groups [N])`, and by name of `training.objective.advantages.AdvantageFacts` but for
            values of a critic; may be defined in a notebook. Or a value for `actor.advantage`.
        display: shows the progress; None shows nothing and issues notes as warnings.

    Raises:
        ConfigError: one line per problem, before any process starts.
    """
    config = train_config(config)
    if isinstance(loss, str | Mapping):
        config, loss = config.with_settings({"actor.loss": loss}), None
    if isinstance(advantage, str | Mapping):
        config, advantage = config.with_settings({"actor.advantage": advantage}), None
    _check_given(reward_fn, display)
    resolved = resolve(config, problems, loss, reward_fn, advantage)
    _warn_of_notes(resolved, display)
    return TrainingRun(resolved, display or Silent())


def resume_run(
    folder: Path | str | TrainingRun | AttachedRun,
    overrides: Overrides | None = (),
    *,
    problems: object = None,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | None = None,
    advantage: Callable[..., Any] | None = None,
    display: Display | None = None,
) -> TrainingRun:
    """Check that a run can continue from its newest checkpoint, and return it.

    Problems and functions that were passed to `train` must be passed again.

    Args:
        folder: folder of a run that ended or was killed.
        overrides: changed settings, such as `total_train_steps=60`; most settings cannot change.
        problems: as for `train`.
        reward_fn: as for `train`.
        loss: as for `train`.
        advantage: as for `train`.
        display: as for `train`.

    Raises:
        ConfigError: one line per problem, before anything in the folder is changed.
    """
    _check_given(reward_fn, display)
    recovery = find_recovery(given_path(folder, "folder"), overrides)
    resolved = resolve_recovery(recovery, problems, reward_fn, loss, advantage)
    _warn_of_notes(resolved, display)
    return TrainingRun(resolved, display or Silent(), recovery=recovery)


def _check_given(reward_fn: object, display: object) -> None:
    """Refuse a `reward_fn` that is not a function, or a `display` without the methods of one."""
    named = reward_fn is None or isinstance(reward_fn, str)
    if not named and (isinstance(reward_fn, type) or not callable(reward_fn)):
        raise refusal(
            "reward_fn",
            f"reward_fn is {reward_fn!r:.60}, but must be a function of (completion, example), "
            'or the import path of one: "module:function"',
        )
    if display is not None and (isinstance(display, type) or not hasattr(display, "phase")):
        raise refusal(
            "display",
            f"display is {display!r:.60}, but must be None, or have the methods of "
            "areal_lab.shell.display.Display",
        )


def _warn_of_notes(resolved: Resolved, display: Display | None) -> None:
    if display is None:
        for note in resolved.notes:
            warnings.warn(note, stacklevel=3)
