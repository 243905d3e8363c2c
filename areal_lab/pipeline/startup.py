"""Start the processes of a run and make its executor.

    model, tokenizer -> servers to attach to -> trainer, engines, reward workers -> RunPerformer

Trainer, engines and reward workers start concurrently, because most of their start is the import of
torch on one core. The display shows the processes that the run waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from areal_lab.cluster.run_hosts import RunHosts
from areal_lab.config.functions import pickle_function
from areal_lab.control.events import EngineId, GroupId, Version
from areal_lab.data.problems import PromptSource
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import WeightsInMemory
from areal_lab.engines.weights.root import remove_weights_root
from areal_lab.host.durable import replace_bytes
from areal_lab.pipeline.evaluations import Evaluations
from areal_lab.pipeline.fleet import Fleet
from areal_lab.pipeline.outcome import SummaryInputs
from areal_lab.pipeline.performer import RunPerformer, Tally
from areal_lab.pipeline.requests import ControlChannel
from areal_lab.pipeline.resume.recovery import Recovery
from areal_lab.pipeline.resume.saved_run import OpenTokens, SavedRun
from areal_lab.pipeline.resume.writer import CheckpointWriter
from areal_lab.pipeline.rollout.groups import EndedSamples, Rollout
from areal_lab.pipeline.rollout.workflow import open_rollout
from areal_lab.pipeline.servers.fixed_model import open_hosts
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import EngineSource, ServerPool
from areal_lab.pipeline.servers.server import prepare_push_from
from areal_lab.pipeline.servers.sources import (
    LaunchModel,
    attach_to,
    engine_sources,
    known_before_trainer,
    make_weights_root,
)
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.limits import Threads
from areal_lab.resolve.resolved import Resolved
from areal_lab.rewards.service import RewardService
from areal_lab.runlog.alarm_log import AlarmLog
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import TRAINER, RunHeader, engine_process
from areal_lab.runlog.replay import limits_to_fields
from areal_lab.shell.display import Display
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.protocol import Pushed, RunningTrainer, TrainerReady
from areal_lab.training.settings import TrainerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Inputs, callbacks and displays of one run."""

    resolved: Resolved
    on_step: Callable[[StepReport], None]
    """Called on the event loop after each step."""
    display: Display
    stop: StopSignal
    channel: ControlChannel
    """Control channel, which passes requests to the coordinator."""
    state: RunState
    response_tokens: Callable[[GroupId, int], int] | None
    folder: RunFolder
    fleet: Fleet
    inputs: SummaryInputs
    recovery: Recovery | None = None
    """Checkpoint from which the run continues; None for a new run."""

    @property
    def first_version(self) -> Version:
        """Version of the first weights."""
        return 0 if self.recovery is None else self.recovery.version


async def start_run(context: RunContext) -> RunPerformer:
    """Start the processes of a run, which `context.fleet` stops, and return its executor."""
    resolved, display, fleet, folder = (
        context.resolved,
        context.display,
        context.fleet,
        context.folder,
    )
    config, engines, place = resolved.config, resolved.engines, resolved.trainer
    display.phase(f"loading the model {config.actor.path} (converted once if necessary)")
    hosts = context.state.hosts = await open_hosts(
        resolved, fleet=fleet, display=display, log_folder=folder.path / "logs"
    )
    context.inputs.threads = threads = _threads(resolved, hosts)
    for address in config.rollout.addresses:
        display.phase(f"waiting for the server at {address}")
        await (await attach_to(address, resolved)).close()
    recovery, share = context.recovery, resolved.gpu_share
    settings = TrainerSettings(
        config=config,
        model_path=str(resolved.model),
        weights_root="" if hosts else _weights_root(context),
        first_version=context.first_version,
        state_folder="" if recovery is None else recovery.state_folder,
        loss_file=_pickled("loss", resolved.loss, folder),
        advantage_file=_pickled("advantage", resolved.advantage, folder),
        fields_folder=str(folder.path / "trajectories") if config.token_fields else "",
        run_folder=str(folder.path),
        run_key="" if folder.claim is None else folder.claim.key,
        threads=threads.trainer,
        ranks=place.ranks,
        tensor=place.sizes.tensor,
        context=place.sizes.context,
        device=place.device,
        engine_device=engines.device,
        gpus=",".join(place.gpus),
        takes_turns=engines.shared,
        gpu_memory_fraction=1.0 if share is None else share.trainer_fraction,
    )
    first: asyncio.Future[LaunchModel] = asyncio.get_running_loop().create_future()
    checkpoint = None if recovery is None else recovery.checkpoint
    known = known_before_trainer(resolved, checkpoint or resolved.model, context.first_version)
    if known is not None:
        first.set_result(known)
    sources = engine_sources(
        resolved,
        folder,
        first,
        threads=threads.engine,
        launch=None if hosts is None else hosts.launch_engine,
    )
    later = {number: sources.pop(number) for number in list(sources)[resolved.engine_count :]}
    began_s = time.monotonic()
    trainer, rewards, sources = await _start_processes(context, settings, first, sources, hosts)
    context.inputs.trainer = trainer
    start_folder, weights = trainer.ready.weights, trainer.ready.exported
    performer: RunPerformer | None = None

    def on_push(push: Pushed) -> None:
        if performer is None:
            return  # a push of the first weights to attached servers, before the log exists
        span = push.span
        performer.log.span(TRAINER, span.name, span.start_s, span.end_s, span.args)

    ranks = 1 if config.rollout.addresses else engines.tensor_parallel
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
        # SGLang requires a server to be idle before it releases its memory.
        pause_mode=PauseMode.ABORT if engines.shared else PauseMode(config.rollout.pause_mode),
        takes_turns=engines.shared,
        weights=weights,
        prepare_push=prepare_push,
        note=display.note,
        opened=fleet.add_engine,
    )
    fleet.stack.push_async_callback(servers.close)
    await servers.start()
    if isinstance(weights, WeightsInMemory):  # else engines may read the folder again
        await trainer.remove(start_folder)

    source = PromptSource(resolved.problems.train, seed=config.seed)
    saved = None if recovery is None else recovery.saved
    context.inputs.alarms = alarms = AlarmLog(config, folder.path)
    if recovery is not None and saved is not None:
        alarms.follow(recovery.metrics(), saved.frontier.eta)

    def on_step(report: StepReport) -> None:
        display.step(report)
        eta = context.channel.coordinator.limits.schedule.eta
        for text in alarms.add(report.step, report.time_s, report.metrics, eta):
            display.note(text)
        context.on_step(report)

    rollout = await open_rollout(
        resolved,
        engines=servers,
        rewards=rewards,
        folder=folder,
        display=display,
        stack=fleet.stack,
    )
    ended = EndedSamples(servers.emit) if resolved.limits.group_slots > 1 else None
    if ended is not None:
        servers.sample_ended = ended.add_request
    rollout = replace(rollout, response_tokens=context.response_tokens, ended=ended)
    checkpoints = CheckpointWriter(
        folder=folder,
        config=config,
        trainer=trainer,
        data=resolved.problems.digest(),
        given=resolved.given,
        last=saved.frontier.version if saved else None,
        note=display.note,
        noted=set(recovery.notes if recovery else ()),
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
            problems=resolved.problems.held_out[: config.evaluation.max_problems],
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
        sampling=resolved.limits.sampling,
        mask_truncated=config.actor.mask_truncated,
        host_losses=lambda: hosts.hosts.losses if hosts else 0,
    )
    return performer


