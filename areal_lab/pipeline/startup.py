"""Start everything a run needs before its first group.

    model, tokenizer -> servers to attach to -> trainer, engines, reward workers -> RunPerformer

Trainer, engines and reward workers start at the same time: most of it is importing torch, on one
core each. The display names what the run waits for.
"""

from __future__ import annotations

import asyncio
import os
import time
from asyncio import to_thread
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lab.cluster.run_hosts import RunHosts
from areal_lab.config.functions import pickle_function
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId, GroupId, Version
from areal_lab.data.problems import ProblemSet, PromptSource
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import WeightsInMemory
from areal_lab.engines.weights.root import remove_weights_root
from areal_lab.models.locate import resolve_model_path
from areal_lab.pipeline.evaluations import Evaluations
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.outcome import SummaryInputs
from areal_lab.pipeline.performer import RunPerformer, Tally
from areal_lab.pipeline.progress import Display
from areal_lab.pipeline.requests import Desk
from areal_lab.pipeline.resume.recovery import Recovery
from areal_lab.pipeline.resume.saved_run import OpenTokens, SavedRun
from areal_lab.pipeline.resume.writer import CheckpointWriter
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.opened import opened_rollout
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.on_hosts import open_hosts
from areal_lab.pipeline.servers.pool import EngineSource, ServerPool
from areal_lab.pipeline.servers.push import prepare_push_from
from areal_lab.pipeline.servers.sources import (
    LaunchModel,
    attach_to,
    count_engines,
    engine_sources,
    known_before_trainer,
    make_weights_root,
)
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.pipeline.step_report import StepReport
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import Threads, limits_of, sampling_of, threads_of
from areal_lab.preflight.placement import machine_of, place_engines, place_trainer
from areal_lab.rewards.service import RewardFunction, RewardService
from areal_lab.runlog.alarm_log import AlarmLog
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import TRAINER, RunHeader, engine_process
from areal_lab.runlog.replay import limits_to_fields
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.protocol import Pushed, RunningTrainer, TrainerReady
from areal_lab.training.settings import TrainerSettings

