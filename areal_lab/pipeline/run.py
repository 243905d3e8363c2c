"""One training run from its configuration to its summary: processes up, measure, drive, measure.

    check -> trainer up -> engines up -> held-out before -> drive -> held-out after -> summary

Every process the run starts is stopped when it ends, however it ends; the death of one ends the
run with that process's last words, but for reward workers, which are replaced.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lab import preflight
from areal_lab.allocation import engine_plan
from areal_lab.config import TrainConfig
from areal_lab.control.coordinator import NO_ENGINE_LEFT, Coordinator
from areal_lab.control.eventlog import TRAINER, RunHeader, engine_process
from areal_lab.control.events import EngineId, Event, Finish, GroupId, RunStarted, StopRequested
from areal_lab.control.replay import limits_to_fields
from areal_lab.data.problems import ProblemSet, PromptSource
from areal_lab.data.sources import load_problems
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.addresses import is_local
from areal_lab.engines.client import EngineClient
from areal_lab.engines.launch import EngineProcess, launch_engine
from areal_lab.engines.protocol import PauseMode, SamplingParams, WeightsFolder
from areal_lab.engines.weights_root import ROOM_FACTOR, choose_weights_root, remove_weights_root
from areal_lab.functions import pickle_function
from areal_lab.model_facts import read_model_facts, transfer_bytes
from areal_lab.pipeline.attach import attach
from areal_lab.pipeline.courier import Courier, courier_from
from areal_lab.pipeline.drive import drive
from areal_lab.pipeline.evaluate import HeldOutReward, measure
from areal_lab.pipeline.eventlog import EventLog, read_log_file
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.folder import RunFolder
from areal_lab.pipeline.health import Health
from areal_lab.pipeline.live import LiveRun
from areal_lab.pipeline.plan import Threads, limits_of, threads_of
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.report import write_report
from areal_lab.pipeline.reports import StepReport
from areal_lab.pipeline.rollout import Rollout
from areal_lab.pipeline.servers import Place, Servers
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.pipeline.summary import PEAK_MEMORY, build_summary
from areal_lab.processes import peak_rss_bytes
from areal_lab.rewards.service import RewardFunction, RewardService
from areal_lab.training.model_path import resolve_model_path
from areal_lab.training.protocol import Pushed
from areal_lab.training.settings import settings_from_config

if TYPE_CHECKING:
    from areal_lab.functional.losses import HasLoss  # loads torch, which this process can spare


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
    try:
        limits_of(config)
    except ValueError as error:
        raise preflight.ConfigError(str(error)) from error
    if loss is not None:
        from areal_lab.training.loss import check_loss  # torch, which the caller has by now

        try:
            check_loss(loss, "loss")
        except ValueError as error:
            raise preflight.ConfigError(str(error)) from error
    return problems or load_problems(config.dataset, seed=config.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one run is about, and who is told of it."""

    config: TrainConfig
    problems: ProblemSet
    on_step: Callable[[StepReport], None]
    """Called on the event loop after each step."""
    display: Display
    stop: StopSignal
    reward_fn: RewardFunction | str
    loss: Callable[..., HasLoss] | None
    state: RunState
    answer_tokens: Callable[[GroupId, int], int] | None
    folder: RunFolder
    fleet: Fleet


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
    began_s = time.time()
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
            )
            summary = await fleet.guard(_measured_run(task))
    except BaseException as error:
        # A second Ctrl-C cancels: that is no failure, and what was saved before stays.
        cancelled = isinstance(error, asyncio.CancelledError)
        ending = {
            "status": "stopped at once" if cancelled else "failed",
            "error": str(error) or type(error).__name__,
            "saved_version": state.live.last_checkpoint if state.live is not None else None,
            "wall_s": time.time() - began_s,
        }
        folder.write_json("summary.json", ending)
        raise
    folder.write_json("summary.json", summary)
    if config.plots:
        display.phase("drawing reward.png, timeline.png, staleness.png")
        await asyncio.to_thread(write_report, folder.path)
    return RunResult(folder.path, summary)


