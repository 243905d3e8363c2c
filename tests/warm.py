"""Fork children from an interpreter that has already loaded torch and transformers.

A trainer or an embedded engine imports for five CPU seconds before it reads its first option, and
the tests start thirty of them. Here they start after the imports, and are otherwise like
`python -m module`: separate processes in their own session, with this process as their parent,
running the same `main`.

    tests ---- module, arguments, descriptors ----> warm interpreter (one per test process)
      |                                                  | fork
      | adopts, as its subreaper                     intermediate, which exits
      |                                                  | fork
      +------------------------------------------------ child

A command that a test runs, such as `areal-lab train`, starts its children without this, unless the
test uses `ForkedPopen`.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_lab.host.processes import heavy_imports

WARM = (
    "areal_lab.training.process.worker",
    "areal_lab.engines.embedded.server",
    "areal_lab.offline.worker",
    "tests.fault_lab.hosts.machine",
)
"""Modules to fork; every other command is started normally."""

STARTERS = (
    "areal_lab.cli.watched",
    "areal_lab.cluster.agent.run",
    "areal_lab.controllers.rollout_worker",
)
"""Modules to fork that start such modules themselves, which are then forked from them."""

PROBES = (
    "areal_lab.training.objective.advantages",
    "areal_lab.training.objective.loss",
    "areal_lab.training.objective.trial_call",
)
"""Modules that `subprocess.run` forks: they call a function of the user's once, with torch."""

LOADED = (
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "areal_lab.engines.embedded.app",
    "areal_lab.engines.embedded.batcher",
    "areal_lab.engines.embedded.loading",
    "areal_lab.engines.embedded.scheduler",
    "areal_lab.offline.run",
    "areal_lab.training.process.serve",
    "transformers.models.llama.modeling_llama",
)
"""Modules that they import at run time on the tests' models."""

_MACHINE = "tests.fault_lab.hosts.machine"
"""Runs a module whose children are forked from it."""
_PR_SET_CHILD_SUBREAPER = 36
_MOVED = 512
"""Descriptors of a child are moved here while the lower numbers are cleared."""
_in_use: list[_Warm] = []


