"""Run programs in a sandbox, from threads or from an event loop; also many concurrently.

>>> sandbox = choose("auto")                                             # levels.py
>>> sandbox.run("print(6 * 7)").stdout
'42\\n'
>>> await sandbox.run_async(program, stdin="3 4", limits=Limits(timeout_s=1.0))
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from areal_lab.host.isolation import Level
from areal_lab.rewards.sandbox import cell, confine, keeper
from areal_lab.rewards.sandbox.confine import visible_paths

End: TypeAlias = Literal["exited", "crashed", "timeout", "memory", "processes", "output", "stopped"]
"""How a program ended: by itself, by a signal, at one of its limits, or because the last of the
programs that ran with it had ended."""

_ENDS: Final[Mapping[int, End]] = {
    keeper.EXITED: "exited",
    keeper.CRASHED: "crashed",
    keeper.TIMEOUT: "timeout",
    keeper.MEMORY: "memory",
    keeper.PROCESSES: "processes",
    keeper.OUTPUT: "output",
    keeper.STOPPED: "stopped",
}
_log: Final = logging.getLogger(__name__)
_GRACE_S: Final = 60.0  # for the start and end of cells on a busy machine
_STOP_S: Final = 10.0
_HEADER: Final = 6 * 8
ENVIRONMENT: Final[Mapping[str, str]] = {
    "PATH": "/usr/bin:/bin",
    "HOME": confine.WORK,
    "TMPDIR": confine.WORK,
    "LANG": "C.UTF-8",
}

BOOT: Final = """
import marshal, os, sys
def take(end=int(sys.argv[1])):
    def read(count):
        parts = []
        while count:
            part = os.read(end, min(count, 1 << 20))
            if not part:
                raise EOFError("the request is cut off")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
    return marshal.loads(read(int.from_bytes(read(8), "little")))
modules, entry = take()
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    parent, _, child = name.rpartition(".")
    setattr(sys.modules.setdefault(parent, type(sys)(parent)), child, module)
    exec(code, module.__dict__)
sys.modules[entry].main(take)
"""
"""Program of the sandbox's interpreters: modules come as code, so none is searched for, with the
name of the one whose `main` is called."""


class SandboxError(RuntimeError):
    """The sandbox could not run a program; says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program, including its child processes."""

    timeout_s: float = 5.0
    """Wall time from the program's start."""
    cpu_s: float = 3600.0
    """CPU time of each process, rounded up to seconds. Unlike wall time, it does not depend on
    the load of the machine."""
    memory_bytes: int = 1 << 30
    """Memory of all processes together, and address space of each."""
    disk_bytes: int = 32 << 20
    """All files together, which also count as memory."""
    output_bytes: int = 1 << 16
    """Standard output and error together."""
    processes: int = 32
    """Concurrent processes and threads."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, but must be > 0 and finite")


DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Result of a program."""

    end: End
    """`exited` says nothing about success: see `code`."""
    code: int = 0
    """Exit code, if it exited; number of the signal, if it crashed."""
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    """Seconds from the program's start to its end."""
    cpu_s: float = 0.0
    """CPU seconds of all its processes, including about 10 ms of the sandbox's own."""
    left: tuple[str, ...] = ()
    """Files of its folder that could not be removed, one line each; only at the level `unsafe`."""

    @property
    def passed(self) -> bool:
        """True if it exited with code 0. A program can do so at any line, so this proves nothing
        about it.
        """
        return self.end == "exited" and self.code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program of our own, for `run_linked`: `module.main(argument)`."""

    module: str
    """One of `modules` of the call."""
    argument: Mapping[str, object] = field(default_factory=dict)
    """Plain data, for marshal."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Run Python programs at one level of containment; `levels.choose` returns one that works.

    Programs run under this interpreter, with the standard library, in an empty folder. `folders`
    are packages that programs may import, as absolute paths; readable inside.
    """

    level: Level
    folders: tuple[str, ...] = ()

    def run(self, program: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Finished:
        """Run a program to its end or a limit; nothing of it remains."""
        return _run(self._call((_source(program, stdin),), limits))[0]

    async def run_async(
        self, program: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS
    ) -> Finished:
        """As `run`, for an event loop; a canceled call ends its program first."""
        return (await _run_async(self._call((_source(program, stdin),), limits)))[0]

    def run_linked(
        self,
        first: Job,
        last: Job,
        modules: Sequence[str],
        *,
        limits: Limits = DEFAULT_LIMITS,
    ) -> tuple[Finished, Finished]:
        """Run two programs with a pipe in each direction between them, until the last one ends.

        `modules` are names of modules whose code both get, in the order of their imports.
        """
        jobs: tuple[dict[str, object], ...] = tuple(
            {"module": one.module, "argument": dict(one.argument)} for one in (first, last)
        )
        found = _run(self._call(jobs, limits, tuple(modules)))
        return found[0], found[1]

    def _call(
        self, jobs: tuple[dict[str, object], ...], limits: Limits, modules: tuple[str, ...] = ()
    ) -> _Call:
        asked = request(self.level, self.folders, jobs, limits, modules)
        return _Call(asked, len(jobs), limits.timeout_s + _GRACE_S)


@dataclass(frozen=True, slots=True)
class _Call:
    """One use of a keeper."""

    asked: bytes
    cells: int
    patience_s: float


def _source(program: str, stdin: str) -> dict[str, object]:
    text = program.encode("utf-8", "replace").decode()
    return {"source": text, "stdin": stdin.encode("utf-8", "replace")}


# --- request and reply ---------------------------------------------------------------------------

_PREFIX: Final = "areal_lab.rewards.sandbox."
_REMOVE: Final = "areal_lab.host.owned_folders"
_INSIDE: Final = (f"{_PREFIX}kernel", f"{_PREFIX}confine", f"{_PREFIX}cell")


def request(
    level: Level,
    folders: tuple[str, ...],
    jobs: tuple[dict[str, object], ...],
    limits: Limits,
    modules: tuple[str, ...],
) -> bytes:
    """The bytes for the keeper: modules; settings of all cells; a job for each, read in turn."""
    visible = visible_paths(folders)
    setup: dict[str, object] = {
        "level": level,
        "limits": asdict(limits),
        "readable": visible.readable,
        "links": visible.links,
        "path": list(folders),
        "parent": os.getpid(),
        "cells": len(jobs),
    }
    if level == "bubblewrap":
        setup["modules"] = _bundle((*_INSIDE, *modules)), f"{_PREFIX}cell"
        inner = [*_interpreter(), str(cell.BUNDLE)]
        setup["command"] = confine.command(visible, limits.disk_bytes, ENVIRONMENT, inner)
    entry = f"{_PREFIX}keeper"
    bundle = _bundle((_REMOVE, *_INSIDE, *modules, entry)), entry
    frames: tuple[Any, ...] = (bundle, setup, *jobs)
    parts = [marshal.dumps(one) for one in frames]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def read_reply(reply: bytes, cells: int) -> list[Finished]:
    """Parse the results of the programs; raises SandboxError for a refusal or an invalid reply."""
    if reply[:1] == bytes((keeper.REFUSED,)):
        raise SandboxError(" ".join(reply[8:].decode(errors="replace").split()))
    found = []
    for _ in range(cells):
        header, reply = reply[:_HEADER], reply[_HEADER:]
        if len(header) < _HEADER:
            raise SandboxError("the sandbox ended without a reply")
        numbers = [int.from_bytes(header[at : at + 8], "little") for at in range(0, _HEADER, 8)]
        end, code, wall_us, cpu_us, out, error = numbers
        if len(reply) < out + error:
            raise SandboxError("the sandbox's reply is cut off")
        texts = [part.decode(errors="replace") for part in (reply[:out], reply[out : out + error])]
        reply = reply[out + error :]
        found.append(
            Finished(
                end=_ENDS[end],
                code=code,
                stdout=texts[0],
                stderr=texts[1],
                wall_s=wall_us / 1e6,
                cpu_s=cpu_us / 1e6,
            )
        )
    if left := tuple(reply.decode(errors="replace").splitlines()):
        _log.warning(
            "%d files or folders of a program could not be removed: %s", len(left), left[0]
        )
        found = [replace(one, left=left) for one in found]
    return found


@cache
def _bundle(names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Names and code of modules, without docstrings."""
    return tuple((name, _code(name)) for name in names)


