"""The pipeline's client of the trainer process. Imports no torch.

TrainerProcess.start --spawns--> worker
train / export / save  --request--> worker --reply--> (one at a time)
push                   --request--> its second pipe --reply--> (one at a time, concurrently)
start_save             --request--> worker --reply--> saved --its third pipe--> (one at a time)

waits for               unblocked by
a reply                 the reply, TrainerFailed, or the end of the process
the process to end      `None` sent by `stop`, then SIGTERM, then SIGKILL
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar
from uuid import uuid4

from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import Transfer
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.pipes import in_own_thread, shut, socket_pair
from areal_lab.host.processes import (
    MEMORY_FOR_TRAINING,
    STOP_GRACE_S,
    ChildDied,
    RunningProcess,
    start_child,
)
from areal_lab.training.protocol import (
    Copied,
    Exported,
    ExportRequest,
    Pushed,
    PushRequest,
    RankDone,
    Saved,
    SaveRequest,
    TrainBatchRequest,
    TrainerFailed,
    TrainerReady,
    TrainStepResult,
)
from areal_lab.training.settings import TrainerSettings

Reply = TypeVar("Reply", TrainerReady, TrainStepResult, Exported, Copied, Saved, Pushed, RankDone)

_PIPES: Final = 3
"""Pipes of rank 0: for requests, pushes and the ends of checkpoints; the others have the first
one."""
DEATH_NOTICE_S: Final = 1.0
"""Longest delay between the first failure of a rank and its error, if others do not reply."""


WORKER: Final = "areal_lab.training.process.worker"
"""Module of a rank."""


class StartRank(Protocol):
    """Starts the process of one rank, here or on another host."""

    async def __call__(
        self, rank: int, settings: TrainerSettings, *, pipes: int, environment: Mapping[str, str]
    ) -> tuple[RunningProcess, list[Connection]]:
        """Start `WORKER` with `rank_arguments` and this many `--pipe`; return our ends of them."""
        ...


@dataclass(frozen=True, slots=True)
class RanksHere:
    """Starts ranks as children of this process."""

    log_path: Path

    async def __call__(
        self, rank: int, settings: TrainerSettings, *, pipes: int, environment: Mapping[str, str]
    ) -> tuple[RunningProcess, list[Connection]]:
        """See `StartRank`."""
        async with AsyncExitStack() as opened:
            ends = [socket_pair() for _ in range(pipes)]
            for ours, _ in ends:
                opened.callback(ours.close)
            fds = [theirs.fileno() for _, theirs in ends]
            stem = self.log_path.stem
            try:
                child = await start_child(
                    rank_name(rank),
                    WORKER,
                    [
                        *rank_arguments(rank, settings),
                        *(part for fd in fds for part in ("--pipe", f"fd:{fd}")),
                    ],
                    log_path=self.log_path.with_stem(f"{stem}-{rank}") if rank else self.log_path,
                    environment=environment,
                    pass_fds=fds,
                )
            finally:
                for _, theirs in ends:
                    theirs.close()
            opened.pop_all()
        return child, [ours for ours, _ in ends]


def rank_name(rank: int) -> str:
    """The name of a rank's process in messages."""
    return f"trainer rank {rank}" if rank else "trainer"


def rank_arguments(rank: int, settings: TrainerSettings) -> list[str]:
    """The arguments of a rank's process, without its pipes."""
    return ["--rank", str(rank), "--settings", settings.to_json()]


class TrainingError(RuntimeError):
    """The trainer failed; the message is its error, `remote_traceback` its traceback."""

    def __init__(self, failure: TrainerFailed) -> None:
        super().__init__(failure.message)
        self.remote_traceback = failure.traceback
        self.add_note(f"in the trainer process:\n{failure.traceback}")


