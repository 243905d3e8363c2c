"""Tools of MCP servers: `tools: [{name: mcp, command: [python, my_server.py]}]`.

    model --call--> ToolBox --> McpServers --> the server with the fewest calls
                                               client <--JSON lines on a socket--> its command

Servers run for the whole run and serve all samples. A result that says it is an error is text that
the model reads. A server that ends, writes something other than MCP to its standard output, or does
not reply to a ping after a call that took too long, is killed with all processes that it has
started. Its calls then raise `ToolBroken`: their samples have no reward. The next call starts it
again.

The client is that of the package `mcp`, which is imported when the first server starts.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_lab.agents.command import attended, check_command
from areal_lab.agents.tools.box import CallableTool, ToolBroken, ToolFailure
from areal_lab.data.runners.loop import MARK, end_marked
from areal_lab.data.runners.tasks import START_TIMEOUT_S, said
from areal_lab.extras import require
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.processes import Child, exit_text, start_command
from areal_lab.rewards.service import RewardError

if TYPE_CHECKING:  # it takes seconds to import
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp import Client
    from mcp.client import Transport
    from mcp.shared.message import SessionMessage
    from mcp.types import CallToolResult, Tool

NAME: Final = "mcp"
LINE_BYTES: Final = 2**24
"""Maximum bytes of one message of a server."""
PING_TIMEOUT_S: Final = 30.0
"""Longest wait for the reply to a ping, after which a server counts as hung."""
_EXIT_GRACE_S: Final = 2.0
_MOST_TOOLS: Final = 1000
_SHOWN: Final = 80
"""Bytes of a wrong line in an error."""


def is_mcp(setting: str | Mapping[str, Any]) -> bool:
    """Return whether the setting of a tool names MCP servers."""
    return (setting if isinstance(setting, str) else setting.get("name")) == NAME


class McpServers:
    """Processes of one MCP server, and its tools.

    Args:
        command: the server's program and arguments; it speaks MCP on its standard input and output.
        prefix: the model calls the server's tool `add` by the name `{prefix}_add`.
        only: names of the server's tools that the model may call; empty takes all.
        servers: processes. A call goes to the one that runs the fewest.
        timeout_s: time limit of a call.

    Raises:
        ValueError: in one line.
        MissingExtra: the package `mcp` is not installed.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        prefix: str = NAME,
        only: Sequence[str] = (),
        servers: int = 1,
        timeout_s: float = 10.0,
    ) -> None:
        check_command("the tool mcp", command)
        if isinstance(only, str):
            raise ValueError(f"the tool mcp: only is {only!r}, but must be a list of names")
        if servers < 1:
            raise ValueError(f"the tool mcp: servers is {servers}, but must be >= 1")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"the tool mcp: timeout_s is {timeout_s}, but must be > 0 (seconds)")
        require("the tool mcp", "mcp")
        self._command = list(command)
        self._prefix = prefix
        self._only = list(only)
        self._count = servers
        self._timeout_s = timeout_s
        self._servers: list[_Server] = []
        self._folder: Path | None = None

    async def open(self) -> list[CallableTool]:
        """Start the servers, and return their tools.

        Raises:
            RewardError: in one line; a server does not start, or has not the tools.
        """
        await asyncio.to_thread(_import)
        self._folder = Path(tempfile.mkdtemp(prefix="areal-mcp-"))
        self._starting = [asyncio.Lock() for _ in range(self._count)]
        self._servers = [self._server(number) for number in range(self._count)]
        try:
            await asyncio.gather(*(server.start() for server in self._servers))
            return self._chosen(self._servers[0].tools)
        except (ToolBroken, ValueError) as error:
            await self.close()
            raise RewardError(f"the tool mcp: {error}") from None

    async def close(self) -> None:
        """Stop the servers. Idempotent."""
        await asyncio.gather(*(one.stop() for one in self._servers))
        self._servers = []
        if self._folder is not None:
            remove_tree(self._folder)
            self._folder = None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Text of a tool's result.

        Raises:
            ToolFailure: with the text for the model.
            ToolBroken: the server is lost, or its reply is not that of a tool.
        """
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            raise ToolFailure(
                "error: the arguments have characters or numbers that JSON has not"
            ) from None
        number = min(range(len(self._servers)), key=lambda n: self._servers[n].calls)
        self._servers[number].calls += 1
        try:
            server = await self._ready(number)
            return await server.call(name, arguments, self._timeout_s)
        finally:
            self._servers[number].calls -= 1

    def _server(self, number: int) -> _Server:
        assert self._folder is not None
        log = self._folder / f"{number}.log"
        return _Server(f"server {number} ({self._command[0]})", self._command, log)

    async def _ready(self, number: int) -> _Server:
        """The server of this number, started again if it is lost.

        Raises:
            ToolBroken: it was lost between two calls, and no sample was told.
        """
        async with self._starting[number]:
            server = self._servers[number]
            if not server.lost:
                return server
            await server.stop()
            server.tell()
            again = self._server(number)
            again.calls, again.tools = server.calls, server.tools
            self._servers[number] = again
            await again.start()
            return again

    def _chosen(self, tools: Sequence[Tool]) -> list[CallableTool]:
        names = [tool.name for tool in tools]
        if not names:
            raise ValueError("the server has no tools")
        if missing := [name for name in self._only if name not in names]:
            raise ValueError(f"the server has no tool {missing[0]!r}, only {', '.join(names)}")
        return [
            _ServedTool(self, tool, f"{self._prefix}_{tool.name}")
            for tool in tools
            if not self._only or tool.name in self._only
        ]


class _ServedTool:
    """A tool of a server."""

    limits_itself = True  # a call may first wait for the start of a server

    def __init__(self, servers: McpServers, tool: Tool, name: str) -> None:
        self.name = name
        self.description = tool.description or ""
        self.parameters: Mapping[str, Any] = tool.input_schema
        if not isinstance(self.parameters.get("required", []), list):
            raise ValueError(f"the input schema of {tool.name} has a `required` that is no list")
        self._servers = servers
        self._tool = tool.name

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Result of the tool."""
        return await self._servers.call(self._tool, arguments)


