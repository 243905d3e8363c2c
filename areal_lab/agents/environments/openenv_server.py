"""OpenEnv servers that a run starts: `{name: openenv, command: [..., --port, "{port}"]}`.

    PlayServed.run --> Play, of the server's address --WebSocket--> the command

The server runs for the whole run and serves all samples. The samples of a server that ends have no
reward, and the next sample starts it again, at another port.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx2

from areal_lab.agents.command import attended, check_command
from areal_lab.agents.environments.openenv import ServerGone
from areal_lab.agents.environments.play import Play
from areal_lab.agents.workflow import Episode, WorkflowEngine
from areal_lab.data.runners.loop import MARK, end_marked
from areal_lab.data.runners.tasks import START_TIMEOUT_S, said
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.ports import connect_s, free_port
from areal_lab.host.processes import Child, exit_text, start_command
from areal_lab.rewards.service import RewardError

PORT: Final = "{port}"
_HOST: Final = "127.0.0.1"
_LOOK_S: Final = 0.2
"""Between two looks whether a server that starts listens."""
_EXIT_GRACE_S: Final = 30.0
"""From the end of a session to that of the process whose end it was, on a busy machine."""

_log = logging.getLogger(__name__)


class PlayServed:
    """Turns of a model in an environment of a server, which runs from `open` to `close`.

    Args:
        command: program and arguments; `{port}` is replaced with the port on which the server must
            listen.
        at: the workflow with a server's address.

    Raises:
        ValueError: in one line.
    """

    def __init__(self, command: Sequence[str], at: Callable[[str], Play]) -> None:
        check_command("openenv", command)
        if not any(PORT in word for word in command):
            raise ValueError(
                f"openenv: command is {' '.join(command)!r:.80}, but must contain {PORT}, which is "
                f"replaced with the port on which the server must listen: --port '{PORT}'"
            )
        at(f"http://{_HOST}:1")  # to check the other settings
        self._command = list(command)
        self._at = at
        self._starting = asyncio.Lock()
        self._server: _Server | None = None
        self._folder: Path | None = None

    async def open(self, model: Path) -> None:
        """See `Opens`: start the server."""
        del model
        self._folder = Path(tempfile.mkdtemp(prefix="areal-openenv-"))
        try:
            await self._ready()
        except RuntimeError as error:
            await self.close()
            raise RewardError(f"rollout.workflow: {error}") from None

    async def close(self) -> None:
        """Stop the server. Idempotent."""
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if self._folder is not None:
            remove_tree(self._folder)
            self._folder = None

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        server = await self._ready()
        try:
            return await self._at(server.url).run(engine, data)
        except ServerGone as error:
            if how := await server.end():
                raise RuntimeError(how) from error
            raise

    async def _ready(self) -> _Server:
        """The server, started again if it has ended."""
        async with self._starting:
            before = self._server
            if before is not None and before.running:
                return before
            if before is not None:
                await before.stop()
                _log.warning("%s; it is started again", await before.end())
            assert self._folder is not None
            self._server = server = _Server(self._command, self._folder / "server.log")
            await server.start()
            return server


class _Server:
    """One process."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        port = free_port(_HOST)
        self.url = f"http://{_HOST}:{port}"
        self._name = f"the OpenEnv server ({command[0]})"
        self._command = [word.replace(PORT, str(port)) for word in command]
        self._log = log
        self._mark = secrets.token_hex(16)
        self._child: Child | None = None

    @property
    def running(self) -> bool:
        """True unless it is known to have ended, or did not start."""
        return self._child is not None and self._child.running

    async def start(self) -> None:
        """Start the process, and wait until it listens.

        Raises:
            RuntimeError: in one line; it ended, or took too long.
        """
        child = self._child = await start_command(
            self._name,
            attended(self._command),
            log_path=self._log,
            environment={MARK: self._mark, "PYTHONUNBUFFERED": "1"},
        )
        ended = asyncio.create_task(child.ended())
        listens = asyncio.create_task(self._listens())
        try:
            await asyncio.wait(
                [ended, listens], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended.done() and listens.done():
                return listens.result()
            how = (
                await self.end()
                if ended.done()
                else (
                    f"{self._name} did not listen at {self.url} within {START_TIMEOUT_S:g} s, and "
                    f"was killed; {said(self._log)}"
                )
            )
            raise RuntimeError(how)
        except BaseException:
            await self.stop()
            raise
        finally:
            for task in (ended, listens):
                task.cancel()
            await asyncio.gather(ended, listens, return_exceptions=True)

    async def end(self) -> str:
        """How it ended, in one line; empty if it runs."""
        if self._child is None:
            return f"{self._name} did not start"
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_GRACE_S):
                code = await self._child.process.wait()
                return f"{self._name} {exit_text(code)}; {said(self._log)}"
        return ""

    async def stop(self) -> None:
        """End the process and all that it has started. Idempotent."""
        if self._child is not None:
            await self._child.stop()
            await asyncio.to_thread(end_marked, self._mark)

    async def _listens(self) -> None:
        """Wait for any reply over HTTP: a port of a container accepts connections before."""
        limit_s = connect_s(self.url, _EXIT_GRACE_S)
        async with httpx2.AsyncClient(trust_env=False, timeout=limit_s) as client:
            while True:
                with suppress(httpx2.TransportError):
                    async with client.stream("GET", f"{self.url}/health"):
                        return
                await asyncio.sleep(_LOOK_S)