if TYPE_CHECKING:
    from areal_lab.functional.losses.policy import (
        HasLoss,  # loads torch, which this process does without
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The inputs of one run, and the callbacks and displays that follow it."""

    config: TrainConfig
    problems: ProblemSet
    on_step: Callable[[StepReport], None]
    """Called on the event loop after each step."""
    display: Display
    stop: StopSignal
    desk: Desk
    """Takes what is asked of the run to its coordinator."""
    reward_fn: RewardFunction | str
    loss: Callable[..., HasLoss] | None
    state: RunState
    response_tokens: Callable[[GroupId, int], int] | None
    folder: RunFolder
    fleet: Fleet
    inputs: SummaryInputs
    recovery: Recovery | None = None
    """How the run continues; None for a new one."""
    given: tuple[str, ...] = ()
    """Functions that a program gave (`SavedRun.given`)."""

    @property
    def first_version(self) -> Version:
        """Of the first weights."""
        return 0 if self.recovery is None else self.recovery.version


async def start_run(context: RunContext) -> RunPerformer:
    """Start the processes of a run; `context.fleet` stops them."""
    config, display, fleet, folder = context.config, context.display, context.fleet, context.folder
    display.phase(f"loading the model {config.actor.path} (converted once if necessary)")
    model_path = await to_thread(resolve_model_path, config.actor.path)
    codec = TextCodec.load(model_path)
    hosts = context.state.hosts = await open_hosts(
        config, model_path, fleet=fleet, display=display, log_folder=folder.path / "logs"
    )
    context.inputs.threads = threads = _threads(config, hosts)
    for address in config.rollout.addresses:
        display.phase(f"waiting for the server at {address}")
        await (await attach_to(address, config, model_path)).close()
    machine = machine_of(config)
    place, turns = place_trainer(config, machine), engine_plan(config).shared
    recovery = context.recovery
    settings = TrainerSettings(
        config=config,
        model_path=str(model_path),
        weights_root="" if hosts else _weights_root(context, model_path),
        first_version=context.first_version,
        state_folder="" if recovery is None else recovery.state_folder,
        loss_file=_pickled(context.loss, folder),
        fields_folder=str(folder.path / "trajectories") if config.token_fields else "",
        run_folder=str(folder.path),
        run_key="" if folder.claim is None else folder.claim.key,
        threads=threads.trainer,
        ranks=place.ranks,
        tensor=place.tensor,
        context=place.context,
        device=place.device,
        engine_device=place_engines(config, machine).device,
        gpus=",".join(place.gpus),
        takes_turns=turns,
    )
    first: asyncio.Future[LaunchModel] = asyncio.get_running_loop().create_future()
    checkpoint = None if recovery is None else recovery.checkpoint
    known = known_before_trainer(config, checkpoint or model_path, context.first_version)
    if known is not None:
        first.set_result(known)
    sources = engine_sources(
        config,
        folder,
        first,
        model_path=model_path,
        codec=codec,
        threads=threads.engine,
        launch=None if hosts is None else hosts.launch_engine,
    )
    later = {number: sources.pop(number) for number in list(sources)[count_engines(config) :]}
    began_s = time.monotonic()
    trainer, rewards, sources = await _start_processes(context, settings, first, sources, hosts)
    context.inputs.trainer = trainer
    start_folder, weights = trainer.ready.weights, trainer.ready.exported
    performer: RunPerformer | None = None

    def on_push(push: Pushed) -> None:
        if performer is None:
            return  # the first weights of attached servers, before there is a log
        span = push.span
        performer.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)

    ranks = 1 if config.rollout.addresses else engine_plan(config).tensor_parallel
    prepare_push = prepare_push_from(trainer, ranks=ranks, pushed=on_push)
    context.inputs.servers = servers = ServerPool(
        sources=sources,
        later=later,
        startup_s=time.monotonic() - began_s,
        scales=config.rollout.scaling.max_engines > 0,
        health=HealthLimits(
            interval_s=config.rollout.health_interval_s,
            timeout_s=config.rollout.health_timeout_s,
            stall_s=config.rollout.stall_timeout_s,
        ),
        max_restarts=config.rollout.max_engine_restarts,
        # What a server generates ends before its memory goes: SGLang requires it to be idle.
        pause_mode=PauseMode.ABORT if turns else PauseMode(config.rollout.pause_mode),
        takes_turns=turns,
        weights=weights,
        prepare_push=prepare_push,
        note=display.note,
        opened=fleet.add_engine,
    )
    fleet.stack.push_async_callback(servers.close)
    await servers.start()
    if isinstance(weights, WeightsInMemory):  # else the engines read this folder, or the model's
        await trainer.remove(start_folder)

    source = PromptSource(context.problems.train, seed=config.seed)
    saved = None if recovery is None else recovery.saved
    context.inputs.alarms = alarms = AlarmLog(config, folder.path)
    if recovery is not None and saved is not None:
        alarms.follow(recovery.metrics(), saved.frontier.eta)

    def on_step(report: StepReport) -> None:
        display.step(report)
        eta = context.desk.coordinator.limits.schedule.eta
        for text in alarms.add(report.step, report.time_s, report.metrics, eta):
            display.note(text)
        context.on_step(report)

    rollout = await opened_rollout(
        config,
        model_path,
        codec=codec,
        engines=servers,
        rewards=rewards,
        folder=folder,
        display=display,
        stack=fleet.stack,
    )
    rollout = replace(rollout, response_tokens=context.response_tokens)
    checkpoints = CheckpointWriter(
        folder=folder,
        config=config,
        trainer=trainer,
        data=context.problems.digest(),
        given=context.given,
        last=saved.frontier.version if saved else None,
    )
    context.inputs.performer = performer = RunPerformer(
        folder=folder,
        log=fleet.stack.enter_context(_open_log(context, servers.sources)),
        rollout=rollout,
        source=source,
        trainer=trainer,
        servers=servers,
        checkpoints=checkpoints,
        evaluations=Evaluations(
            config=config,
            rollout=_evaluated(rollout, config.evaluation.temperature),
            servers=servers,
            problems=context.problems.held_out[: config.evaluation.max_problems],
            folder=folder,
            checkpoints=checkpoints,
            note=display.note,
        ),
        tally=_tally(saved),
        counts_before=saved.counts if saved else {},
        recovered=recovery.open_tokens(source) if recovery else OpenTokens(),
        samples=config.gconfig.n_samples,
        total_steps=config.total_train_steps,
        on_step=on_step,
        weights={weights.version: weights},
        sampling=sampling_of(config),
        mask_truncated=config.actor.mask_truncated,
        host_losses=lambda: hosts.hosts.losses if hosts else 0,
    )
    return performer


def _weights_root(context: RunContext, model_path: Path) -> str:
    """The folder for weights of a trainer on this machine; a host has its own."""
    root = make_weights_root(context.config, context.folder, model_path)
    context.fleet.stack.callback(remove_weights_root, root)
    return str(root)


def _threads(config: TrainConfig, hosts: RunHosts | None) -> Threads:
    there = None if hosts is None else hosts.threads()
    if there is None:
        return threads_of(config, len(os.sched_getaffinity(0)))
    return Threads(
        engine=config.rollout.threads or there.engine,
        trainer=config.actor.threads or there.trainer,
    )


async def _start_processes(
    context: RunContext,
    settings: TrainerSettings,
    first: asyncio.Future[LaunchModel],
    sources: dict[EngineId, EngineSource],
    hosts: RunHosts | None,
) -> tuple[RunningTrainer, RewardService, dict[EngineId, EngineSource]]:
    """Start the trainer, the reward workers and the servers at the same time.

    Args:
        first: is set here, if the servers have to wait for the trainer's first weights.

    Returns:
        The trainer, the rewards, and sources that hand out the started servers. Servers that the
        run did not start are left to the pool.
    """
    config, display, fleet = context.config, context.display, context.fleet
    launched: dict[EngineId, EngineProcess | EngineClient] = {}
    plural = "" if settings.threads == 1 else "s"
    trainer_name, servers_name = (
        f"the trainer ({settings.threads} thread{plural})",
        _engines(config),
    )
    left = [trainer_name, servers_name]

    def started(what: str) -> None:
        left.remove(what)
        if left:
            display.phase(f"waiting for {left[0]} to start")

    async def start_trainer() -> RunningTrainer:
        trainer = await fleet.start_trainer(
            partial(TrainerProcess.start, settings, log_path=context.folder.log("trainer"))
            if hosts is None
            else partial(hosts.start_trainer, settings, run_folder=context.folder.path)
        )
        ready = trainer.ready
        if not first.done():
            first.set_result(
                LaunchModel(ready.weights.path, ready.weights.version, ready.weights.adapter)
            )
        display.note(f"the trainer has {_parameters(ready)}, computing in {ready.compute_dtype}")
        started(trainer_name)
        return trainer

    async def launch(number: EngineId, source: EngineSource) -> None:
        launched[number] = await source()
        if len(launched) == len(sources):
            started(servers_name)

    def handing_out(number: EngineId, source: EngineSource) -> EngineSource:
        async def open_() -> EngineProcess | EngineClient:
            return launched.pop(number) if number in launched else await source()

        return open_

    async def stop_launched() -> None:
        for engine in launched.values():
            if isinstance(engine, EngineProcess):
                await engine.stop()

    fleet.stack.push_async_callback(stop_launched)
    display.phase(f"waiting for {' and '.join(left)} to start")
    async with asyncio.TaskGroup() as starting:
        trainer = starting.create_task(start_trainer(), name="start trainer")
        rewards = starting.create_task(
            fleet.stack.enter_async_context(
                RewardService.of(
                    config.reward, context.reward_fn, log_folder=context.folder.path / "logs"
                )
            ),
            name="start reward workers",
        )
        if not config.rollout.addresses:
            for number, source in sources.items():
                starting.create_task(launch(number, source), name=f"start engine {number}")
    return (
        trainer.result(),
        rewards.result(),
        {number: handing_out(number, source) for number, source in sources.items()},
    )


def _pickled(loss: Callable[..., HasLoss] | None, folder: RunFolder) -> str:
    """Write the loss into the run folder, for the trainer's process and as a record."""
    if loss is None:
        return ""
    file = folder.path / "loss.pickle"
    file.write_bytes(pickle_function(loss))
    return str(file)


def _evaluated(rollout: Rollout, temperature: float | None) -> Rollout:
    """The rollout that samples responses to held-out problems."""
    if temperature is None:
        return rollout
    return replace(rollout, sampling=replace(rollout.sampling, temperature=temperature))


def _open_log(context: RunContext, engines: Iterable[EngineId]) -> EventLog:
    if context.recovery is not None and context.recovery.saved is not None:
        return EventLog.continued(
            context.folder.events, clock=time.time, claim=context.folder.claim
        )
    header = RunHeader(
        mode="train",
        started_at=time.time(),
        limits=limits_to_fields(limits_of(context.config)),
        processes=(TRAINER, *(engine_process(index) for index in engines)),
    )
    return EventLog(context.folder.events, header, clock=time.time, claim=context.folder.claim)


def _tally(saved: SavedRun | None) -> Tally:
    if saved is None:
        return Tally()
    return Tally(
        saved.counts["generated_tokens"],
        saved.counts["interruptions"],
        saved.counts.get("filtered_groups", 0),  # none in older checkpoints
    )


def _parameters(ready: TrainerReady) -> str:
    """The trainer's parameter count, and how many of them are trained, for the display."""
    held = f"{ready.parameters / 1e6:.1f} M parameters"
    if ready.trained_parameters == ready.parameters:
        return held
    return f"{held} and trains {ready.trained_parameters / 1e6:.2f} M of them (LoRA)"


def _engines(config: TrainConfig) -> str:
    """The servers to start or attach to, for the display."""
    count = count_engines(config)
    plural = "" if count == 1 else "s"
    if config.rollout.addresses:
        return f"{count} running server{plural}"
    return f"{count} {engine_plan(config).backend} server{plural}"
