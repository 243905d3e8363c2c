"""Run a job on fixed data: from a terminal in separate processes, or in the process of a script.

console (no torch) --Job--> rank 0, 1 ...;   rank 0 --Phase, Note, Stepped, Ended--> console
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import NoneType
from typing import Any, Final
from uuid import uuid4

from areal_lab.config.offline import OfflineConfig
from areal_lab.config.problem import ConfigError, refusal
from areal_lab.host.processes import MEMORY_FOR_TRAINING, Child, ChildDied, start_child
from areal_lab.offline.job import Emit, Ended, Failed, ResolvedJob, Stepped
from areal_lab.offline.report import ending, event_handler, summary_table
from areal_lab.offline.resume import Resumable
from areal_lab.offline.rows import RowSet
from areal_lab.offline.start import begin, resolve_offline
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display, Silent
from areal_lab.shell.recorded import recorded, recorded_here
from areal_lab.shell.stop import StopSignal
from areal_lab.shell.terminal import TerminalRun
from areal_lab.training.process.client import DEATH_NOTICE_S, TrainingError
from areal_lab.training.protocol import TrainerFailed

_LINE_S: Final = 1.0
"""Minimum seconds between the lines of two steps without held-out metrics."""


def run_to_end(resolved: ResolvedJob, resumable: Resumable | None = None) -> int:
    """Run and report; see `TerminalRun.to_end`.

    Raises:
        ConfigError: the data or the model cannot be used.
        Exception: the error that ended the run.
    """
    last, job = _Last(), begin(resolved, resumable)
    terminal = TerminalRun(
        results=summary_table,
        saved=lambda: f"checkpoints are in {job.folder}",
        counts=lambda: str(last.step or ""),
    )

    async def body(display: Display) -> tuple[Path, dict[str, Any]]:
        display.phase(f"run folder {job.folder}")
        for note in (*job.notes, *(() if resumable is None else resumable.changes)):
            display.note(f"note: {note}")
        return job.folder, await perform(job, display=display, stop=terminal.stop, last=last)

    return terminal.to_end(body)


@dataclass(slots=True)
class _Last:
    """Newest step of a run, for displays."""

    step: Stepped | None = None


async def perform(
    job: ResolvedJob,
    *,
    display: Display,
    stop: StopSignal,
    last: _Last | None = None,
) -> dict[str, Any]:
    """Run a job in separate processes, with its sinks and picture; returns its summary.

    Args:
        job: the checked run.
        display: shows the progress.
        stop: requests a stop after the running step.
        last: set to the newest step.

    Raises:
        ConfigError: the data or the model cannot be used.
        TrainingError, ChildDied: a process failed, or ended without a message.
    """
    async with recorded(job.config, RunFolder(job.folder), display, ending(job), stop) as run:
        emit = event_handler(run.display, _sometimes(run.display, last or _Last()))
        run.summary = await _in_processes(job, emit=emit, stop=stop)
    return run.summary


def _sometimes(display: Display, last: _Last) -> Callable[[Stepped], None]:
    """Make a function that shows steps, at most one per `_LINE_S` unless it is notable."""
    shown_s = 0.0

    def on_step(step: Stepped) -> None:
        nonlocal shown_s
        last.step = step
        notable = step.step in (0, 1, step.total_steps) or "held_out_loss" in step.metrics
        if notable or time.monotonic() - shown_s >= _LINE_S:
            shown_s = time.monotonic()
            display.note(str(step))

    return on_step


async def _in_processes(job: ResolvedJob, *, emit: Emit, stop: StopSignal) -> dict[str, Any]:
    """Start the ranks, pass on the events of the first one, and stop all of them."""
    count = job.config.actor.processes
    if count > 1:  # a new file each time: a file of earlier ranks would mislead these
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
                    environment=_environment(job, rank),
                    pass_fds=[theirs.fileno()] if rank == 0 else [],
                )
                opened.push_async_callback(child.stop)
                children.append(child)
        stopping = asyncio.create_task(_pass_on(stop, pipe), name="stop")
        opened.callback(stopping.cancel)
        listening = asyncio.create_task(_listen(children[0], pipe, emit), name="listen")
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
    """Return the summary from the first rank, or raise the error that came first.

    Other ranks report a killed rank only as a lost peer, so the death of the killed rank is raised.
    If all ranks fail with the same error, such as on bad data, the first one reports it.
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


async def _listen(child: Child, pipe: Connection, emit: Emit) -> dict[str, Any]:
    """Pass on the events of the first rank until its end; returns the summary."""
    while True:
        try:
            event = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError) as error:
            raise await child.died() from error
        match event:
            case Ended(summary):
                return summary
            case Failed(message, traceback, problems):
                if problems:
                    raise ConfigError(*problems)
                raise TrainingError(TrainerFailed(message, traceback))
            case _:
                emit(event)


async def _pass_on(stop: StopSignal, pipe: Connection) -> None:
    await stop.wait()
    with suppress(OSError):  # the process has ended
        pipe.send("stop")


def _environment(job: ResolvedJob, rank: int) -> dict[str, str]:
    return {
        **{name: value for name, value in MEMORY_FOR_TRAINING.items() if name not in os.environ},
        **({"CUDA_VISIBLE_DEVICES": job.gpus[rank]} if job.gpus else {}),
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        "TOKENIZERS_PARALLELISM": "true" if rank == 0 else "false",
        "HF_HUB_OFFLINE": "1",
    }


def train_here(
    config: OfflineConfig,
    rows: RowSet | None = None,
    *,
    on_step: Callable[[int, Mapping[str, float]], object] = lambda *_: None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Check a config and train to the end; returns the content of summary.json, with `folder`.

    Args:
        config: settings of the run.
        rows: rows instead of `config.dataset`.
        on_step: called with the number and the metrics of each step.
        display: shows the progress; None shows nothing.

    Raises:
        ConfigError: one line per problem, before anything is loaded.
        Exception: the error that ended the run.
    """
    import torch  # not at the top: `run_to_end` does not need torch in its process

    from areal_lab.offline.run import run

    if config.actor.processes > 1:
        raise refusal(
            "actor.processes",
            f"actor.processes is {config.actor.processes}, but this trains in one process; set "
            "it to 1, or use the command",
        )
    job = begin(resolve_offline(config, rows))
    torch.set_num_threads(job.threads)

    folder, stop = RunFolder(job.folder), StopSignal()
    with recorded_here(config, folder, display or Silent(), ending(job), stop) as recording:
        emit = event_handler(recording.display, lambda event: on_step(event.step, event.metrics))
        recording.summary = run(job, job.rows, emit=emit, stop=lambda: stop.requested)
    return {**recording.summary, "folder": str(job.folder)}
