"""Run a Python program in a process of its own, with limits of time, memory and output.

    program --stdin--> setpriv --> unshare --> python -I, in an empty folder --> finished?

A program counts as finished only if its last line was reached: leaving early by `exit(0)` does not.
`unshare` takes network and other processes away where the kernel lets users do that (`isolated`
tells). It is no security boundary: files that the user can read can be read, files elsewhere that
the user can write can be written, and a program that looks for it can report success.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 5.0
MEMORY_BYTES: Final = 1 << 30
_FILE_BYTES: Final = 16 << 20
"""Largest file that a program may write, its output included."""
_SHOWN_BYTES: Final = 4096
_OPEN_FILES: Final = 64
_NAMESPACES: Final = (
    *("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"),
)

_RUNNER: Final = """
import os, resource, sys
def limited(which, most):
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))
descriptor, cpu_s, memory, file, files = map(int, sys.argv[1:])
secret = os.read(descriptor, 64)
program = sys.stdin.read()
limited(resource.RLIMIT_CPU, cpu_s)
limited(resource.RLIMIT_AS, memory)
limited(resource.RLIMIT_FSIZE, file)
limited(resource.RLIMIT_NOFILE, files)
limited(resource.RLIMIT_CORE, 0)
del sys.argv[1:]
exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
os.write(descriptor, secret)
"""


class SandboxError(RuntimeError):
    """The process could not be started; says nothing about the program."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a program."""

    passed: bool
    """Whether its end was reached, within the limits."""
    timed_out: bool
    output: str
    """The end of its standard output and error, at most 4 kB."""


def run_python(
    program: str, *, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES
) -> Finished:
    """Run a program to its end or its limits; every process it started is killed then.

    Without `unshare`, a process that it put into another session survives.

    Args:
        timeout_s: of wall time.
        memory_bytes: of address space of each process.

    Raises:
        SandboxError: the process could not be started.
        ValueError: a limit is not positive.
    """
    if not timeout_s > 0 or not memory_bytes > 0:
        raise ValueError(
            f"timeout_s is {timeout_s} and memory_bytes {memory_bytes}, but both must be > 0"
        )
    # A socket pair and not a pipe: the secret goes in and comes back on one descriptor.
    import socket

    ours, theirs = socket.socketpair()
    secret = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory(prefix="areal-lab-code-") as root, ours, theirs:
        work, log = Path(root, "work"), Path(root, "output")
        work.mkdir()
        arguments = map(
            str,
            (
                theirs.fileno(),
                int(timeout_s) + 1,
                memory_bytes,
                _FILE_BYTES,
                _OPEN_FILES,
            ),
        )
        ours.sendall(secret)
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    [*_prefix(), sys.executable, "-I", "-B", "-c", _RUNNER, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=work,
                    env={"PATH": os.defpath, "HOME": str(work), "LANG": "C.UTF-8"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"no process for the program: {error}") from error
            theirs.close()
            timed_out = _communicate(process, program, timeout_s)
        ours.setblocking(False)
        try:
            passed = not timed_out and ours.recv(len(secret)) == secret
        except OSError:  # nothing came, or another process of the program has it open
            passed = False
        return Finished(passed, timed_out, _end_of(log))


def isolated() -> bool:
    """Whether programs run without network and in a process namespace of their own here."""
    return _NAMESPACES[0] in _prefix()


def _communicate(process: subprocess.Popen[bytes], program: str, timeout_s: float) -> bool:
    """Send the program, wait, and kill what is left; returns whether time ran out."""
    try:
        process.communicate(program.encode("utf-8", "replace"), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return True
    finally:
        # Also after an end: its descendants may still run. The id is free only after `wait`.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return False


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _SHOWN_BYTES))
        return file.read().decode(errors="replace")


@cache
def _prefix() -> tuple[str, ...]:
    """Commands in front of Python: end with this process; no network; own process ids."""
    with_parent = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    for prefix in ((*with_parent, *_NAMESPACES), with_parent):
        if prefix and _works((*prefix, "true")):
            return prefix
    return ()


def _works(command: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