@dataclass(slots=True)
class TrainerProcess:
    """A running trainer. Create it with `start`, and always `stop` it."""

    children: tuple[RunningProcess, ...]
    """The processes, by rank; the first one replies for all."""
    ready: TrainerReady
    """The trainer's message that its model is loaded."""
    _pipes: tuple[Connection, ...]
    _push_pipe: Connection
    _save_pipe: Connection
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _push_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reply_pending: bool = False
    """True if a reply is outstanding, also after the waiting task was cancelled."""

    @property
    def child(self) -> RunningProcess:
        """The first process."""
        return self.children[0]

    @classmethod
    async def start(
        cls, settings: TrainerSettings, *, log_path: Path, start_rank: StartRank | None = None
    ) -> Self:
        """Start the processes and wait until its model is loaded and version 0 is exported.

        Args:
            start_rank: starts each process; None starts all here.
        """
        if settings.sharded and not settings.rendezvous:
            root = Path(settings.weights_root)
            root.mkdir(parents=True, exist_ok=True)
            # A new file each time: one that was left by another group would mislead the ranks.
            settings = replace(settings, rendezvous=str(root / f".ranks-{uuid4().hex}"))
        start_rank = start_rank or RanksHere(log_path)
        async with AsyncExitStack() as opened:
            running: dict[int, tuple[RunningProcess, list[Connection]]] = {}
            opened.push_async_callback(_end, running)

            async def begin(rank: int) -> None:
                running[rank] = await start_rank(
                    rank,
                    settings,
                    pipes=_PIPES if rank == 0 else 1,
                    environment=_environment(settings, rank),
                )

            try:
                async with asyncio.TaskGroup() as starting:
                    for rank in range(settings.ranks):
                        starting.create_task(begin(rank), name=f"start {rank_name(rank)}")
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors  # the others were cancelled
            _, push_pipe, save_pipe = running[0][1]
            children = tuple(running[rank][0] for rank in range(settings.ranks))
            first = tuple(running[rank][1][0] for rank in range(settings.ranks))
            ready = await _receive_all(children, first, TrainerReady)
            opened.pop_all()
        return cls(children, ready, first, push_pipe, save_pipe)

    async def train(self, request: TrainBatchRequest) -> TrainStepResult:
        """Train on one batch, which the first process hands on to the others."""
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

    async def start_save(self, request: SaveRequest) -> Copied:
        """Start to write a checkpoint; `saved` must be awaited before the next one.

        Raises as `train` does.
        """
        return await self._request(replace(request, asynchronous=True), Copied)

    async def saved(self) -> Saved:
        """Wait for the end of `start_save`'s checkpoint."""
        return await _receive(self.child, self._save_pipe, Saved)

    async def remove(self, weights: WeightsFolder) -> None:
        """Remove exported weights that no engine needs any more."""
        await asyncio.to_thread(remove_tree, weights.path)

    async def stop(self) -> None:
        """End the process: by message, then by signal. Idempotent."""
        # During a step it would read the message only afterwards. Of several processes, one that
        # died will not leave their group, for which the others would wait.
        whole = all(child.running for child in self.children)
        if whole and not (self._reply_pending or self._pipes[0].closed):
            try:
                for pipe in self._pipes:
                    pipe.send(None)
                ended = asyncio.gather(*(child.ended() for child in self.children))
                await asyncio.wait_for(ended, STOP_GRACE_S)
            except (OSError, TimeoutError):
                pass  # it is already gone, or does not react
        await asyncio.gather(*(child.stop() for child in self.children))
        for pipe in (*self._pipes, self._push_pipe, self._save_pipe):
            shut(pipe)

    async def _request(
        self, request: TrainBatchRequest | ExportRequest | SaveRequest, kind: type[Reply]
    ) -> Reply:
        async with self._lock:
            self._reply_pending = True
            sent = request
            for pipe in self._pipes:
                try:
                    await asyncio.to_thread(pipe.send, sent)
                except OSError:
                    pass  # reading the reply reports how the process ended
                if isinstance(request, TrainBatchRequest):
                    sent = TrainBatchRequest(request.version)
            reply = await _receive_all(self.children, self._pipes, kind)
            self._reply_pending = False
            return reply


async def _end(running: Mapping[int, tuple[RunningProcess, list[Connection]]]) -> None:
    """End processes that were started, and close our ends of their pipes."""
    for _, pipes in running.values():
        for pipe in pipes:
            shut(pipe)
    await asyncio.gather(*(child.stop() for child, _ in running.values()))


async def _receive_all(
    children: Sequence[RunningProcess], pipes: Sequence[Connection], kind: type[Reply]
) -> Reply:
    """Return the first rank's reply when all have replied.

    If one fails, the others wait for it in vain and are not waited for. A failure is reported when
    it comes; a process that died without a message comes first, if it is noticed within
    `DEATH_NOTICE_S`: its peers only report that it is gone.
    """
    first = asyncio.create_task(_receive(children[0], pipes[0], kind))
    others: list[asyncio.Task[Any]] = [
        asyncio.create_task(_receive(child, pipe, RankDone))
        for child, pipe in zip(children[1:], pipes[1:], strict=True)
    ]
    waiting: list[asyncio.Task[Any]] = [first, *others]
    try:
        _, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in waiting if task.done() and task.exception()), None)
        if failed is not None:
            if left:
                await asyncio.wait(left, timeout=DEATH_NOTICE_S)
            errors = [task.exception() for task in waiting if task.done()]
            error = next((e for e in errors if isinstance(e, ChildDied)), failed.exception())
            assert error is not None
            raise error
        return first.result()
    finally:
        for task in waiting:
            task.cancel()


async def _receive(child: RunningProcess, pipe: Connection, kind: type[Reply]) -> Reply:
    """Wait for a message in a separate thread.

    If the waiting task is cancelled, or the process ends without closing its end of the pipe, as
    one on a lost host does, the thread waits until the trainer is stopped.
    """
    receiving = asyncio.create_task(in_own_thread(pipe.recv))
    receiving.add_done_callback(_note_error)
    ending = asyncio.create_task(child.ended())
    try:
        await asyncio.wait({receiving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done():  # what it sent before its end may still come
            await asyncio.wait({receiving}, timeout=DEATH_NOTICE_S)
        if not receiving.done():
            raise await child.died()
        message = receiving.result()
    except (EOFError, OSError) as error:
        raise await child.died() from error
    finally:
        ending.cancel()
    if isinstance(message, TrainerFailed):
        raise TrainingError(message)
    if not isinstance(message, kind):
        raise RuntimeError(
            f"the trainer sent {type(message).__name__}, but {kind.__name__} was expected"
        )
    return message


def _note_error(receiving: asyncio.Task[Any]) -> None:
    """Retrieve the error of a read that nothing waits for any more."""
    if not receiving.cancelled():
        receiving.exception()


_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator: the name for all devices and the older one, which both work."""


def _allocator(environment: Mapping[str, str], settings: TrainerSettings) -> dict[str, str]:
    """Segments that grow, unless the user has set the allocator up: packed rows of a new length in
    each step would cut fixed ones into pieces that fit nothing.

    Handles of memory in such segments need rights that processes in a container often lack.
    """
    handles = Transfer(settings.config.rollout.transfer) is Transfer.CUDA_IPC
    if handles or any(name in environment for name in _ALLOCATOR):
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _environment(settings: TrainerSettings, rank: int) -> dict[str, str]:
    threads = settings.threads
    gpus = settings.gpus.split(",") if settings.gpus else ()
    return {
        **{name: value for name, value in MEMORY_FOR_TRAINING.items() if name not in os.environ},
        **({"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}),
        **(_allocator(os.environ, settings) if settings.device == "cuda" else {}),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
