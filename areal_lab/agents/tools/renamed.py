"""A tool under another name, with another description and other parameters, for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_lab.agents.tools.box import ToolFailure
from areal_lab.agents.tools.catalogue import make_tool
from areal_lab.host.isolation import LevelSetting


class Renamed:
    """A tool with one argument, as `web_search` of articles is `search`.

    Args:
        tool: by name, or with its keywords.
        called: name for the model.
        description: for the model; empty keeps the tool's.
        parameters: for the model: a JSON schema, or only its properties; None keeps the tool's. The
            tool gets the argument that has its own name for it, else the first one.
        sandbox: of a tool that runs programs.
        timeout_s: of a call of such a tool; None takes its default.

    Raises:
        ValueError: in one line: the tool cannot be made, or does not take one argument.
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
        self.checks_itself = True  # an argument has either of two names
        self.limits_itself = bool(getattr(self._tool, "limits_itself", False))
        required = list(self._tool.parameters.get("required", ()))
        if len(required) != 1:
            raise ValueError(
                f"the tool {self._tool.name} takes {len(required)} arguments, but only tools with "
                "one can have another name"
            )
        self._argument = required[0]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the tool returns.

        Raises:
            ToolFailure: there is no argument.
            Exception: of the tool.
        """
        properties = self.parameters["properties"]
        for name in (self._argument, *properties):
            if name in arguments:
                return await self._tool.call({self._argument: arguments[name]})
        missing = next(iter(properties), self._argument)
        raise ToolFailure(f"error: the argument {missing!r} is missing")


def as_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema; bare properties become those of an object that needs all of them.

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
