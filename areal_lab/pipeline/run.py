"""One training run, from its configuration to its summary.

    check -> trainer up -> engines up -> held-out before -> drive -> held-out after -> summary
                                                          held-out problems every n steps
      requests from other processes (pause, resume, eta, stop) are answered all the while

Every process the run starts is stopped when it ends, however it ends. If the trainer dies, the run
ends with the trainer's last output; so it does when the last engine is lost and may not be
restarted. Reward workers are replaced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal_lab.config.problem import ConfigError, problems_of, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.control.coordinator import NO_ENGINE_LEFT, TOO_FEW_GROUPS, Coordinator
from areal_lab.control.evaluation import to_measure_again
from areal_lab.control.events import Event, Finish, GroupId, RunStarted, StopRequested, Version
from areal_lab.control.scaling import ScalingWatch
from areal_lab.data.problems import ProblemSet
from areal_lab.pipeline.drive import Asked, Observer, drive
from areal_lab.pipeline.evaluate import HeldOutReward, announced, measure
from areal_lab.pipeline.fleet import Fleet, first_error
from areal_lab.pipeline.outcome import SummaryInputs, summary_so_far, write_failure
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.report import write_report
from areal_lab.pipeline.requests import Desk, reachable
from areal_lab.pipeline.resume.recovery import Recovery, check_data, check_given
from areal_lab.pipeline.resume.retention import measurements, saved_checkpoints
from areal_lab.pipeline.scaling import ScaledRun
from areal_lab.pipeline.startup import RunContext, start_run
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.pipeline.step_report import StepReport
from areal_lab.preflight import check as preflight
from areal_lab.preflight.limits import limits_of, scaling_of
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import append_held_out
from areal_lab.runlog.summary import PEAK_MEMORY
from areal_lab.sinks.start import Sinks, add_to_summary

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process can spare
    )


Result = TypeVar("Result")

LAST_STEP_TIMEOUT_S = 8.0
"""Longest wait for the running step to end and be saved once no engine is left."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The folder and the summary of a finished run."""

    folder: Path
    summary: dict[str, Any]


def prepare(
    config: TrainConfig,
    problems: ProblemSet | None = None,
    loss: Callable[..., HasLoss] | None = None,
) -> ProblemSet:
    """Check everything that can be checked before a process starts; return the problems.

    Raises:
        ConfigError: one line per problem, with the value, the bound and the fix.
    """
    checked = preflight.check(config, problems)
    if loss is not None:
        from areal_lab.training.objective.loss import (
            check_loss,  # torch, which the caller has by now
        )

        try:
            check_loss(loss, "loss")
        except ValueError as error:
            raise ConfigError(*problems_of(error, "loss", named=True)) from error
    return checked


def prepare_recovery(
    recovery: Recovery,
    problems: ProblemSet | None = None,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | None = None,
) -> ProblemSet:
    """Check that a run can continue, as `prepare` does for a new one; return its problems.

    Raises:
        ConfigError: one line per problem.
    """
    check_given(recovery, _given(reward_fn, loss))
    checked = prepare(recovery.config, problems, loss)
    check_data(recovery, checked)
    return checked


def _given(
    reward_fn: RewardFunction | None, loss: Callable[..., HasLoss] | None
) -> tuple[str, ...]:
    given = {"reward_fn": reward_fn, "loss": loss}
    return tuple(name for name, function in given.items() if function is not None)


async def run(
    config: TrainConfig,
    problems: ProblemSet,
    *,
    on_step: Callable[[StepReport], None],
    display: Display,
    stop: StopSignal,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., HasLoss] | None = None,
    response_tokens: Callable[[GroupId, int], int] | None = None,
    state: RunState | None = None,
    folder: RunFolder | None = None,
    recovery: Recovery | None = None,
) -> RunResult:
    """Run to the end, or to the first error.

    Args:
        problems: what `prepare` returned for this configuration.
        on_step: called on the event loop after each step.
        stop: requests an orderly end.
        reward_fn: used instead of `config.reward.fn`.
        loss: used instead of the loss that `config.actor` names; see `functional.PolicyLoss`.
        response_tokens: exact length of each sample (`Rollout.response_tokens`).
        state: updated while the run continues, for displays.
        folder: a fresh run folder with the configuration; None creates it.
        recovery: continue this run in its folder, with its configuration; `prepare_recovery` has
            checked it.

    Raises:
        ChildDied: an engine or the trainer ended; carries the end of its output.
        ConfigError: dynamic sampling found too few groups with different rewards.
        Exception: the first error of any part, not an exception group.
    """
    state = state or RunState()
    if recovery is not None:
        folder = recovery.folder
    folder = folder or RunFolder.create(config)
    desk = Desk(Coordinator(recovery.limits if recovery else limits_of(config)), stop)
    async with reachable(folder.path, desk, display) as (shown, claim):
        folder = replace(folder, claim=claim)
        shown.phase(f"run folder {folder.path}")
        if recovery is not None:
            await asyncio.to_thread(recovery.cut_back)
            for note in (recovery.in_words(), *recovery.notes):
                shown.note(note)
        for note in (*preflight.notes(config), *preflight.memory_notes(config, problems)):
            shown.note(f"note: {note}")
        began_s, inputs = time.time(), SummaryInputs()
        sinks = Sinks(config, folder.path, shown.note)
        try:
            async with Fleet() as fleet:
                context = RunContext(
                    config=config,
                    problems=problems,
                    on_step=on_step,
                    display=shown,
                    stop=stop,
                    desk=desk,
                    reward_fn=reward_fn or config.reward.fn,
                    loss=loss,
                    state=state,
                    response_tokens=response_tokens,
                    folder=folder,
                    fleet=fleet,
                    inputs=inputs,
                    recovery=recovery,
                    given=_given(reward_fn, loss),
                )
                summary = await fleet.guard(_measured_run(context))
        except BaseException as error:
            wall_s = time.time() - began_s
            if claim.taken:  # then `error` may be a consequence, as lost hosts are
                await asyncio.to_thread(sinks.close, at_once=True)
                claim.check()
            write_failure(error, folder, config, inputs, wall_s=wall_s, note=shown.note)
            await _close_sinks(sinks, folder, shown, at_once=True)
            raise
        folder.write_json("summary.json", summary)
        if config.plots:
            shown.phase("drawing reward.png, timeline.png, staleness.png")
            await asyncio.to_thread(write_report, folder.path)
        if reports := await _close_sinks(sinks, folder, shown):
            summary["sinks"] = reports
        return RunResult(folder.path, summary)


