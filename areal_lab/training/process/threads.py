"""Push weights and write checkpoints in threads beside the training thread, one at a time.

Push weights from the trainer's memory into engines, in a thread next to the training thread.

    training thread   export: keep a copy          step            export: waits for a push
    this thread                        PushRequest ----------> Pushed

So engines that are paused for new weights wait for the transfer, not for a training step.

Write checkpoints in a thread next to the training thread, one at a time.

    training thread   SaveRequest: copy ----> Copied    step     step
    this thread                       write, rename ---------------------> Saved

With several ranks, each of them has such a thread, and they agree in a separate
group: the training threads use theirs meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from torch.distributed import ProcessGroup

from areal_lab.control.events import Version
from areal_lab.engines.weights.broadcast import BroadcastSender
from areal_lab.engines.weights.handles import HandleSender
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.tensor import TensorSender
from areal_lab.host.durable import with_type
from areal_lab.host.processes import log_exception
from areal_lab.training.parallel import waiting_at_most
from areal_lab.training.process.output import PreparedSave
from areal_lab.training.protocol import Pushed, PushRequest, Saved, Span, TrainerFailed
from areal_lab.training.ranks import Ranks
from areal_lab.training.settings import TrainerSettings

REPLY_MARGIN_S = 5.0
"""Longest delay between the trainer and an engine noticing that their process group broke."""


def make_pusher(settings: TrainerSettings) -> Pusher | None:
    """Create the pusher that keeps and sends the weights; `None` if engines read them from a
    folder.
    """
    rollout, kept = settings.config.rollout, settings.kept_versions
    timeout_s = rollout.transfer_timeout_s
    match Transfer(rollout.transfer):
        case Transfer.FOLDER | Transfer.ADAPTER:
            return None
        case Transfer.HTTP_TENSOR:
            return Pusher(TensorSender(), timeout_s=timeout_s, kept_versions=kept)
        case Transfer.CUDA_IPC:
            return Pusher(
                HandleSender(),
                timeout_s=timeout_s,
                kept_versions=kept,
                device=settings.device,
                reuses_memory=False,
            )
        case Transfer.DISTRIBUTED:
            gpu = torch.device(settings.device).type == "cuda"
            sender = BroadcastSender(timeout_s=timeout_s, backend="nccl" if gpu else "gloo")
            timeout_s += REPLY_MARGIN_S
            device = settings.device if gpu else "cpu"
            return Pusher(sender, timeout_s=timeout_s, kept_versions=kept, device=device)


def start_pushing(pipe: Connection, pusher: Pusher) -> None:
    """Serve push requests on this pipe until it closes, in a thread that ends with the process."""
    threading.Thread(target=_serve_requests, args=(pipe, pusher), name="push", daemon=True).start()


def _serve_requests(pipe: Connection, pusher: Pusher) -> None:
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            return  # the pipeline is gone, and this process ends with it
        try:
            reply: Pushed | TrainerFailed = push(request, pusher)
        except Exception as error:  # as in `worker`: any error is reported to the pipeline
            log_exception()
            reply = TrainerFailed(f"{type(error).__name__}: {error}", traceback.format_exc())
        pipe.send(reply)


def push(request: PushRequest, pusher: Pusher) -> Pushed:
    """Push the requested version."""
    start_s = time.time()
    outcome = pusher.push(request.version, request.engines, flush_cache=request.flush_cache)
    span = Span("push weights", start_s, time.time(), dict(outcome.seconds))
    return Pushed(outcome.failures, span)


@dataclass(slots=True, kw_only=True)
class BackgroundSaves:
    """The thread that writes, if one does."""

    ranks: Ranks
    pipe: Connection | None
    """Pipe for `Saved`; the first rank's only."""
    group: ProcessGroup | None
    """Group of these threads; None for a single rank."""
    timeout_s: float
    """Timeout for the others."""
    _thread: threading.Thread | None = field(default=None)

    def start(self, prepared: PreparedSave, version: Version) -> None:
        """Start to write; the previous checkpoint must be done."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write,
            args=(prepared, version),
            name=f"save version {version}",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, prepared: PreparedSave, version: Version) -> None:
        start_s, path = time.time(), prepared.request.path
        reply: Saved | TrainerFailed
        try:
            with waiting_at_most(self.timeout_s) if self.group is not None else nullcontext():
                prepared.write(self.ranks, self.group)
            reply = Saved(path, version, Span("save", start_s, time.time()))
        except Exception as error:  # as in `worker`: any error is reported to the pipeline
            log_exception()
            what = f"checkpoint {path} was not written: {with_type(error)}"
            reply = TrainerFailed(what, traceback.format_exc())
        if self.pipe is not None:
            try:
                self.pipe.send(reply)
            except OSError:
                print("the pipeline is gone; the end of a save is not reported", file=sys.stderr)
