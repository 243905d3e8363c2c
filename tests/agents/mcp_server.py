"""A real MCP server with good tools and bad ones.

python mcp_server.py FOLDER    `leaves_later` waits for a file there
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ImageContent, TextContent

SERVER = MCPServer("sums")
FOLDER = Path(sys.argv[1])


@SERVER.tool()
def add(a: int, b: int) -> int:
    """The sum of two integers."""
    return a + b


@SERVER.tool(structured_output=False)
def refuses(text: str) -> str:
    """Fails with a text."""
    raise ToolError(text)


@SERVER.tool(structured_output=False)
def draws() -> list[TextContent | ImageContent]:
    """A text and a picture."""
    return [TextContent(text="a dot"), ImageContent(data="AA==", mime_type="image/png")]


@SERVER.tool()
async def waits() -> str:
    """Never returns, but the server works."""
    await asyncio.Event().wait()
    return ""


@SERVER.tool()
def stops() -> str:
    """Stops the whole server, which stays alive."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return ""


@SERVER.tool()
def leaves(code: int) -> str:
    """Ends the server."""
    print("something about it", file=sys.stderr, flush=True)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


@SERVER.tool()
async def leaves_later() -> str:
    """Replies, and ends the server when nothing waits for it."""
    asyncio.get_running_loop().create_task(_leave())
    return "soon"


async def _leave() -> None:
    while not (FOLDER / "leave").exists():
        await asyncio.sleep(0.01)
    os._exit(5)


@SERVER.tool(structured_output=False)
def process() -> str:
    """Ids of the server's process, and of one in another session that it starts."""
    child = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    )
    return f"{os.getpid()} {child.pid}"


if __name__ == "__main__":
    SERVER.run("stdio")