@cache
def _code(name: str) -> Any:
    found = importlib.util.find_spec(name)
    assert found is not None, name
    assert found.origin is not None, name
    text = Path(found.origin).read_text(encoding="utf-8")
    return compile(text, found.origin, "exec", dont_inherit=True, optimize=2)


# --- the keeper's process ------------------------------------------------------------------------


def _interpreter() -> list[str]:
    """Command of an interpreter that reads no environment, no site and no user packages."""
    # Not that of a virtual environment, whose files programs do not see.
    path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [path, "-I", "-S", "-B", "-c", BOOT]


def _run(call: _Call) -> list[Finished]:
    try:
        process = subprocess.Popen(
            [*_interpreter(), "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"no process for the sandbox: {error}") from error
    with process:
        try:
            reply, errors = process.communicate(call.asked, timeout=call.patience_s)
        except BaseException as error:
            process.terminate()  # it ends its cells, then itself
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise _no_reply(call) from None
            raise
    return _read(call, process.returncode, reply, errors)


async def _run_async(call: _Call) -> list[Finished]:
    try:
        process = await asyncio.create_subprocess_exec(
            *_interpreter(),
            "0",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"no process for the sandbox: {error}") from error
    try:
        async with asyncio.timeout(call.patience_s):
            reply, errors = await process.communicate(call.asked)
    except BaseException as error:
        if process.returncode is None:
            process.terminate()
            await asyncio.shield(_ended(process))
        if isinstance(error, TimeoutError):
            raise _no_reply(call) from None
        raise
    return _read(call, process.returncode or 0, reply, errors)


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _no_reply(call: _Call) -> SandboxError:
    return SandboxError(f"the sandbox gave no reply within {call.patience_s:g} s")


def _read(call: _Call, code: int, reply: bytes, errors: bytes) -> list[Finished]:
    if code and not reply:
        told = errors.decode(errors="replace").strip() or f"its process ended with {code}"
        raise SandboxError(f"the sandbox failed: {told[-1000:]}")
    return read_reply(reply, call.cells)
