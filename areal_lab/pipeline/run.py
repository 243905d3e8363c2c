"""One training run, from its configuration to its summary.

    check -> trainer up -> engines up -> held-out before -> drive -> held-out after -> summary
                                                          held-out problems every n steps
      meanwhile: replies to requests from other processes (pause, resume, eta, stop)

Every process that the run started is stopped at its end, also after an error. The run ends with an
error if the trainer dies, or if the last engine is lost and may not restart. Reward workers are
replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_lab.config.problem import refusal
from areal_lab.control.coordinator import NO_ENGINE_LEFT, TOO_FEW_GROUPS, Coordinator
from areal_lab.control.evaluation import to_measure_again
from areal_lab.control.events import Event, Finish, GroupId, RunStarted, StopRequested, Version
from areal_lab.control.scaling import ScalingWatch
from areal_lab.models.checkpoint_files import checkpoint_fault
from areal_lab.pipeline.drive import Observer, ScaledRun, UserRequest, drive
from areal_lab.pipeline.evaluate import announced, measure
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.outcome import SummaryInputs, summary_of_failure, summary_so_far
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.report import write_report
from areal_lab.pipeline.requests import ControlChannel
from areal_lab.pipeline.resume.checkpoints import measurements, saved_checkpoints
from areal_lab.pipeline.resume.recovery import Recovery
from areal_lab.pipeline.startup import RunContext, start_run
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.resolved import Resolved, memory_notes
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward, append_held_out
from areal_lab.runlog.summary import PEAK_MEMORY
from areal_lab.shell.display import Display
from areal_lab.shell.recorded import Ending, recorded
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal

Result = TypeVar("Result")

LAST_STEP_TIMEOUT_S = 8.0
"""Maximum wait for the running step to end and be saved once no engine is left."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The folder and the summary of a finished run."""

    folder: Path
    summary: dict[str, Any]


async def run(
    resolved: Resolved,
    *,
    on_step: Callable[[StepReport], None],
    display: Display,
    stop: StopSignal,
    response_tokens: Callable[[GroupId, int], int] | None = None,
    state: RunState | None = None,
    folder: RunFolder | None = None,
    recovery: Recovery | None = None,
) -> RunResult:
    """Run to the end, or to the first error.

    Args:
        resolved: result of `resolve` or `resolve_recovery`.
        on_step: called on the event loop after each step.
        display: shows the progress.
        stop: requests a stop after the running step.
        response_tokens: exact length of each sample (`Rollout.response_tokens`).
        state: updated during the run, for displays.
        folder: new run folder with the configuration; None creates it.
        recovery: run to continue in its folder, with its configuration.

    Raises:
        ChildDied: an engine or the trainer ended; carries the end of its output.
        ConfigError: dynamic sampling found too few groups with different rewards.
        Exception: the first error of any part, taken out of exception groups.
    """
    state = state or RunState()
    if recovery is not None:
        folder = recovery.folder
    config, folder = resolved.config, folder or RunFolder.create(resolved.config)
    channel = ControlChannel(Coordinator(recovery.limits if recovery else resolved.limits), stop)
    inputs, path = SummaryInputs(), folder.path
    ending = Ending(
        draw=write_report,
        pictures="reward.png, timeline.png, staleness.png",
        failure=lambda wall_s: summary_of_failure(path, resolved, inputs, wall_s=wall_s),
    )
    async with recorded(config, folder, display, ending, stop, submit=channel.submit) as recording:
        shown = recording.display
        shown.phase(f"run folder {path}")
        if recovery is not None:
            await asyncio.to_thread(recovery.cut_back)
            for note in (recovery.in_words(), *recovery.notes):
                shown.note(note)
        for note in (*resolved.notes, *memory_notes(resolved)):
            shown.note(f"note: {note}")
        try:
            async with Fleet() as fleet:
                context = RunContext(
                    resolved=resolved,
                    on_step=on_step,
                    display=shown,
                    stop=stop,
                    channel=channel,
                    state=state,
                    response_tokens=response_tokens,
                    folder=recording.folder,
                    fleet=fleet,
                    inputs=inputs,
                    recovery=recovery,
                )
                recording.summary = await fleet.guard(_measured_run(context))
        except Exception:
            if inputs.performer is not None and not recording.taken:
                shown.note(_continues(inputs.performer, folder))
            raise
    return RunResult(path, recording.summary)


async def _measured_run(context: RunContext) -> dict[str, Any]:
    """Start the processes, measure, train and measure again; returns the summary."""
    began_s = time.time()
    inputs, display = context.inputs, context.display
    performer = await start_run(context)
    saved = None if context.recovery is None else context.recovery.saved
    if context.recovery is None or saved is None:
        inputs.before = await _measure(
            context, performer, "held-out problems before training", version=0
        )
    else:
        inputs.before = context.recovery.before
    performer.checkpoints.before = inputs.before
    display.phase("training")
    performer.begin(saved.training_s if saved else 0.0)
    coordinator = context.channel.coordinator
    context.state.coordinator, context.state.performer = coordinator, performer
    context.state.children = context.fleet.children
    try:
        finish = await _drive(context, coordinator, performer)
        if (left := performer.evaluations.progress) and finish.reason == "complete":
            display.phase(f"{left}; training is complete")
            await _until_stopped(context, performer.evaluations.finish())
    finally:
        await performer.evaluations.cancel()
    if finish.reason == TOO_FEW_GROUPS:
        raise refusal(
            "rollout.dynamic_sampling",
            f"rollout.dynamic_sampling: {coordinator.failure}; {_saved(performer)}",
        )
    if finish.reason == "stopped":
        display.note(f"stopped as requested; {_saved(performer)}")
    context.state.coordinator = None
    inputs.after = await _measure(
        context,
        performer,
        "held-out problems after training",
        version=coordinator.counts.trained_version,
    )
    if inputs.after is not None:
        await _settle_best(context, performer)
    await performer.collect_engine_spans(final=True)
    performer.log_counts()
    for child in context.fleet.children:
        performer.log.metric(child.name, PEAK_MEMORY, await child.peak_memory_bytes())
    log = read_log_file(context.folder.events)
    before_s = saved.training_s if saved else 0.0
    return summary_so_far(inputs, context.resolved, log, wall_s=before_s + time.time() - began_s)