class _Server:
    """One process, and the client that is connected to it."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.lost = ""
        """Why it is of no more use."""
        self.calls = 0
        """Calls that it runs."""
        self.tools: Sequence[Tool] = ()
        """Tools that it must have; all are taken if there are none yet."""
        self._name = name
        self._command = command
        self._log = log
        self._mark = secrets.token_hex(16)
        self._told = False
        self._ended = asyncio.Event()
        self._started = asyncio.Event()
        self._client: Client | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, and ask for its tools.

        Raises:
            ToolBroken: it ended, took too long, or has other tools than before.
        """
        self._serving = asyncio.create_task(self._serve(), name=self._name)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._started.wait()
        except TimeoutError:
            self._lose(f"did not list its tools in {START_TIMEOUT_S:g} s, and was killed")
        except asyncio.CancelledError:
            self._lose("was stopped while it started")
            self._told = True
            raise
        if self.lost:
            await self.stop()
            raise self._broken()

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Text of a result."""
        import anyio
        from mcp import MCPError

        client = self._client
        if client is None or self.lost:
            raise self._broken()
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            if not limit.expired():
                raise
            await self._check()
            raise ToolFailure(f"error: no result within {timeout_s:g} s", "timeout") from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._gone()
            raise self._broken() from None
        except MCPError as error:
            if self.lost:
                raise self._broken() from None
            raise ToolFailure(f"error: {error}") from error
        except Exception as error:  # its reply is not what its schema says
            raise ToolBroken(f"{self._name}, tool {name}: {_line(error)}") from error
        text = _text(result)
        if result.is_error:
            raise ToolFailure(text if text.lower().startswith("error") else f"error: {text}")
        return text

    def tell(self) -> None:
        """Fail a call if the server was lost and no call failed for it."""
        if not self._told:
            raise self._broken()

    async def stop(self) -> None:
        """End the process and all that it has started. Idempotent."""
        self._lose("was stopped")
        if self._serving is not None:
            await asyncio.wait([self._serving])

    def _broken(self) -> ToolBroken:
        self._told = True
        return ToolBroken(self.lost)

    async def _check(self) -> None:
        """Kill the server if it does not reply to a ping; calls that time out share one.

        Raises:
            ToolBroken: it was lost meanwhile.
        """
        if self._ping is None or self._ping.done():
            self._ping = asyncio.create_task(self._pinged())
        await asyncio.shield(self._ping)
        if self.lost:
            raise self._broken()

    async def _pinged(self) -> None:
        import anyio
        from mcp import MCPError

        assert self._client is not None
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                await self._client.session.send_ping()
        except TimeoutError:
            self._lose(f"did not reply for {PING_TIMEOUT_S:g} s, and was killed")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._gone()
        except MCPError:
            pass  # a reply, or the server is lost

    async def _gone(self) -> None:
        """Wait until `_attend` knows why the server takes no messages any more."""
        try:
            async with asyncio.timeout(2 * _EXIT_GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            self._lose("closed its standard input, and was killed")

    def _lose(self, reason: str) -> None:
        """Take no more calls, and begin to end the process."""
        if self.lost:
            return
        self.lost = f"{self._name} {reason}"
        self._ended.set()
        if self._client is None and self._serving is not None:
            self._serving.cancel()  # it waits for the server

    async def _serve(self) -> None:
        """Be connected until the end of the server, or of the run."""
        from mcp import Client

        try:
            transport: Transport = self._connected()
            async with Client(transport, mode="legacy", cache=None) as client:
                tools = await _listed(client)
                if self.tools and _schemas(tools) != _schemas(self.tools):
                    raise ValueError("has other tools than when it was first started")
                self.tools = tools
                self._client = client
                self._started.set()
                await self._ended.wait()
        except Exception as error:
            self._lose(f"cannot be used: {_line(error)}")
        finally:
            self._started.set()

    @asynccontextmanager
    async def _connected(
        self,
    ) -> AsyncIterator[
        tuple[
            MemoryObjectReceiveStream[SessionMessage | Exception],
            MemoryObjectSendStream[SessionMessage],
        ]
    ]:
        """Streams of messages from and to the process, which ends with the block."""
        import anyio

        ours, theirs = socket.socketpair()
        with theirs:
            # First: nothing would end a process that starts before a cancellation here.
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)
            try:
                child = await start_command(
                    self._name,
                    attended(self._command, theirs.fileno()),
                    log_path=self._log,
                    environment={MARK: self._mark},
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                writer.close()
                raise
        arrive, incoming = anyio.create_memory_object_stream["SessionMessage | Exception"]()
        outgoing, leave = anyio.create_memory_object_stream["SessionMessage"]()
        tasks = [
            asyncio.create_task(self._attend(child, reader, arrive)),
            asyncio.create_task(_write(writer, leave)),
        ]
        try:
            with arrive, incoming, outgoing, leave:
                yield incoming, outgoing
        finally:
            with suppress(TimeoutError, OSError):  # the protocol's way to ask a server to end
                writer.write_eof()
                async with asyncio.timeout(0 if tasks[0].done() else _EXIT_GRACE_S):
                    await child.ended()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            writer.close()
            await child.stop(at_once=True)
            await asyncio.to_thread(end_marked, self._mark)

    async def _attend(
        self,
        child: Child,
        reader: asyncio.StreamReader,
        arrive: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Pass messages on until the server ends or breaks the protocol; then it is lost."""
        reading = asyncio.create_task(_read(reader, arrive))
        ending = asyncio.create_task(child.ended())
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            broken = reading.done() and reading.result()
            if not broken:
                # It may have ended before its last message is read, or closed its output first.
                await asyncio.wait([reading, ending], timeout=_EXIT_GRACE_S)
                broken = reading.done() and reading.result()
            code = child.process.returncode
            if broken:
                self._lose(broken)
            elif code is not None:
                self._lose(f"{exit_text(code)}; {said(self._log)}")
            else:
                self._lose("closed its standard output, and was killed")
        except Exception as error:
            self._lose(f"could not be read: {_line(error)}")
        finally:
            arrive.close()  # which ends the calls that wait
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)