async def _close_sinks(
    sinks: Sinks, folder: RunFolder, display: Display, *, at_once: bool = False
) -> dict[str, dict[str, Any]]:
    """Close the sinks, in another thread, and add their reports to summary.json."""
    reports = await asyncio.to_thread(sinks.close, at_once=at_once)
    folder.check_claim()
    try:
        add_to_summary(folder.path, reports)
    except (OSError, ValueError) as error:
        display.note(f"summary.json has no reports of sinks: {error}")
    return reports


async def _measured_run(context: RunContext) -> dict[str, Any]:
    """Start everything, measure, train, measure again; returns the summary."""
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
    coordinator = context.desk.coordinator
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
    return summary_so_far(inputs, context.config, log, wall_s=before_s + time.time() - began_s)


def _saved(performer: RunPerformer) -> str:
    newest = performer.last_checkpoint
    return "saved: nothing yet" if newest is None else f"saved: version {newest}"


async def _measure(
    context: RunContext, performer: RunPerformer, what: str, *, version: Version
) -> HeldOutReward | None:
    """Measure the weights that the engines hold, while nothing else runs, and write it down.

    Args:
        what: is measured, for the display.
        version: of these weights.

    Returns:
        None if evaluation is off or a stop was requested.
    """
    evaluation, evaluations = context.config.evaluation, performer.evaluations
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
    """What `work` returns; None if a stop is requested first, which cancels it."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(context.stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        stopping.cancel()
        working.cancel()


async def _settle_best(context: RunContext, performer: RunPerformer) -> None:
    """Choose the best checkpoint by scores of its own weights.

    While the highest score is a mixture of versions, the engines get that checkpoint and it is
    measured again, `evaluation.remeasure` times at most. A failure leaves the other scores.
    """
    folder = context.folder
    for _ in range(context.config.evaluation.remeasure):
        saved = saved_checkpoints(folder)
        scores = {version: one.score for version, one in measurements(folder).items()}
        version = to_measure_again(scores, saved)
        if version is None or context.stop.requested:
            break
        try:
            await performer.load_checkpoint(version, saved[version])
            what = f"held-out problems again with step {version}, which is the best so far"
            await _measure(context, performer, what, version=version)
        except Exception as error:  # training is complete: its results must not be lost now
            reason = str(first_error(error)).splitlines()[0]
            context.display.note(f"step {version} was not measured again: {reason}")
            break
    best = (await performer.checkpoints.retain(exact=True)).best
    if best is not None:
        context.display.note(f"best checkpoint: step {best}, {measurements(folder)[best]}")


def _observer(context: RunContext, performer: RunPerformer) -> Observer:
    """The log; and the rule for the number of engines, if it is on."""
    servers = performer.servers
    rule = scaling_of(context.config, startup_s=servers.startup_s)
    if rule is None:
        return performer.log
    return ScaledRun(
        log=performer.log,
        watch=ScalingWatch(rule, context.desk.coordinator),
        pool=servers,
        generated_tokens=lambda: performer.tally.generated_tokens,
    )


async def _drive(context: RunContext, coordinator: Coordinator, performer: RunPerformer) -> Finish:
    """Drive the run; a stop request becomes an event."""
    events: asyncio.Queue[Event | Asked] = asyncio.Queue()

    async def forward_stop() -> None:
        await context.stop.wait()
        context.display.note(
            "stopping after the running step, which is saved; press Ctrl-C again to stop at once"
        )
        events.put_nowait(StopRequested())

    stop_task = asyncio.create_task(forward_stop(), name="stop")
    state_task = asyncio.create_task(
        context.state.refresh_until_cancelled(), name="state for the display"
    )
    engines = await performer.servers.begin(events.put_nowait)
    recovery = context.recovery
    started = RunStarted(engines) if recovery is None else recovery.started(engines)
    context.desk.begin(events)
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
        context.desk.end()
        performer.servers.end()
        for helper in (stop_task, state_task, loss_task, failure_task, drive_task):
            helper.cancel()
        with suppress(asyncio.CancelledError, Exception):  # already raised above
            await drive_task
