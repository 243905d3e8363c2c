"""Tools that a model may call: a name, a schema of arguments, and a result that is always text.

Custom tools are named by `module:name`; calls that block run in threads.

Your own tools, by `module:name`: a function, or a class that is made with keywords.

    def weather(city: str, days: int = 1) -> str:
        '''The weather of a city.'''

The model sees name, docstring and parameters of a function; arguments are checked by its types.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from areal_lab.config.functions import Form, check_call, load_function

MOST_CHARACTERS: Final = 4000
"""Default limit of a tool result's characters that the model sees."""
_CUT: Final = "... (cut)"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call."""

    text: str
    outcome: str = "ok"
    """`ok`, `error`, `timeout`, `unknown` for a tool that does not exist, or `malformed` for a call
    that cannot be read."""


class ToolFailure(Exception):
    """Failed tool call, with the text for the model and an outcome."""

    def __init__(self, text: str, outcome: str = "error") -> None:
        super().__init__(text)
        self.outcome = outcome


class ToolBroken(RuntimeError):
    """The tool itself does not work: the sample gets no reward."""


class CallableTool(Protocol):
    """A tool.

    With an attribute `limits_itself` that is true, the tool has its own time limit, because its
    calls first wait in a queue. With `checks_itself` that is true, it reports missing arguments to
    the model itself; for other tools the arguments in `required` are checked before the call.
    """

    @property
    def name(self) -> str:
        """Name by which the model calls it."""
        ...

    @property
    def description(self) -> str:
        """Description for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of its arguments."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool.

        Raises:
            ToolBroken: the tool cannot work at all.
            Exception: its message is shown to the model.
        """
        ...


class ToolBox:
    """The tools of a workflow, by name, with limits of time and length.

    `timeout_s` limits one call, except of tools that limit themselves (`limits_itself`). Results
    longer than `most_characters` are cut, with a note.
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
            raise ValueError(f"the tools are {names}, but their names must differ")
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
        """All tools."""
        return tuple(self._tools.values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; a failure is a result."""
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
    """Cut a text to this many characters, with a note of its length."""
    return text if len(text) <= most else text[:most] + _CUT


_FIELDS: Final = ("name", "description", "parameters", "call")
_OF_FUNCTIONS: Final = ("called", "description", "parameters")


def own_tool(name: str, **keywords: Any) -> CallableTool:
    """Create the tool `module:name`.

    Args:
        name: a function, or a class whose instances have `name`, `description`, `parameters` and
            `call(arguments)`.
        keywords: keywords of the class; a function takes `called`, `description` and `parameters`,
            for the model (`name`, `description` and `parameters` of `FunctionTool`).
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
        function: sync or async, with types. A sync one runs in a thread, which cannot be stopped:
            anything in it that may hang needs a time limit.
        name: name by which the model calls it; empty takes that of the function.
        description: description for the model; empty takes the docstring.
        parameters: JSON schema of its arguments; None derives it from the function's types, which
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
        """Result of the function, as text."""
        try:
            if self._is_async:
                return str(await self._checked(**arguments))
            return await _text(await self._threads.run(lambda: self._checked(**arguments)))
        except ValidationError as error:
            if error.title != self._title:
                raise  # raised by the function's own code
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
    """Result of a call as text; awaitable results are awaited first, as from a wrapped function."""
    return str(await returned if inspect.isawaitable(returned) else returned)


def _made(name: str, tool: Any) -> CallableTool:
    missing = [field for field in _FIELDS if not hasattr(tool, field)]
    if missing:
        raise ValueError(f"{name} has no {missing[0]!r}, but a tool has {', '.join(_FIELDS)}")
    try:
        check_call(tool.call, Form("call(arguments)"))
    except ValueError as error:
        raise ValueError(f"the method call of {name} {error}") from error
    if inspect.iscoroutinefunction(tool.call):
        return cast("CallableTool", tool)
    return _InThreads(tool)


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    signature: Any = function  # its types are the schema
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
    """First problem of the arguments, in one line."""
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, problem["loc"]))
    return f"the argument {where!r}: {problem['msg']}"


MOST_LEFT_BEHIND: Final = 32
"""Calls that may still run after their time limit."""


class Threads:
    """Daemon threads, one per call: a hung call delays neither others nor the end of a run."""

    def __init__(self, what: str) -> None:
        """Start without threads."""
        self._what = what
        self._left_behind: set[concurrent.futures.Future[Any]] = set()

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run a call in a new thread; cancelling leaves the thread running.

        Raises ToolBroken if too many earlier calls are still running.
        """
        if len(self._left_behind) >= MOST_LEFT_BEHIND:
            raise ToolBroken(
                f"{len(self._left_behind)} calls of {self._what} still run after their time limit; "
                "give it a time limit, or make it async"
            )
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_running_or_notify_cancel()  # so a caller that gives up does not cancel it
        threading.Thread(target=_perform, args=(done, work), name=self._what, daemon=True).start()
        waits = asyncio.wrap_future(done)
        try:
            return await waits
        except asyncio.CancelledError:
            if not done.done():
                self._left_behind.add(done)
                done.add_done_callback(self._left_behind.discard)
            raise


def _perform(done: concurrent.futures.Future[Any], work: Callable[[], Any]) -> None:
    try:
        value = work()
    except StopIteration as error:  # an awaiting coroutine cannot raise it
        done.set_exception(RuntimeError(repr(error)))
    except Exception as error:
        done.set_exception(error)
    except BaseException as error:  # SystemExit, too: it must not end the run
        done.set_exception(RuntimeError(f"it ended with {error!r}"))
    else:
        done.set_result(value)