async def _measured_run(task: Task) -> dict[str, Any]:
    """Start everything, measure, train, measure again; returns the summary."""
    began_s = time.time()
    config, display = task.config, task.display
    live, threads = await _bring_up(task)
    before = await _measure(task, live.rollout, "before training")
    display.phase("training")
    live.begin()
    coordinator = Coordinator(limits_of(config))
    task.state.coordinator, task.state.live = coordinator, live
    task.state.children = task.fleet.children
    finish = await _drive(task, coordinator, live)
    if finish.reason == "stopped":
        saved = live.last_checkpoint
        display.note(f"stopped as asked; saved: {'nothing yet' if saved is None else f'v{saved}'}")
    task.state.coordinator = None
    after = await _measure(task, live.rollout, "after training")
    await live.collect_engine_spans(final=True)
    live.log_counts()
    for child in task.fleet.children:
        live.log.metric(child.name, PEAK_MEMORY, peak_rss_bytes(child.pid))
    return build_summary(
        read_log_file(task.folder.events),
        reward_before=before.problem_means if before else None,
        reward_after=after.problem_means if after else None,
        wall_s=time.time() - began_s,
        backend=engine_plan(config).backend,
        more={
            "engine_version": live.servers.engine_version,
            "seed": config.seed,
            "model": config.actor.path,
            "compute_dtype": live.trainer.ready.compute_dtype,
            "threads": {"trainer": threads.trainer, "engine": threads.engine},
            "rewards": live.rollout.rewards.counts,
            "held_out_unjudged": {
                "before": before.unjudged if before else None,
                "after": after.unjudged if after else None,
            },
        },
    )


async def _bring_up(task: Task) -> tuple[LiveRun, Threads]:
    """Trainer, engines, reward workers: one after the other, each named while it is waited for."""
    config, display, fleet, folder = task.config, task.display, task.fleet, task.folder
    display.phase(f"waiting for the model {config.actor.path} (converted once, if need be)")
    model_path = await asyncio.to_thread(resolve_model_path, config.actor.path)
    codec = TextCodec.load(model_path)
    threads = threads_of(config, len(os.sched_getaffinity(0)))
    for address in config.rollout.addresses:
        display.phase(f"waiting for the server at {address}")
        await (await _attach(config, address, model_path)).close()
    weights_root = _weights_root(config, folder, model_path)
    fleet.stack.callback(remove_weights_root, weights_root)
    display.phase(f"waiting for the trainer to load the model ({threads.trainer} thread(s))")
    trainer = await fleet.start_trainer(
        settings_from_config(
            config,
            model_path=model_path,
            weights_root=weights_root,
            loss_file=_pickled(task.loss, folder),
            threads=threads.trainer,
        ),
        log_path=folder.log("trainer"),
    )
    weights = trainer.ready.weights
    display.phase(
        f"trainer holds {trainer.ready.parameters / 1e6:.1f} M parameters, computes in "
        f"{trainer.ready.compute_dtype}; waiting for {_count_engines(config)} engine(s)"
    )

    def on_push(push: Pushed) -> None:
        span = push.span
        live.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)

    ranks = 1 if config.rollout.addresses else engine_plan(config).tensor_parallel
    courier = courier_from(trainer, ranks=ranks, pushed=on_push)
    servers = _servers(task, weights, courier, model_path, threads.engine)
    fleet.stack.push_async_callback(servers.close)
    await servers.start()
    rewards = await fleet.stack.enter_async_context(
        RewardService(
            task.reward_fn,
            timeout_s=config.reward.timeout_s,
            workers=config.reward.workers,
            max_error_rate=config.reward.max_error_rate,
            log_folder=folder.path / "logs",
        )
    )

    def on_step(report: StepReport) -> None:
        display.step(report)
        task.on_step(report)

    live = LiveRun(
        folder=folder,
        log=fleet.stack.enter_context(_open_log(config, folder, servers.places)),
        rollout=Rollout(
            engines=servers,
            codec=codec,
            rewards=rewards,
            sampling=_sampling(config, codec),
            run_seed=config.seed,
            answer_tokens=task.answer_tokens,
            running_samples=config.rollout.max_running_requests,
            interruptions_recompute=servers.pause_mode is not PauseMode.IN_PLACE,
        ),
        source=PromptSource(task.problems.train, seed=config.seed),
        trainer=trainer,
        servers=servers,
        samples=config.gconfig.n_samples,
        total_steps=config.total_train_steps,
        on_step=on_step,
        weights={weights.version: weights},
    )
    return live, threads


