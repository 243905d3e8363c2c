"""A run on fixed data in a terminal: its processes, progress, Ctrl-C, a summary, an exit code.

    console (no torch) --Job--> rank 0, 1 ...;   rank 0 --Phase, Note, Stepped, Ended--> console

Ctrl-C once     finish the step, save, exit 130
Ctrl-C twice    stop at once, exit 130; the newest checkpoint stays
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import NoneType
from typing import Any, Final
from uuid import uuid4

from rich.console import Console

from areal_lab.config.problem import ConfigError
from areal_lab.host.processes import MALLOC_FOR_TRAINING, Child, ChildDied, start_child
from areal_lab.live.presence import Present
from areal_lab.offline.job import Ended, Failed, Job, Note, Phase, Stepped, Tell, Told
from areal_lab.offline.report import recorded, summary_table
from areal_lab.offline.resume import Resumable
from areal_lab.offline.start import Prepared, begin
from areal_lab.pipeline.progress import Display, terminal_display
from areal_lab.pipeline.state import StopSignal
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.process.client import DEATH_NOTICE_S, TrainingError
from areal_lab.training.protocol import TrainerFailed

INTERRUPTED: Final = 130
_LINE_S: Final = 1.0
"""Shortest time between the lines of two steps without held-out metrics."""


def run_to_end(prepared: Prepared, resumable: Resumable | None = None) -> int:
    """Run and report; prints the run folder as the last line on standard output.

    Returns:
        The exit code: 0, or 130 after Ctrl-C.

    Raises:
        ConfigError: the data or the model cannot be used.
        Exception: whatever ended the run early.
    """
    stop, last = StopSignal(), _Last()
    job = begin(prepared, resumable)

    async def until_done(display: Display) -> dict[str, Any]:
        _stop_on_interrupt(stop, display)
        for note in (*prepared.notes, *(() if resumable is None else resumable.changes)):
            display.note(f"note: {note}")
        return await perform(job, prepared.gpus, display=display, stop=stop, last=last)

    try:
        with terminal_display(str, lambda: str(last.told or "")) as display:
            display.phase(f"run folder {job.folder}")
            summary = asyncio.run(until_done(display))
    except asyncio.CancelledError:
        text = f"stopped at once, as requested; checkpoints are in {job.folder}"
        Console(stderr=True).print(text, style="red", soft_wrap=True)
        return INTERRUPTED
    console = Console()
    console.print(summary_table(summary))
    print(job.folder)
    return INTERRUPTED if stop.requested else 0


@dataclass(slots=True)
class _Last:
    """The newest step, for displays."""

    told: Stepped | None = None


async def perform(
    job: Job,
    gpus: Sequence[str] = (),
    *,
    display: Display,
    stop: StopSignal,
    last: _Last | None = None,
) -> dict[str, Any]:
    """Run a job in processes of its own, with its sinks and picture; returns its summary.

    Args:
        gpus: of each process, with `cuda`.
        display: where to show progress.
        stop: requests an orderly end.
        last: gets each step.

    Raises:
        ConfigError: the data or the model cannot be used.
        TrainingError, ChildDied: the error of a process, or its end without a message.
    """
    with recorded(job, display) as (summary, present):
        tell = _teller(display, present, last or _Last())
        summary.update(await _in_processes(job, gpus, tell=tell, stop=stop))
    return summary


def _teller(display: Display, present: Present, last: _Last) -> Tell:
    """A function that shows what a run tells; of fast steps only some."""
    shown_s = 0.0

    def tell(told: Told) -> None:
        nonlocal shown_s
        match told:
            case Phase(text):
                present.phase(text)
                display.phase(text)
            case Note(text):
                display.note(text)
            case Stepped(step, total, metrics):
                last.told = told
                notable = step in (0, 1, total) or "held_out_loss" in metrics
                if notable or time.monotonic() - shown_s >= _LINE_S:
                    shown_s = time.monotonic()
                    display.note(str(told))
            case _:
                pass

    return tell


async def _in_processes(
    job: Job, gpus: Sequence[str], *, tell: Tell, stop: StopSignal
) -> dict[str, Any]:
    """Start the ranks, listen to the first one, and end all of them."""
    count = job.config.actor.processes
    if count > 1:  # a new file each time: one that another group left would mislead the ranks
        job = replace(job, rendezvous=str(job.folder / f".ranks-{uuid4().hex}"))
    async with AsyncExitStack() as opened:
        if job.rendezvous:
            opened.callback(Path(job.rendezvous).unlink, missing_ok=True)
        ours, theirs = socket.socketpair()
        pipe: Connection = Connection(ours.detach())
        opened.callback(pipe.close)
        children: list[Child] = []
        with theirs:
            for rank in range(count):
                child = await start_child(
                    f"trainer rank {rank}" if rank else "trainer",
                    "areal_lab.offline.worker",
                    [
                        *(("--fd", str(theirs.fileno())) if rank == 0 else ()),
                        *("--rank", str(rank), "--job", job.to_json()),
                    ],
                    log_path=RunFolder(job.folder).log(f"trainer-{rank}" if rank else "trainer"),
                    environment=_environment(job, gpus, rank),
                    pass_fds=[theirs.fileno()] if rank == 0 else [],
                )
                opened.push_async_callback(child.stop)
                children.append(child)
        stopping = asyncio.create_task(_pass_on(stop, pipe), name="stop")
        opened.callback(stopping.cancel)
        listening = asyncio.create_task(_listen(children[0], pipe, tell), name="listen")
        deaths = [asyncio.create_task(child.died()) for child in children[1:]]
        try:
            return await _first_cause(listening, deaths, children)
        finally:
            for task in (listening, *deaths):
                task.cancel()


async def _first_cause(
    listening: asyncio.Task[dict[str, Any]],
    deaths: Sequence[asyncio.Task[ChildDied]],
    children: Sequence[Child],
) -> dict[str, Any]:
    """The summary from the first rank, or the error that came first.

    What a rank says of a lost peer is that it is lost, so a rank that was killed goes before the
    others; where all fail alike, such as on bad data, the first one says why.
    """
    first, *others = children
    await asyncio.wait([listening, *deaths], return_when=asyncio.FIRST_COMPLETED)
    if not listening.done():
        await asyncio.wait([listening], timeout=DEATH_NOTICE_S)
        if listening.done() and (
            isinstance(listening.exception(), ConfigError | NoneType)
            or (_killed(first) and not any(map(_killed, others)))
        ):
            return listening.result()
        raise next(death.result() for death in deaths if death.done())
    if listening.exception() is None or isinstance(listening.exception(), ConfigError):
        return listening.result()
    if deaths and not any(death.done() for death in deaths):
        await asyncio.wait(deaths, timeout=DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
    for child, death in zip(others, deaths, strict=True):
        if death.done() and _killed(child):
            raise death.result()
    return listening.result()


def _killed(child: Child) -> bool:
    return (child.process.returncode or 0) < 0


async def _listen(child: Child, pipe: Connection, tell: Tell) -> dict[str, Any]:
    """Pass on what the first rank tells, until its end."""
    while True:
        try:
            told = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError) as error:
            raise await child.died() from error
        match told:
            case Ended(summary):
                return summary
            case Failed(message, traceback, problems):
                if problems:
                    raise ConfigError(*problems)
                raise TrainingError(TrainerFailed(message, traceback))
            case _:
                tell(told)


async def _pass_on(stop: StopSignal, pipe: Connection) -> None:
    await stop.wait()
    with suppress(OSError):  # the process has ended
        pipe.send("stop")


def _environment(job: Job, gpus: Sequence[str], rank: int) -> dict[str, str]:
    return {
        **{name: value for name, value in MALLOC_FOR_TRAINING.items() if name not in os.environ},
        **({"CUDA_VISIBLE_DEVICES": gpus[rank]} if gpus else {}),
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "TOKENIZERS_PARALLELISM": "true" if rank == 0 else "false",
        "HF_HUB_OFFLINE": "1",
    }


def _stop_on_interrupt(stop: StopSignal, display: Display) -> None:
    """The first Ctrl-C requests an orderly end, the second cancels the run."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a coroutine"

    def interrupt() -> None:
        if stop.requested:
            task.cancel()
        else:
            display.note(
                "stopping after the running step, which is saved; press Ctrl-C again to stop at "
                "once"
            )
        stop.request()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
