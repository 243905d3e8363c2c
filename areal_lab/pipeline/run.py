"""One training run from its configuration to its summary: processes up, measure, drive, measure.

    check -> trainer up -> engines up -> held-out before -> drive -> held-out after -> summary

Every process the run starts is stopped when it ends, however it ends. The death of the trainer ends
the run with its last words, that of the last engine too, unless it may come back; reward workers
are replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lab.config.problem import ConfigError, problems_of
from areal_lab.config.schema import TrainConfig
from areal_lab.control.coordinator import NO_ENGINE_LEFT, Coordinator
from areal_lab.control.events import Event, Finish, GroupId, RunStarted, StopRequested
from areal_lab.data.problems import ProblemSet
from areal_lab.data.sources import load_problems
from areal_lab.host.memory import group_peak_rss_bytes
from areal_lab.pipeline.drive import drive
from areal_lab.pipeline.evaluate import HeldOutReward, measure
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.outcome import Known, summary_so_far, write_failure
from areal_lab.pipeline.performer import LiveRun
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.report import write_report
from areal_lab.pipeline.rollout import Rollout
from areal_lab.pipeline.startup import Task, bring_up
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.pipeline.step_report import StepReport
from areal_lab.preflight import check as preflight
from areal_lab.preflight.limits import limits_of
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.summary import PEAK_MEMORY

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process can spare
    )


WIND_UP_S = 8.0
"""How long the running step may take to end and be saved once no engine is left."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run leaves."""

    folder: Path
    summary: dict[str, Any]


def prepare(
    config: TrainConfig,
    problems: ProblemSet | None = None,
    loss: Callable[..., HasLoss] | None = None,
) -> ProblemSet:
    """Check everything that can be checked before a process starts; return the problems.

    Raises:
        ConfigError: in one line, naming the value, the bound and the mend.
    """
    preflight.check(config, problems)
    if loss is not None:
        from areal_lab.training.loss import check_loss  # torch, which the caller has by now

        try:
            check_loss(loss, "loss")
        except ValueError as error:
            raise ConfigError(*problems_of(error, "loss", named=True)) from error
    return problems or load_problems(config.dataset, seed=config.seed)


async def run(
    config: TrainConfig,
    problems: ProblemSet,
    *,
    on_step: Callable[[StepReport], None],
    display: Display,
    stop: StopSignal,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | None = None,
    answer_tokens: Callable[[GroupId, int], int] | None = None,
    state: RunState | None = None,
) -> RunResult:
    """Run to the end, or to the first error.

    Args:
        problems: what `prepare` returned for this configuration.
        on_step: called on the event loop after each step.
        stop: asks for an orderly end.
        reward_fn: judges instead of `config.reward.fn`.
        loss: trains instead of what `config.actor` says; see `functional.PolicyLoss`.
        answer_tokens: exact length of each sample (`Rollout.answer_tokens`).
        state: filled in as the run goes on, for whoever shows it.

    Raises:
        ChildDied: an engine or the trainer ended; with its last words.
        Exception: the first error of any part, not an exception group.
    """
    state = state or RunState()
    folder = RunFolder.create(config)
    display.phase(f"run folder {folder.path}")
    for note in preflight.notes(config):
        display.note(f"note: {note}")
    began_s, known = time.time(), Known()
    try:
        async with Fleet() as fleet:
            task = Task(
                config=config,
                problems=problems,
                on_step=on_step,
                display=display,
                stop=stop,
                reward_fn=reward_fn or config.reward.fn,
                loss=loss,
                state=state,
                answer_tokens=answer_tokens,
                folder=folder,
                fleet=fleet,
                known=known,
            )
            summary = await fleet.guard(_measured_run(task))
    except BaseException as error:
        wall_s = time.time() - began_s
        write_failure(error, folder, config, known, wall_s=wall_s, note=display.note)
        raise
    folder.write_json("summary.json", summary)
    if config.plots:
        display.phase("drawing reward.png, timeline.png, staleness.png")
        await asyncio.to_thread(write_report, folder.path)
    return RunResult(folder.path, summary)


async def _measured_run(task: Task) -> dict[str, Any]:
    """Start everything, measure, train, measure again; returns the summary."""
    began_s = time.time()
    known, display = task.known, task.display
    live = await bring_up(task)
    known.before = await _measure(task, live.rollout, "before training")
    display.phase("training")
    live.begin()
    coordinator = Coordinator(limits_of(task.config))
    task.state.coordinator, task.state.live = coordinator, live
    task.state.children = task.fleet.children
    finish = await _drive(task, coordinator, live)
    if finish.reason == "stopped":
        saved = live.last_checkpoint
        display.note(f"stopped as asked; saved: {'nothing yet' if saved is None else f'v{saved}'}")
    task.state.coordinator = None
    known.after = await _measure(task, live.rollout, "after training")
    await live.collect_engine_spans(final=True)
    live.log_counts()
    for child in task.fleet.children:
        live.log.metric(child.name, PEAK_MEMORY, group_peak_rss_bytes(child.pid))
    log = read_log_file(task.folder.events)
    return summary_so_far(known, task.config, log, wall_s=time.time() - began_s)


async def _measure(task: Task, rollout: Rollout, when: str) -> HeldOutReward | None:
    """The held-out reward now; None if evaluation is switched off or a stop was asked for."""
    evaluation = task.config.evaluation
    if evaluation.max_problems == 0 or task.stop.requested:
        return None
    measuring = asyncio.create_task(
        measure(
            rollout,
            task.problems.held_out[: evaluation.max_problems],
            samples=evaluation.samples_per_problem,
            when=when,
            display=task.display,
        )
    )
    stopping = asyncio.create_task(task.stop.wait())
    try:
        await asyncio.wait({measuring, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return measuring.result() if measuring.done() else None
    finally:
        stopping.cancel()
        measuring.cancel()


async def _drive(task: Task, coordinator: Coordinator, live: LiveRun) -> Finish:
    """Drive the run; a stop asked for from anywhere becomes an event."""
    events: asyncio.Queue[Event] = asyncio.Queue()

    async def pass_on_stop() -> None:
        await task.stop.wait()
        task.display.note("stopping: the running step ends and is saved (again to stop at once)")
        events.put_nowait(StopRequested())

    passing = asyncio.create_task(pass_on_stop(), name="stop")
    telling = asyncio.create_task(task.state.keep_fresh(), name="state for the display")
    started = RunStarted(await live.servers.begin(events.put_nowait))
    driving = asyncio.create_task(drive(coordinator, live, started, events, live.log), name="drive")
    losing = asyncio.create_task(live.servers.given_up.wait(), name="watch engines")
    try:
        await asyncio.wait({driving, losing}, return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            await asyncio.wait({driving}, timeout=WIND_UP_S)
        if driving.done() and driving.result().reason != NO_ENGINE_LEFT:
            return driving.result()
        await losing
        live.log_counts()
        assert live.servers.last_words is not None, "a lost engine leaves a reason"
        raise live.servers.last_words
    finally:
        live.servers.end()
        for helper in (passing, telling, losing, driving):
            helper.cancel()
        with suppress(asyncio.CancelledError, Exception):  # it was raised above
            await driving