def _weights_root(context: RunContext) -> str:
    """Make the weights folder of a trainer on this machine."""
    root = make_weights_root(context.resolved, context.folder)
    context.fleet.stack.callback(remove_weights_root, root)
    return str(root)


def _threads(resolved: Resolved, hosts: RunHosts | None) -> Threads:
    there, config = None if hosts is None else hosts.threads(), resolved.config
    if there is None:
        return resolved.threads
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
    """Start the trainer, the reward workers and the servers concurrently.

    Args:
        context: the run.
        settings: settings of the trainer.
        first: model of the first launch, set here if servers wait for the trainer's first weights.
        sources: sources of the servers to start.
        hosts: hosts of the run; None starts everything here.

    Returns:
        The trainer, the reward workers, and sources that return the started servers. The pool
        attaches to servers that the run did not start.
    """
    resolved, display, fleet = context.resolved, context.display, context.fleet
    config = resolved.config
    launched: dict[EngineId, EngineProcess | EngineClient] = {}
    plural = "" if settings.threads == 1 else "s"
    trainer_name, servers_name = (
        f"the trainer ({settings.threads} thread{plural})",
        _engines(resolved),
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
                    config.reward, resolved.reward_fn, log_folder=context.folder.path / "logs"
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


def _pickled(name: str, function: Callable[..., Any] | None, folder: RunFolder) -> str:
    """Write a function to the run folder, for the trainer's process and as a record."""
    if function is None:
        return ""
    file = folder.path / f"{name}.pickle"
    replace_bytes(file, pickle_function(function))
    return str(file)


def _evaluated(rollout: Rollout, temperature: float | None) -> Rollout:
    """Return the rollout of responses to held-out problems, with their temperature."""
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
        limits=limits_to_fields(context.resolved.limits),
        processes=(TRAINER, *(engine_process(index) for index in engines)),
    )
    return EventLog(context.folder.events, header, clock=time.time, claim=context.folder.claim)


def _tally(saved: SavedRun | None) -> Tally:
    if saved is None:
        return Tally()
    return Tally(
        saved.counts["generated_tokens"],
        saved.counts["interruptions"],
        saved.counts.get("filtered_groups", 0),  # missing in older checkpoints
    )


def _parameters(ready: TrainerReady) -> str:
    """Describe the trainer's total and trained parameters, for the display."""
    total = f"{ready.parameters / 1e6:.1f} M parameters"
    if ready.trained_parameters == ready.parameters:
        return total
    return f"{total} and trains {ready.trained_parameters / 1e6:.2f} M of them (LoRA)"


def _engines(resolved: Resolved) -> str:
    """Describe the servers to start or attach to, for the display."""
    count = resolved.engine_count
    plural = "" if count == 1 else "s"
    if resolved.config.rollout.addresses:
        return f"{count} running server{plural}"
    return f"{count} {resolved.engines.backend} server{plural}"
