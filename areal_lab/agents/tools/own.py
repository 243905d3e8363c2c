"""Your own tools, by `module:name`: a function, or a class that is made with keywords.

    def weather(city: str, days: int = 1) -> str:
        '''The weather of a city.'''

The model sees name, docstring and parameters of a function; arguments are checked by its types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from areal_lab.agents.tools.box import CallableTool, ToolFailure
from areal_lab.agents.tools.threads import Threads
from areal_lab.config.functions import load_function

_FIELDS: Final = ("name", "description", "parameters", "call")
_OF_FUNCTIONS: Final = ("called", "description", "parameters")


def own_tool(name: str, **keywords: Any) -> CallableTool:
    """The tool `module:name`.

    Args:
        name: of a function, or of a class whose instances have `name`, `description`, `parameters`
            and `call(arguments)`.
        keywords: of the class; a function takes `called`, `description` and `parameters`, for the
            model (`name`, `description` and `parameters` of `FunctionTool`).

    Raises:
        ValueError: in one line: it cannot be imported, or is no tool.
        TypeError: the class does not take these keywords.
    """
    found = load_function(name)
    if isinstance(found, type):
        return _made(name, found(**keywords))
    if others := keywords.keys() - _OF_FUNCTIONS:
        given = ", ".join(sorted(others))
        raise ValueError(
            f"{name} is a function, but has keywords ({given}), as only classes do; a function has "
            f"{', '.join(_OF_FUNCTIONS)}"
        )
    return FunctionTool(found, name=keywords.pop("called", ""), **keywords)


class FunctionTool:
    """A function as a tool.

    Args:
        function: sync or async, with types. A sync one runs in a thread, which nothing can stop:
            it needs time limits of its own for whatever may hang.
        name: by which the model calls it; empty takes that of the function.
        description: for the model; empty takes the docstring.
        parameters: JSON schema of its arguments; None makes it from the function's types, which
            then also check and convert arguments.

    Raises:
        ValueError: in one line: its parameters have no JSON schema.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        description: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self._title = str(getattr(function, "__name__", type(function).__name__))
        self.name = name or self._title
        self.description = description or inspect.getdoc(function) or ""
        self.parameters = _schema(function, self.name) if parameters is None else parameters
        self._checked = validate_call(function) if parameters is None else function
        self.checks_itself = parameters is None
        self._is_async = inspect.iscoroutinefunction(function)
        self._threads = Threads(f"the tool {self.name}")

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the function returns, as text.

        Raises:
            ToolFailure: the arguments do not fit.
            ToolBroken: too many calls before are still running.
            Exception: of the function.
        """
        try:
            if self._is_async:
                return str(await self._checked(**arguments))
            return await _text(await self._threads.run(lambda: self._checked(**arguments)))
        except ValidationError as error:
            if error.title != self._title:
                raise  # of the function's own code
            raise ToolFailure(f"error: {_first(error)}") from error


class _InThreads:
    """An instance of a class whose `call` is not async."""

    def __init__(self, tool: Any) -> None:
        self.name: str = tool.name
        self.description: str = tool.description
        self.parameters: Mapping[str, Any] = tool.parameters
        self.limits_itself = bool(getattr(tool, "limits_itself", False))
        self.checks_itself = bool(getattr(tool, "checks_itself", False))
        self._call: Callable[[Mapping[str, Any]], Any] = tool.call
        self._threads = Threads(f"the tool {self.name}")

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await _text(await self._threads.run(lambda: self._call(arguments)))


async def _text(returned: Any) -> str:
    """What a call returned, as text; awaited first if it is to be, as of a function around one."""
    return str(await returned if inspect.isawaitable(returned) else returned)


def _made(name: str, tool: Any) -> CallableTool:
    missing = [field for field in _FIELDS if not hasattr(tool, field)]
    if missing:
        raise ValueError(f"{name} has no {missing[0]!r}, but a tool has {', '.join(_FIELDS)}")
    if inspect.iscoroutinefunction(tool.call):
        return cast("CallableTool", tool)
    return _InThreads(tool)


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    signature: Any = function  # whose types are the schema
    try:
        found: dict[str, Any] = TypeAdapter(signature).json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"the tool {name} has parameters without a JSON schema: {reason}") from (
            error
        )
    if found.get("type") != "object":
        raise ValueError(f"the tool {name} has parameters without names, but a call names them")
    return found


def _first(error: ValidationError) -> str:
    """The first problem of arguments, in one line."""
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return f"the argument {where!r}: {problem['msg']}"
