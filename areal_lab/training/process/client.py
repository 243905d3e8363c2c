"""The pipeline's client of the trainer process. Imports no torch.

TrainerProcess.start --spawns--> worker
train / export / save  --request--> worker --reply--> (one at a time)
push                   --request--> its second pipe --reply--> (one at a time, concurrently)

waits for               unblocked by
a reply                 the reply, TrainerFailed, or the end of the process
the process to end      `None` sent by `stop`, then SIGTERM, then SIGKILL
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from areal_lab.host.processes import (
    MALLOC_FOR_TRAINING,
    STOP_GRACE_S,
    Child,
    ChildDied,
    start_child,
)
from areal_lab.training.protocol import (
    Exported,
    ExportRequest,
    Pushed,
    PushRequest,
    Saved,
    SaveRequest,
    TrainBatchRequest,
    TrainerFailed,
    TrainerReady,
    TrainStepResult,
)
from areal_lab.training.settings import TrainerSettings

Reply = TypeVar("Reply", TrainerReady, TrainStepResult, Exported, Saved, Pushed)


class TrainingError(RuntimeError):
    """The trainer failed; the message is its error, `remote_traceback` its traceback."""

    def __init__(self, failure: TrainerFailed) -> None:
        super().__init__(failure.message)
        self.remote_traceback = failure.traceback
        self.add_note(f"in the trainer process:\n{failure.traceback}")


@dataclass(slots=True)
class TrainerProcess:
    """A running trainer. Create it with `start`, and always `stop` it."""

    child: Child
    ready: TrainerReady
    """The trainer's message that its model is loaded."""
    _pipe: Connection
    _push_pipe: Connection
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _push_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reply_pending: bool = False
    """Whether a reply is outstanding, also after the waiting task was cancelled."""

    @staticmethod
    async def start(settings: TrainerSettings, *, log_path: Path) -> TrainerProcess:
        """Start the process and wait until its model is loaded and version 0 is exported.

        Args:
            log_path: file for its output.

        Raises:
            TrainingError: if it reports why it cannot start.
            ChildDied: if it ends without a message.
        """
        with ExitStack() as opened:
            pipe, theirs = _socket_pair(opened)
            push_pipe, push_theirs = _socket_pair(opened)
            fds = [theirs.fileno(), push_theirs.fileno()]
            child = await start_child(
                "trainer",
                "areal_lab.training.process.worker",
                [
                    *("--fd", str(fds[0]), "--push-fd", str(fds[1])),
                    *("--settings", settings.to_json()),
                ],
                log_path=log_path,
                environment=_environment(settings),
                pass_fds=fds,
            )
            theirs.close()
            push_theirs.close()
            try:
                ready = await _receive(child, pipe, TrainerReady)
            except BaseException:
                await child.stop()
                raise
            opened.pop_all()
        return TrainerProcess(child, ready, pipe, push_pipe)

    async def train(self, request: TrainBatchRequest) -> TrainStepResult:
        """Train on one batch.

        Raises:
            TrainingError: the step failed; the process has ended.
            ChildDied: the process ended without a message.
        """
        return await self._request(request, TrainStepResult)

    async def export(self) -> Exported:
        """Write the trainer's weights for the engines, or keep them in its memory.

        Raises as `train` does.
        """
        return await self._request(ExportRequest(), Exported)

    async def push(self, request: PushRequest) -> Pushed:
        """Push a version from the trainer's memory into engines; training steps continue.

        Failures of engines are part of the reply. Raises as `train` does, but the process keeps
        running.
        """
        async with self._push_lock:
            try:
                await asyncio.to_thread(self._push_pipe.send, request)
            except OSError:
                pass  # reading the reply reports how the process ended
            return await _receive(self.child, self._push_pipe, Pushed)

    async def save(self, request: SaveRequest) -> Saved:
        """Write a checkpoint. Raises as `train` does."""
        return await self._request(request, Saved)

    async def died(self) -> ChildDied:
        """Wait for the end of the process; returns the error to raise if it was unexpected."""
        return await self.child.died()

    async def stop(self) -> None:
        """End the process: by message, then by signal. Idempotent."""
        # During a step it would read the message only afterwards.
        if not (self._reply_pending or self._pipe.closed):
            try:
                self._pipe.send(None)
                await asyncio.wait_for(self.child.process.wait(), STOP_GRACE_S)
            except (OSError, TimeoutError):
                pass  # it is already gone, or does not react
        await self.child.stop()
        self._pipe.close()
        self._push_pipe.close()

    async def _request(
        self, request: TrainBatchRequest | ExportRequest | SaveRequest, kind: type[Reply]
    ) -> Reply:
        async with self._lock:
            self._reply_pending = True
            try:
                await asyncio.to_thread(self._pipe.send, request)
            except OSError:
                pass  # reading the reply reports how the process ended
            reply = await _receive(self.child, self._pipe, kind)
            self._reply_pending = False
            return reply


async def _receive(child: Child, pipe: Connection, kind: type[Reply]) -> Reply:
    """Wait for a message in a separate thread.

    If the waiting task is cancelled, the thread waits until the process is stopped.
    """
    try:
        message = await asyncio.to_thread(pipe.recv)
    except (EOFError, OSError) as error:
        raise await child.died() from error
    if isinstance(message, TrainerFailed):
        raise TrainingError(message)
    if not isinstance(message, kind):
        raise RuntimeError(
            f"the trainer sent {type(message).__name__}, but {kind.__name__} was expected"
        )
    return message


def _socket_pair(opened: ExitStack) -> tuple[Connection, socket.socket]:
    """Our end as a connection, and the socket for the child process."""
    ours, theirs = socket.socketpair()
    pipe: Connection = Connection(ours.detach())
    opened.callback(theirs.close)
    opened.callback(pipe.close)
    return pipe, theirs


def _environment(settings: TrainerSettings) -> dict[str, str]:
    threads = settings.threads
    return {
        **MALLOC_FOR_TRAINING,
        **({"CUDA_VISIBLE_DEVICES": settings.gpus} if settings.gpus else {}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