def _saved(performer: RunPerformer) -> str:
    newest = performer.last_checkpoint
    return "saved: nothing yet" if newest is None else f"saved: version {newest}"


def _continues(performer: RunPerformer, folder: RunFolder) -> str:
    """Describe the newest checkpoint of a failed run in a line, with the command to continue."""
    if performer.last_checkpoint is None:
        return _saved(performer)
    return f"{_saved(performer)}; areal-lab train --resume {folder.path} continues from it"


async def _measure(
    context: RunContext, performer: RunPerformer, what: str, *, version: Version
) -> HeldOutReward | None:
    """Measure the engines' weights while nothing else runs, and append them to held_out.jsonl.

    Args:
        context: the run.
        performer: its executor.
        what: name of the measurement, for the display.
        version: version of the weights.

    Returns:
        None if evaluation is off or a stop was requested.
    """
    evaluation, evaluations = context.resolved.config.evaluation, performer.evaluations
    if not evaluations.problems or context.stop.requested:
        return None
    total, samples = len(evaluations.problems), evaluation.samples_per_problem
    found = await _until_stopped(
        context,
        measure(
            evaluations.rollout,
            evaluations.problems,
            samples=samples,
            ks=evaluation.pass_at,
            done=announced(context.display, what, total=total, samples=samples),
        ),
    )
    if found is not None:
        context.folder.check_claim()
        append_held_out(context.folder.path, found.measured(version))
    return found


async def _until_stopped(context: RunContext, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run `work` and return its result; a stop request cancels it and returns None."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(context.stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()


async def _settle_best(context: RunContext, performer: RunPerformer) -> None:
    """Choose the best checkpoint by exact scores, each measured with a single version.

    While the highest score has responses of several versions, the engines load that checkpoint and
    it is measured again, at most `evaluation.remeasure` times. A failure keeps the other scores.
    """
    folder = context.folder
    for _ in range(context.resolved.config.evaluation.remeasure):
        saved = saved_checkpoints(folder)
        scores = {version: one.score for version, one in measurements(folder).items()}
        version = to_measure_again(scores, saved)
        if version is None or context.stop.requested:
            break
        try:
            if fault := await asyncio.to_thread(checkpoint_fault, saved[version], version):
                raise ValueError(fault)
            await performer.load_checkpoint(version, saved[version])
            what = f"held-out problems again with step {version}, the best so far"
            await _measure(context, performer, what, version=version)
        except Exception as error:  # training is complete, and its results must not be lost
            reason = str(first_error(error)).splitlines()[0]
            context.display.note(f"step {version} was not measured again: {reason}")
            break
    best = (await performer.checkpoints.retain(exact=True)).best
    if best is not None:
        context.display.note(f"best checkpoint: step {best}, {measurements(folder)[best]}")


def _observer(context: RunContext, performer: RunPerformer) -> Observer:
    """Return the log as observer, with the scaling rule if it is on."""
    servers = performer.servers
    rule = context.resolved.config.rollout.scaling.rule(servers.startup_s)
    if rule is None:
        return performer.log
    return ScaledRun(
        log=performer.log,
        watch=ScalingWatch(rule, context.channel.coordinator),
        pool=servers,
        generated_tokens=lambda: performer.tally.generated_tokens,
    )


async def _drive(context: RunContext, coordinator: Coordinator, performer: RunPerformer) -> Finish:
    """Drive the run, and turn a stop request into an event."""
    events: asyncio.Queue[Event | UserRequest] = asyncio.Queue()

    async def forward_stop() -> None:
        await context.stop.wait()
        events.put_nowait(StopRequested())

    stop_task = asyncio.create_task(forward_stop(), name="stop")
    state_task = asyncio.create_task(
        context.state.refresh_until_cancelled(), name="state for the display"
    )
    engines = await performer.servers.begin(events.put_nowait)
    recovery = context.recovery
    started = RunStarted(engines) if recovery is None else recovery.started(engines)
    context.channel.begin(events)
    drive_task = asyncio.create_task(
        drive(coordinator, performer, started, events, _observer(context, performer)), name="drive"
    )
    loss_task = asyncio.create_task(performer.servers.given_up.wait(), name="watch engines")
    evaluations = performer.evaluations
    failure_task = asyncio.create_task(evaluations.failed.wait(), name="watch evaluations")
    evaluations.begin(started.version)
    try:
        await asyncio.wait(
            {drive_task, loss_task, failure_task}, return_when=asyncio.FIRST_COMPLETED
        )
        if evaluations.error is not None and not drive_task.done():
            raise evaluations.error
        if not drive_task.done():
            await asyncio.wait({drive_task}, timeout=LAST_STEP_TIMEOUT_S)
        if drive_task.done() and drive_task.result().reason != NO_ENGINE_LEFT:
            return drive_task.result()
        await loss_task
        performer.log_counts()
        assert performer.servers.last_error is not None, "a lost engine leaves a reason"
        raise performer.servers.last_error
    finally:
        context.channel.end()
        performer.servers.end()
        for helper in (stop_task, state_task, loss_task, failure_task, drive_task):
            helper.cancel()
        with suppress(asyncio.CancelledError, Exception):  # already raised above
            await drive_task