def _import() -> None:
    """In a thread: the event loop has other work meanwhile."""
    importlib.import_module("mcp")


async def _read(
    reader: asyncio.StreamReader, arrive: MemoryObjectSendStream[SessionMessage | Exception]
) -> str:
    """Pass on all messages of a server; returns what was wrong with the last one, if anything."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    line = b""
    try:
        while (line := await reader.readline()).endswith(b"\n"):
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            line = b""
            await arrive.send(SessionMessage(message))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
        pass  # the client has gone, or the server
    except ValueError:
        what = f"{line[:_SHOWN]!r}" if line else f"a line of more than {LINE_BYTES} bytes"
        return (
            f"wrote {what} to its standard output, which is no message of MCP, and was killed; "
            "logs belong to standard error"
        )
    return ""


async def _write(
    writer: asyncio.StreamWriter, leave: MemoryObjectReceiveStream[SessionMessage]
) -> None:
    """Pass on all messages to a server."""
    with suppress(ConnectionError), leave:  # `_attend` says how it ended
        async for message in leave:
            data = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            writer.write(data.encode() + b"\n")
            await writer.drain()


async def _listed(client: Client) -> list[Tool]:
    """All tools of a server."""
    found: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if len(found) > _MOST_TOOLS or (cursor is not None and not page.tools):
            raise ValueError(f"lists more than {_MOST_TOOLS} tools, or an empty page")
        if cursor is None:
            return found


def _schemas(tools: Sequence[Tool]) -> list[tuple[str, str | None, dict[str, Any]]]:
    """What the model knows of tools."""
    return [(tool.name, tool.description, tool.input_schema) for tool in tools]


def _text(result: CallToolResult) -> str:
    """Text of a result; the kinds of other contents are named."""
    parts = [
        part.text if part.type == "text" else f"({part.type}, which is not text)"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _line(error: BaseException) -> str:
    """An error in one line; of a group, that of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:500] or type(error).__name__
