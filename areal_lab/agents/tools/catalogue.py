"""Tools by name, or custom ones by `module:name`, with keyword arguments; and renamed tools."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from areal_lab.agents.tools.box import CallableTool, ToolFailure, own_tool
from areal_lab.agents.tools.calculator import Calculator, ScrambledCalculator
from areal_lab.config.functions import load_function
from areal_lab.config.unknown import nearest
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.sandbox.levels import takes_sandbox


def _python(**keywords: Any) -> CallableTool:
    from areal_lab.agents.tools.python import Python  # imports the sandbox

    return Python(**keywords)


def _search(**keywords: Any) -> CallableTool:
    from areal_lab.agents.tools.search import Search  # its package is an extra

    return Search(**keywords)


TOOLS: Final[Mapping[str, Callable[..., CallableTool]]] = {
    "calculator": Calculator,
    "python": _python,
    "scrambled_calculator": ScrambledCalculator,
    "search": _search,
}


def make_tool(
    setting: str | Mapping[str, Any],
    *,
    sandbox: LevelSetting = "auto",
    timeout_s: float | None = None,
) -> CallableTool:
    """Create a tool by its name, or `{name: search, corpus: corpus.jsonl}`.

    `sandbox` and `timeout_s` are defaults for `python`, and for a custom class with parameters of
    these names.
    """
    keywords = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = str(keywords.pop("name", ""))
    if name == "mcp":
        raise ValueError("the tool mcp is one of the tools of the workflow tool_use alone")
    if ":" not in name and name not in TOOLS:
        raise ValueError(
            f"the tool is {name!r}, but must be module:name or one of {', '.join([*TOOLS, 'mcp'])}"
            f"{nearest(name, list(TOOLS))}"
        )
    made = load_function(name) if ":" in name else None
    if name == "python" or (isinstance(made, type) and takes_sandbox(made)):
        takes_limit = made is None or "timeout_s" in inspect.signature(made).parameters
        limit = {"timeout_s": timeout_s} if takes_limit and timeout_s is not None else {}
        keywords = {"sandbox": sandbox, **limit, **keywords}
    try:
        return own_tool(name, **keywords) if ":" in name else TOOLS[name](**keywords)
    except TypeError as error:
        raise ValueError(f"the tool {name}: {error}") from error


class Renamed:
    """A tool with one argument under another name, such as `web_search` of articles for `search`.

    Args:
        tool: name of the tool, or name and keywords.
        called: name for the model.
        description: description for the model; empty keeps the tool's.
        parameters: JSON schema for the model, or only its properties; None keeps the tool's. The
            tool gets the argument with its own name for it, else the first one.
        sandbox: containment, for a tool that runs programs.
        timeout_s: time limit of a call of such a tool; None takes its default.

    Raises:
        ValueError: in one line: the tool cannot be created, or does not take one argument.
    """

    def __init__(
        self,
        *,
        tool: str | Mapping[str, Any],
        called: str,
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
        sandbox: LevelSetting = "auto",
        timeout_s: float | None = None,
    ) -> None:
        self._tool = make_tool(tool, sandbox=sandbox, timeout_s=timeout_s)
        self.name = called
        self.description = description or self._tool.description
        self.parameters = self._tool.parameters if not parameters else as_schema(parameters)
        self.checks_itself = True  # an argument may have either name
        self.limits_itself = bool(getattr(self._tool, "limits_itself", False))
        required = list(self._tool.parameters.get("required", ()))
        if len(required) != 1:
            raise ValueError(
                f"the tool {self._tool.name} takes {len(required)} arguments, but only tools with "
                "one can have another name"
            )
        self._argument = required[0]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Result of the tool."""
        properties = self.parameters["properties"]
        for name in (self._argument, *properties):
            if name in arguments:
                return await self._tool.call({self._argument: arguments[name]})
        missing = next(iter(properties), self._argument)
        raise ToolFailure(f"error: the argument {missing!r} is missing")


def as_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a JSON schema: bare properties become those of an object that requires all of them.

    >>> as_schema({"query": {"type": "string"}})["required"]
    ['query']
    """
    if parameters.get("type") == "object" and isinstance(parameters.get("properties"), Mapping):
        return dict(parameters)
    properties = {
        name: one if isinstance(one, Mapping) else {"type": str(one)}
        for name, one in parameters.items()
    }
    return {"type": "object", "properties": properties, "required": list(properties)}
