"""Tools that a model may call: a name, what it takes, and a result that is always text.

A tool that fails tells the model why; that is an outcome, and no exception of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

MOST_CHARACTERS: Final = 4000
"""Of a tool's result that the model sees, unless said otherwise."""
_CUT: Final = "... (cut)"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave."""

    text: str
    outcome: str = "ok"
    """`ok`, `error`, `timeout`, `unknown` for a tool that does not exist, or `malformed` for a call
    that cannot be read."""


class ToolFailure(Exception):
    """A call that failed, with the text that the model sees and an outcome of its own."""

    def __init__(self, text: str, outcome: str = "error") -> None:
        super().__init__(text)
        self.outcome = outcome


class ToolBroken(RuntimeError):
    """The tool itself cannot work: that is no result, and the sample gets no reward."""


class CallableTool(Protocol):
    """A tool.

    One with an attribute `limits_itself` that is true has a time limit of its own, because its
    calls wait for a place first. One with `checks_itself` that is true tells the model itself which
    argument is missing; of others the arguments in `required` are checked before the call.
    """

    @property
    def name(self) -> str:
        """By which the model calls it."""
        ...

    @property
    def description(self) -> str:
        """For the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of its arguments."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result.

        Raises:
            ToolBroken: the tool cannot work at all.
            Exception: its message is shown to the model.
        """
        ...


class ToolBox:
    """The tools of a workflow, by name, with limits of time and length.

    Args:
        tools: with different names.
        timeout_s: of one call, but of tools that limit themselves (`limits_itself`).
        most_characters: of a result; what is longer is cut, visibly.

    Raises:
        ValueError: two tools have one name.
    """

    def __init__(
        self,
        *tools: CallableTool,
        timeout_s: float = 10.0,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = ", ".join(tool.name for tool in tools)
            raise ValueError(f"the tools are {names}, but each needs a name of its own")
        for name in self._tools:
            if not name or "," in name:
                raise ValueError(f"a tool is named {name!r}, but needs a name without commas")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if most_characters < 1:
            raise ValueError(f"most_characters is {most_characters}, but must be >= 1")
        self._timeout_s = timeout_s
        self._most_characters = most_characters

    @property
    def tools(self) -> tuple[CallableTool, ...]:
        """All of them."""
        return tuple(self._tools.values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; a failure is a result.

        Raises:
            ToolBroken: the tool cannot work at all.
        """
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult(f"error: there is no tool {name!r:.60}, only {known}", "unknown")
        if not getattr(tool, "checks_itself", False):
            for argument in tool.parameters.get("required") or ():
                if argument not in arguments:
                    return ToolResult(f"error: the argument {argument!r} is missing", "error")
        text, outcome = await self._outcome(tool, arguments)
        return ToolResult(cut(text, self._most_characters), outcome)

    async def _outcome(self, tool: CallableTool, arguments: Mapping[str, Any]) -> tuple[str, str]:
        limit = asyncio.timeout(None if getattr(tool, "limits_itself", False) else self._timeout_s)
        try:
            async with limit:
                return str(await tool.call(arguments)), "ok"
        except ToolBroken:
            raise
        except ToolFailure as failure:
            return str(failure), failure.outcome
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "error: the tool canceled itself", "error"
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return f"error: no result within {self._timeout_s:g} s", "timeout"
            # The text of these is a key, or a number.
            bare = isinstance(error, KeyError | SystemExit)
            said = repr(error) if bare else str(error)
            return f"error: {said or type(error).__name__}", "error"


def cut(text: str, most: int) -> str:
    """At most this many characters of a text; says so if there were more."""
    return text if len(text) <= most else text[:most] + _CUT
