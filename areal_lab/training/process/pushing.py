"""Push weights from the trainer's memory into engines, in a thread beside the training thread.

    training thread   export: hold a copy          step            export: waits for a push
    this thread                        PushRequest ----------> Pushed

So engines that are paused for new weights wait for the transfer, not for a training step.
"""

from __future__ import annotations

import threading
import time
import traceback
from multiprocessing.connection import Connection

import torch

from areal_lab.engines.weights.broadcast import BroadcastSender
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.tensor import TensorSender
from areal_lab.training.protocol import Pushed, PushRequest, Span, TrainerFailed
from areal_lab.training.settings import TrainerSettings

REPLY_MARGIN_S = 5.0
"""Longest delay between the trainer and an engine noticing that their process group broke."""


def make_pusher(settings: TrainerSettings) -> Pusher | None:
    """The pusher that holds and sends the weights; `None` if engines read them from a folder."""
    rollout, kept = settings.config.rollout, settings.kept_versions
    timeout_s = rollout.transfer_timeout_s
    match Transfer(rollout.transfer):
        case Transfer.FOLDER | Transfer.ADAPTER:
            return None
        case Transfer.HTTP_TENSOR:
            return Pusher(TensorSender(), timeout_s=timeout_s, kept_versions=kept)
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
            traceback.print_exc()
            reply = TrainerFailed(f"{type(error).__name__}: {error}", traceback.format_exc())
        pipe.send(reply)


def push(request: PushRequest, pusher: Pusher) -> Pushed:
    """Push the requested version.

    Raises:
        ValueError: if it is not held.
    """
    start_s = time.time()
    outcome = pusher.push(request.version, request.engines, flush_cache=request.flush_cache)
    span = Span("push weights", start_s, time.time(), dict(outcome.seconds))
    return Pushed(outcome.failures, span)
