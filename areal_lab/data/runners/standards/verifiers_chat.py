"""The harness `null` of verifiers 0.4 in the process of the runner.

    Chat.launch -> run_chat_loop of verifiers -> interception server -> gateway
                                              -> tool servers, over MCP

verifiers starts a Python for each sample, by uv, with packages that uv downloads: seconds of CPU
time. Its program is the source of two of its modules, which need nothing but what verifiers itself
needs, so this runs the same code, without a process.
"""

import asyncio
import json
import traceback
from argparse import Namespace
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat"]
_TOOLS_TIMEOUT_S = 60.0
"""Longest wait for the list of tools, as in the program."""


def _loaded() -> ModuleType:
    """The program as a module: its parts refer to each other only in one file."""
    module = ModuleType("areal_lab_chat_program")
    parts = module.__dict__
    exec(compile(CHAT_PROGRAM_SOURCE, module.__name__, "exec"), parts)
    parts["call_mcp"] = _readable(parts["call_mcp"])
    return module


def _readable(call_mcp: Any) -> Any:
    """Arguments that cannot be sent are a mistake that the model reads, not a lost server."""

    async def call(servers: Any, dispatch: Any, name: str, arguments: dict[str, Any]) -> Any:
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return "error: the arguments have characters or numbers that JSON has not"
        return await call_mcp(servers, dispatch, name, arguments)

    return call


_PROGRAM = _loaded()


class Chat(NullHarness):  # type: ignore[misc] # verifiers is not installed here
    """A chat with tools."""

    async def setup(self, runtime: Any) -> None:
        """Nothing to install."""

    async def launch(  # noqa: D102, PLR0917 - as in the base class
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002 - as in the base class
        runtime: Any,  # noqa: ARG002 - as in the base class
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages += [{"role": "user", "content": prompt}] if prompt else []
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        try:
            async with AsyncExitStack() as stack:
                model = await stack.enter_async_context(
                    AsyncOpenAI(
                        base_url=endpoint,
                        api_key=secret,
                        timeout=None,
                        # Its own server on this machine: certificates take longer than the call.
                        http_client=DefaultAsyncHttpxClient(verify=False),
                    )
                )
                gate = await stack.enter_async_context(
                    DefaultAsyncHttpxClient(timeout=None, verify=False)
                )
                tools, dispatch, opened = await asyncio.wait_for(
                    _PROGRAM.connect_mcp({"mcpServers": servers}, stack), _TOOLS_TIMEOUT_S
                )
                await _PROGRAM.run_chat_loop(
                    Namespace(
                        tool_interception_url=tool_interception_url,
                        api_key=secret,
                        bash=False,
                        edit=False,
                        search=False,
                    ),
                    _PROGRAM.Compactor(model, ctx.model, tools, False, None),
                    messages,
                    dispatch,
                    opened,
                    gate,
                )
        except SystemExit as error:  # of the program, when the interception server is gone
            return ProgramResult(int(error.code or 0), "", "the model's connection was lost")
        except Exception:
            return ProgramResult(1, "", traceback.format_exc())
        return ProgramResult(0, "", "")