def _pickled(loss: Callable[..., HasLoss] | None, folder: RunFolder) -> Path | None:
    """Write the loss into the run folder: the trainer is another process, and it is a record."""
    if loss is None:
        return None
    file = folder.path / "loss.pickle"
    file.write_bytes(pickle_function(loss))
    return file


def _count_engines(config: TrainConfig) -> int:
    return len(config.rollout.addresses) or engine_plan(config).servers


def _servers(
    task: Task, weights: WeightsFolder, courier: Courier, model_path: Path, threads: int
) -> Servers:
    """The engines of the run, none of them started yet."""
    config, rollout = task.config, task.config.rollout
    place = _attached if rollout.addresses else _launched
    return Servers(
        places={
            index: Place(open=place(task, index, weights, model_path, threads))
            for index in range(_count_engines(config))
        },
        health=Health(interval_s=rollout.health_interval_s, timeout_s=rollout.health_timeout_s),
        max_restarts=rollout.max_engine_restarts,
        pause_mode=PauseMode(rollout.pause_mode),
        weights=weights,
        courier=courier,
        note=task.display.note,
        opened=task.fleet.note_engine,
    )


def _launched(
    task: Task, index: EngineId, weights: WeightsFolder, model_path: Path, threads: int
) -> Callable[[], Awaitable[EngineProcess]]:
    """Starts engine `index`: first with the trainer's weights, then with the model's own.

    The folder of the first weights goes when there are newer ones; a server that is started again
    is given those before it gets work.
    """
    rollout, plan = task.config.rollout, engine_plan(task.config)
    folders = chain([weights], repeat(replace(weights, path=model_path)))

    async def start() -> EngineProcess:
        return await launch_engine(
            plan.backend,
            index=index,
            weights=next(folders),
            port=rollout.port + index if rollout.port else 0,
            threads=threads,
            dtype=rollout.dtype,
            max_running_requests=rollout.max_running_requests,
            context_length=None,
            log_path=task.folder.log(f"engine-{index}"),
            ready_timeout_s=rollout.ready_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
            tensor_parallel=plan.tensor_parallel,
            extra=tuple(rollout.engine_args),
        )

    return start


def _attached(
    task: Task, index: EngineId, _weights: WeightsFolder, model_path: Path, _threads: int
) -> Callable[[], Awaitable[EngineClient]]:
    """Waits for the server at the address of engine `index`."""
    return lambda: _attach(task.config, task.config.rollout.addresses[index], model_path)


async def _attach(config: TrainConfig, address: str, model_path: Path) -> EngineClient:
    return await attach(
        address,
        model_path,
        request_timeout_s=config.rollout.request_timeout_s,
        ready_timeout_s=config.rollout.ready_timeout_s,
    )


def _weights_root(config: TrainConfig, folder: RunFolder, model_path: Path) -> Path:
    """Where the engines find weights: servers on other machines do not see our shared memory."""
    rollout = config.rollout
    if not all(is_local(address) for address in rollout.addresses):
        root = folder.path / "weights"
        root.mkdir()
        return root
    # An engine that comes back needs what the others hold: one set of weights more.
    sets = ROOM_FACTOR + (rollout.max_engine_restarts > 0)
    size_bytes = transfer_bytes(read_model_facts(model_path).parameters, rollout.dtype)
    return choose_weights_root(folder.path, size_bytes, sets=sets)


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
    losing = asyncio.create_task(live.servers.none_left.wait(), name="watch engines")
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


def _sampling(config: TrainConfig, codec: TextCodec) -> SamplingParams:
    generation = config.gconfig
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=codec.stop_token_ids(generation.stop),
    )


def _open_log(config: TrainConfig, folder: RunFolder, engines: Iterable[EngineId]) -> EventLog:
    header = RunHeader(
        mode="train",
        started_at=time.time(),
        limits=limits_to_fields(limits_of(config)),
        processes=(TRAINER, *(engine_process(index) for index in engines)),
    )
    return EventLog(folder.events, header, clock=time.time)
