"""Child processes that never outlive their parent, however it exits.

    parent holds the write end of a pipe (the lifeline) --- child waits at its read end,
                                                            and on the parent's pidfd
    parent exits, even by SIGKILL  ->  kernel closes the pipe  ->  child kills its own group, or
                                                                   its guard does

The pidfd (Linux) is needed if the parent forked other children: they hold copies of the write end,
so the pipe stays open.

A child runs in its own session, so that Ctrl-C in the terminal reaches only the parent, which then
decides what to finish. The child's output goes to a log file; its last lines become part of the
error message if the child dies.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol

from areal_lab.host.memory import group_peak_rss_bytes

_LIFELINE = "AREAL_LAB_LIFELINE"
"""Environment variable of a child: descriptor of the pipe's read end, comma, parent's id."""

KEPT_BACK: Final = (
    *("AREAL_LAB_ENGINE_KEY", "AREAL_LAB_CLUSTER_TOKEN", "AREAL_LAB_PIPE_KEY"),
    "RAY_AUTH_TOKEN",
)
"""Variables of this process that children do not inherit by default: the code of rewards, agents
and sinks does not need the key of an engine."""

_clean_ups: list[Callable[[], object]] = []

GUARD_GRACE_S: Final = 2.0
"""Seconds for the functions of `on_parent_death` after the parent is gone, before the guard kills
the child."""

STOP_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL when stopping a child."""


class ChildDied(RuntimeError):
    """A child process exited unexpectedly; the message has the exit code and the end of its log."""


class RunningProcess(Protocol):
    """A process that this program has started, here or on another host."""

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def pid(self) -> int:
        """Process id on its host, also the id of its process group."""
        ...

    @property
    def running(self) -> bool:
        """True unless the process is known to have ended."""
        ...

    async def died(self) -> ChildDied:
        """Wait until the process has ended, and return an error that describes how."""
        ...

    async def ended(self) -> None:
        """Wait until the process has ended."""
        ...

    def ask_to_end(self) -> None:
        """Send SIGTERM, and do not wait."""
        ...

    async def stop(self, *, at_once: bool = False) -> None:
        """End the process with its descendants, and wait until they are gone. Idempotent."""
        ...

    async def peak_memory_bytes(self) -> int:
        """Largest resident memory of the process and its descendants so far."""
        ...


@dataclass(frozen=True, slots=True)
class Child:
    """A running child process."""

    name: str
    process: asyncio.subprocess.Process
    log_path: Path
    _lifeline: IO[bytes]

    @property
    def pid(self) -> int:
        """Process id, also the id of the process group."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """True unless the process is known to have ended."""
        return self.process.returncode is None

    async def ended(self) -> None:
        """Wait until the process exits."""
        await self.process.wait()

    async def peak_memory_bytes(self) -> int:
        """Largest resident memory of its process group so far."""
        return group_peak_rss_bytes(self.pid)

    async def died(self) -> ChildDied:
        """Wait until the process exits, and return an error that describes how."""
        how = exit_text(await self.process.wait())
        return ChildDied(
            f"{self.name} (process {self.pid}) {how}; the last lines of {self.log_path}:\n"
            f"{last_lines(self.log_path)}"
        )

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process and its group, and do not wait; `stop` insists."""
        if not self._lifeline.closed:
            self._signal(signal.SIGTERM)

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop the process and its descendants, by SIGTERM and then SIGKILL. Idempotent."""
        if self._lifeline.closed:
            return  # the process id may have been reused
        try:
            if not at_once:
                self._signal(signal.SIGTERM)
                await asyncio.wait_for(self.process.wait(), STOP_GRACE_S)
        except TimeoutError:
            pass
        finally:
            # Even if it has exited: its descendants may still run.
            self._signal(signal.SIGKILL)
            self._lifeline.close()
            await self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass


def exit_text(code: int) -> str:
    """How a process ended, for messages.

    >>> exit_text(3)
    'exited with 3'
    """
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (the kernel does so when memory runs out)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


async def start_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `python -m module arguments...`; the module must call `watch_parent` first.

    Args:
        environment: variables to add to this process's own, of which `KEPT_BACK` are left out.
    """
    return await start_command(
        name,
        [sys.executable, "-m", module, *arguments],
        log_path=log_path,
        environment=environment,
        pass_fds=pass_fds,
    )


def _unlinked(path: str, flags: int) -> int:
    """Open a log, unless its name is a link: another user may have filled the folder."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


async def start_command(
    name: str,
    command: Sequence[str],
    *,
    log_path: Path,
    output_path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a command whose program calls `watch_parent` first; arguments as in `start_child`.

    Args:
        output_path: file that receives its standard output; None takes `log_path`.
    """
    read_fd, write_fd = os.pipe()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            open(log_path, "ab", opener=_unlinked) as log,
            open(output_path or log_path, "ab", opener=_unlinked) as output,
        ):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                env={
                    **inherited_environment(),
                    **(environment or {}),
                    _LIFELINE: f"{read_fd},{os.getpid()}",
                },
                pass_fds=(read_fd, *pass_fds),
                start_new_session=True,
            )
    except BaseException:
        os.close(write_fd)
        raise
    finally:
        os.close(read_fd)
    return Child(name=name, process=process, log_path=log_path, _lifeline=os.fdopen(write_fd, "wb"))