@contextmanager
def children_from_a_warm_interpreter(
    modules: Sequence[str] = WARM,
    starters: Sequence[str] = STARTERS,
    *,
    of_this_one: bool = False,
) -> Iterator[None]:
    """Let `asyncio.create_subprocess_exec` fork commands that run one of these modules.

    `subprocess.run` forks those that run one of `PROBES`.

    Args:
        modules: are run by `python -m`.
        starters: the same, and what they start is forked from them.
        of_this_one: make the warm interpreter by a fork of this process, which has one thread.
    """
    start_cold, run_cold = asyncio.create_subprocess_exec, subprocess.run
    search_path = os.environ.get("PYTHONPATH")  # the warm interpreter uses this one
    warm = _Warm.forked() if of_this_one else _Warm()
    _in_use.append(warm)

    async def start(*command: str, **options: Any) -> Any:
        known = command[:2] == (sys.executable, "-m") and command[2] in {*modules, *starters}
        if known and options["env"].get("PYTHONPATH") == search_path:
            _, _, module, *arguments = command
            if module in starters:
                module, arguments = _MACHINE, ["-", module, *arguments]
            return _Forked(warm.fork(module, arguments, **options))
        return await start_cold(*command, **options)

    def run(command: Any, **options: Any) -> Any:
        asked = command if isinstance(command, list) else []
        known = asked[:2] == [sys.executable, "-m"] and asked[2] in PROBES
        if known and options["env"].get("PYTHONPATH") == search_path:
            return run_forked(command, timeout=options["timeout"], env=options["env"])
        return run_cold(command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        patch.setattr(subprocess, "run", run)
        yield
    _in_use.remove(warm)
    warm.end()


class ForkedPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, "-m", module, ...]`, forked as are its trainers and
    engines. It leads a session, and its words in `/proc` are those of the warm interpreter."""

    # Popen has made the pipes when it calls this, and does the rest with the process id.
    def _execute_child(self, *given: Any) -> None:
        names = inspect.signature(super()._execute_child).parameters  # type: ignore[misc]
        at = dict(zip(names, given, strict=True))
        interpreter, flag, *module_and_arguments = at["args"]
        assert (interpreter, flag) == (sys.executable, "-m")
        assert at["p2cwrite"] == -1, "it reads /dev/null"
        assert at["preexec_fn"] is None
        assert not at["shell"]
        self.pid = _in_use[-1].fork(
            _MACHINE,
            ["-", *module_and_arguments],
            stdin=subprocess.DEVNULL,
            stdout=1 if at["c2pwrite"] == -1 else at["c2pwrite"],
            stderr=2 if at["errwrite"] == -1 else at["errwrite"],
            env=os.environ if at["env"] is None else at["env"],
            pass_fds=at["pass_fds"],
            start_new_session=True,
            cwd=at["cwd"],
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(at[name] for name in pipes))  # type: ignore[attr-defined]


def run_forked(
    command: Sequence[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command that is forked, with its output as text."""
    pipe = subprocess.PIPE
    with ForkedPopen(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class _Forked:
    """The part of `asyncio.subprocess.Process` that `areal_lab.host.processes` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self._returncode

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        while (code := self.returncode) is None:
            ended = loop.create_future()
            # A duplicate, since a loop has one reader per descriptor.
            pidfd = os.dup(self._pidfd)
            loop.add_reader(pidfd, lambda end=ended: end.done() or end.set_result(None))
            try:
                await ended
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return code


class _Warm:
    """Handle of the warm interpreter, which is started at the first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @classmethod
    def forked(cls) -> _Warm:
        """One that is a child of this process and has what this one has loaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            _serve(theirs)
            os._exit(0)
        theirs.close()
        warm = cls()
        warm._socket = ours
        return warm

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdin: int,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
        cwd: str | Path | None = None,
    ) -> int:
        """Process id of a new child that runs this module."""
        assert stdin == subprocess.DEVNULL
        assert start_new_session
        if self._socket is None:
            self._socket = self._started()
        request = {
            "module": module,
            "arguments": list(arguments),
            "env": dict(env),
            "cwd": str(cwd or os.getcwd()),
            "numbers": [1, 2, *pass_fds],
        }
        files = [file if isinstance(file, int) else file.fileno() for file in (stdout, stderr)]
        with _adopting():
            message = json.dumps(request).encode()
            socket.send_fds(self._socket, [message], [*files, *pass_fds])
            reply = self._socket.recv(20)
        assert reply, "the warm interpreter exited; its output is above"
        return int(reply)

    def _started(self) -> socket.socket:
        # A datagram socket that also reports the exit of either side.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parent.parent,
                start_new_session=True,
            )
        return ours

    def end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.wait()


@contextmanager
def _adopting() -> Iterator[None]:
    """Let orphans among this process's descendants become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(requests: socket.socket) -> None:
    """The warm interpreter: fork a child per request, until the socket is closed."""
    with heavy_imports():
        for name in LOADED:
            importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lose the other threads"
    # It is asked to end by the end of the socket, not by what its group gets.
    handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    while True:
        request, fds, _, _ = socket.recv_fds(requests, 1 << 20, 32)
        if not request:
            return
        read_end, write_end = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            if os.fork() == 0:
                os.close(write_end)
                os.read(read_end, 1)  # the intermediate has exited: the requester is our parent now
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                _become(json.loads(request), fds, requests)
            os._exit(0)
        os.waitpid(intermediate, 0)
        for fd in (read_end, write_end, *fds):
            os.close(fd)


def _become(request: dict[str, Any], fds: list[int], requests: socket.socket) -> None:
    """Become `python -m module arguments...`; does not return."""
    code: Any = 1
    try:
        os.setsid()
        requests.send(str(os.getpid()).encode())
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _MOVED) for fd in fds]
        os.closerange(3, _MOVED)
        for number, fd in zip(request["numbers"], moved, strict=True):
            os.dup2(fd, number)
        os.closerange(_MOVED, max(moved) + 1)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.path[0] = request["cwd"]  # as with `-m`
        searched = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [folder for folder in searched if folder and folder not in sys.path]
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
