"""Serve the requests of the pipeline in the trainer process.

load model -> export first version -> TrainerReady
TrainBatchRequest (-> on the device) -> step (-> its token fields, in a file) -> TrainStepResult
                                                  until None or the end of the pipe
ExportRequest -> weights for engines, in a folder or in memory (-> the device is left) -> Exported
PushRequest -> weights in memory to engines -> Pushed, in a separate thread (`pushing`)
SaveRequest -> Hugging Face folder, trainer's state, files of the pipeline -> Saved, or a copy of
               them -> Copied, and Saved from a separate thread (`saving`)

Free the device for engines that take turns on it, and return to it.

    on the device --leave--> in main memory --come_back--> on the device
      weights, gradients, moments, frozen models                 (gradients are dropped)

On a CPU nothing moves: gradients and freed memory are returned to the system.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from areal_lab.control.events import Version
from areal_lab.data.arrays import unpack_samples
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import Transfer, WeightsInMemory
from areal_lab.host.memory import return_freed_memory
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.processes import on_parent_death
from areal_lab.models.copies import limit_process_memory
from areal_lab.runlog.token_columns import fields_path, write_fields
from areal_lab.training.checkpoint import load_state, seed_step
from areal_lab.training.critic import Critic
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.metrics import token_fields
from areal_lab.training.model import load_policy
from areal_lab.training.optimizer import Optimizer
from areal_lab.training.parallel import RankPlace, another_group, join, leave, waiting_at_most
from areal_lab.training.process.output import export, first_weights, prepare_save, save
from areal_lab.training.process.threads import BackgroundSaves, make_pusher, start_pushing
from areal_lab.training.protocol import (
    Copied,
    Exported,
    ExportRequest,
    RankDone,
    Saved,
    SaveRequest,
    Span,
    TrainBatchRequest,
    TrainerReady,
    TrainStepResult,
)
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.step import train_batch
from areal_lab.training.timeline import record_profile


def serve(
    pipe: Connection,
    push_pipe: Connection | None,
    settings_json: str,
    rank: int = 0,
    save_pipe: Connection | None = None,
) -> bool:
    """Load the model and serve messages until `None` or the end of the pipe.

    Every rank gets every message, and takes part; the first one has the reply, and gets the batch,
    which it hands on to the others.

    Args:
        save_pipe: for the ends of checkpoints that are written meanwhile; the first rank's only.

    Returns:
        True after `None`; False if the pipeline is gone.
    """
    settings = TrainerSettings.from_json(settings_json)
    # If the pipeline is killed, only this process can remove the weights.
    on_parent_death(lambda: remove_tree(settings.weights_root))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.config.seed)
    limit_process_memory(settings.device, settings.gpu_memory_fraction)
    ranks = _join(settings, rank)
    learner = _load(settings, ranks)
    version = settings.first_version
    if settings.state_folder:
        _log(f"continuing from {settings.state_folder}")
        load_state(learner, Path(settings.state_folder))
    saves = _background_saves(settings, ranks, save_pipe)
    pusher = make_pusher(settings) if ranks.first else None
    if pusher is not None and push_pipe is not None:
        start_pushing(push_pipe, pusher)
    exported = export(learner, version, pusher)
    weights = first_weights(learner, version, exported)
    if settings.takes_turns:
        leave_device(learner)
    if exported is None or weights is None:
        pipe.send(RankDone())
    else:
        pipe.send(_ready(learner, weights, exported))
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            _log("the pipeline closed the connection")
            return False
        if message is None:
            _log("stopping as requested")
            saves.wait()
            if pusher is not None:
                pusher.release()
            if settings.sharded:
                leave()
            return True
        timeout_s = settings.actor.collective_timeout_s
        with waiting_at_most(timeout_s) if ranks.count > 1 else nullcontext():
            if isinstance(message, TrainBatchRequest):
                message = _with_trajectories(ranks.announce(message))
            reply = _answer(learner, message, version, pusher, saves)
        pipe.send(reply if ranks.first else RankDone())
        version += isinstance(message, TrainBatchRequest)


def _with_trajectories(request: TrainBatchRequest) -> TrainBatchRequest:
    if request.packed is None:
        return request
    return TrainBatchRequest(request.version, tuple(unpack_samples(request.packed)))


def _answer(
    learner: Learner,
    message: object,
    version: Version,
    pusher: Pusher | None,
    saves: BackgroundSaves,
) -> TrainStepResult | Exported | Copied | Saved | RankDone:
    start_s = time.time()
    match message:
        case TrainBatchRequest():
            return train(learner, message, version)
        case ExportRequest():
            weights = export(learner, version, pusher)
            spans = [Span("export weights", start_s, time.time())]
            if learner.settings.takes_turns:
                leave_device(learner)
                spans.append(Span("offload", spans[0].end_s, time.time()))
            return RankDone() if weights is None else Exported(weights, tuple(spans))
        case SaveRequest(asynchronous=True):
            saves.start(prepare_save(learner, message), version)
            return Copied(version, Span("copy for checkpoint", start_s, time.time()))
        case SaveRequest():
            save(learner, message)
            return Saved(message.path, version, Span("save", start_s, time.time()))
    raise TypeError(f"the trainer got a {type(message).__name__}, which is no request")


def _background_saves(
    settings: TrainerSettings, ranks: Ranks, pipe: Connection | None
) -> BackgroundSaves:
    timeout_s, group = settings.actor.collective_timeout_s, None
    if settings.config.checkpoint.asynchronous and ranks.count > 1:
        group = another_group(timeout_s)
    return BackgroundSaves(ranks=ranks, pipe=pipe, group=group, timeout_s=timeout_s)


def _join(settings: TrainerSettings, rank: int) -> Ranks:
    if not settings.sharded:
        return ALONE
    if settings.ranks > 1:
        _log(f"waiting for the other {settings.ranks - 1} rank(s)")
    return join(
        RankPlace(
            rank=rank,
            count=settings.ranks,
            shards=settings.actor.shard_ranks or settings.ranks // settings.tensor,
            tensor=settings.tensor,
            context=settings.context,
            device=settings.device,
            rendezvous=settings.rendezvous,
            timeout_s=settings.actor.collective_timeout_s,
        )
    )


def _load(settings: TrainerSettings, ranks: Ranks) -> Learner:
    """Load the model with its adapters, sharded, with its optimizer."""
    actor = settings.actor
    _log(f"loading {settings.model_path}")
    model = load_policy(
        Path(settings.model_path),
        device=settings.load_device,
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    if actor.use_lora:
        targets = target_modules(model, actor.target_modules)
        add_lora(
            model,
            rank=actor.lora_rank,
            alpha=actor.lora_alpha,
            targets=targets,
            merged=Transfer(settings.config.rollout.transfer) is not Transfer.ADAPTER,
        )
    return make_learner(model, settings, ranks)


def _ready(
    learner: Learner, weights: WeightsFolder, exported: WeightsFolder | WeightsInMemory
) -> TrainerReady:
    parameters = list(learner.model.parameters())
    ready = TrainerReady(
        weights=weights,
        exported=exported,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        compute_dtype=str(learner.dtype).removeprefix("torch."),
        device=learner.settings.device,
    )
    _log(
        f"ready: {ready.parameters:,} parameters, {ready.trained_parameters:,} of them trained, "
        f"computing in {ready.compute_dtype}"
    )
    return ready


def train(learner: Learner, request: TrainBatchRequest, version: Version) -> TrainStepResult:
    """Run one step."""
    if request.version != version:
        raise ValueError(f"asked to train version {request.version}, but the trainer has {version}")
    seed_step(learner.settings.config.seed, version)
    spans: tuple[Span, ...] = ()
    if learner.settings.takes_turns:
        start_s = time.time()
        come_back(learner)
        spans = (Span("onload", start_s, time.time()),)
    profile = b""
    profiled = version + 1 in learner.settings.actor.profile_steps and learner.ranks.first
    if profiled:
        _log(f"profiling step {version + 1}")
        step = partial(train_batch, learner, request, profiled=True)
        outcome, profile = record_profile(step, learner.device)
        _log(f"the profile of step {version + 1} has {len(profile) / 1e6:.1f} MB")
        ended_s = outcome.spans[-1].end_s if outcome.spans else time.time()
        spans += (*outcome.spans, Span("write profile", ended_s, time.time()))
    else:
        outcome = train_batch(learner, request)
        spans += outcome.spans
    for optimizer in _optimizers(learner):
        optimizer.zero_grad()  # exports and checkpoints copy the weights into that memory
    if (folder := learner.settings.fields_folder) and learner.ranks.first:
        start_s = time.time()
        fields = token_fields(outcome.advantages, outcome.records)
        if (claim := learner.settings.claim) is not None:
            claim.check()
        write_fields(fields_path(Path(folder), version + 1), fields)
        spans = (*spans, Span("token fields", start_s, time.time()))
    return TrainStepResult(version + 1, outcome.metrics | outcome.measured, spans, profile)


def _log(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)


def leave_device(learner: Learner) -> None:
    """Free the memory that the learner has on its device; it can be exported and saved meanwhile.

    With several ranks, each of them calls this.
    """
    for optimizer in _optimizers(learner):
        optimizer.zero_grad()
    if _moves(learner):
        move(learner, torch.device("cpu"))
    if learner.device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()


def come_back(learner: Learner) -> None:
    """Inverse of `leave_device`, before a step."""
    if _moves(learner):
        move(learner, learner.device)


def _moves(learner: Learner) -> bool:
    # With `actor.offload` shards move by themselves, layer by layer, and belong to main memory.
    return learner.device.type != "cpu" and not learner.settings.actor.offload


def move(learner: Learner, to: torch.device) -> None:
    """Move weights and moments; parameters stay the objects that optimizer and shards know."""
    for module in _modules(learner):
        module.to(to)
    for optimizer in _optimizers(learner):
        for state in optimizer.adamw.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(to)


def _modules(learner: Learner) -> Iterator[nn.Module]:
    yield learner.policy
    if isinstance(learner.critic, Critic):
        yield learner.critic.values
    for frozen in (learner.reference, learner.teacher):
        if frozen is not None and frozen.policy is not learner.policy:
            yield frozen.policy


def _optimizers(learner: Learner) -> Iterator[Optimizer]:
    yield learner.optimizer
    if isinstance(learner.critic, Critic):
        yield learner.critic.optimizer