@contextmanager
def lifeline() -> Iterator[tuple[int, dict[str, str]]]:
    """A descriptor to pass on, and variables, with which `watch_parent` ends a child after this."""
    read_fd, write_fd = os.pipe()
    try:
        yield read_fd, {_LIFELINE: f"{read_fd},{os.getpid()}"}
    finally:
        os.close(read_fd)
        os.close(write_fd)


def inherited_environment() -> dict[str, str]:
    """The environment of this process without `KEPT_BACK`."""
    return {name: value for name, value in os.environ.items() if name not in KEPT_BACK}


def watch_parent(*, guarded: bool = False) -> threading.Thread | None:
    """In a child: exit, with all descendants, as soon as the parent is gone.

    Does nothing in a process that was not started by `start_child`, so that a server can also be
    started manually. Call it before another thread starts.

    Args:
        guarded: let a second process watch, too, and kill this one if it cannot do so
            itself: code in C, such as a regular expression, may block all threads. It
            has the functions of `on_parent_death` that are registered by now.

    Returns:
        The watching thread. A child that notices its parent's exit in another way, such as a
        closed connection, must join it, so that the functions of `on_parent_death` still run.
    """
    lifeline = os.environ.pop(_LIFELINE, None)
    if lifeline is None:
        return None
    fd, parent = map(int, lifeline.split(","))
    os.set_inheritable(fd, False)
    watched = [fd]
    if sys.platform == "linux":
        try:
            watched.append(os.pidfd_open(parent))
        except OSError:
            pass  # the parent is gone already; getppid says so below
    if guarded:
        _fork_guard(watched, lives=os.getppid() == parent)

    def wait_for_end() -> None:
        if os.getppid() == parent:
            _wait_for_any(watched)
        _clean_up()
        os.killpg(os.getpgid(0), signal.SIGKILL)

    watcher = threading.Thread(target=wait_for_end, name="lifeline", daemon=True)
    watcher.start()
    return watcher


def _fork_guard(watched: Sequence[int], *, lives: bool) -> None:
    """Fork a process that kills this group a little after the parent's end."""
    group = os.getpgid(0)
    if os.fork():
        return
    try:
        # Others must see the end of this process's sockets and pipes when it dies.
        first = 0
        for kept in sorted(watched):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        if lives:
            _wait_for_any(watched)
        with suppress(ProcessLookupError):  # it has ended by itself, as it should
            _wait_for_any([os.pidfd_open(group)], GUARD_GRACE_S)
            os.kill(group, signal.SIGKILL)
            _clean_up()
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def log_exception() -> None:
    """Print the traceback of the exception that is handled, for the log of this process.

    A full disk must not keep the process from reporting the exception to its parent.
    """
    with suppress(OSError, ValueError):  # a guard has no standard error
        traceback.print_exc()


def _clean_up() -> None:
    for clean_up in _clean_ups:
        try:
            clean_up()
        except Exception:  # the process exits next in any case
            log_exception()


def _wait_for_any(ends: Sequence[int], timeout_s: float | None = None) -> None:
    """Wait for an event on a descriptor. No data is ever written, so any event is an end."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    poll.poll(None if timeout_s is None else 1000 * timeout_s)


def on_parent_death(clean_up: Callable[[], object]) -> None:
    """In a child: call this function before exiting with the parent; it must not block."""
    _clean_ups.append(clean_up)


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Disable the cyclic garbage collector while a process imports torch and transformers.

    They create half a million permanent objects. Collecting meanwhile takes a fifth of the import
    time and finds nothing; later collections skip these objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_TAIL_BYTES: Final = 2**20


def last_lines(path: Path, count: int = 20, width: int = 300) -> str:
    """Return the last lines of a log file, each cut at `width`, or the reason why there are
    none.
    """
    from areal_lab.host.foreign import read_bytes  # loads pydantic, which few processes need

    try:
        start = max(0, path.stat().st_size - _TAIL_BYTES)  # it may be of days, or a stranger's
        lines = read_bytes(path, start=start).decode(errors="replace").splitlines()
    except (OSError, ValueError) as error:
        return f"(no log: {error})"
    # Servers print all their settings in one line.
    cut = [line if len(line) <= width else f"{line[:width]} ..." for line in lines[-count:]]
    return "\n".join(cut) or "(the log is empty)"


MEMORY_FOR_TRAINING: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}
"""Settings of glibc that keep large freed buffers in the process. By default glibc returns them to
the kernel and faults them in again, which takes 44 % of the CPU time of a training step on a CPU.

oneDNN keeps the kernels of 1,024 products, about 0.3 MB each. A micro-batch needs 20, mostly for
each of its layers, and few later ones have its exact number of tokens.

They take effect only if set before the process starts; a variable that the user has set is kept."""
