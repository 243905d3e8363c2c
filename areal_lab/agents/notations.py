"""How a model writes calls of tools, and how it reads their results.

lines    Tool: 34 * 27                                      Result: 918
python   a fence ```python with a program                   a fence ```output
json     <tool_call>{"name": "add", ...}</tool_call>        <tool_response>...</tool_response>

What begins like a call and cannot be read is a call, too: the model gets an error as its result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from areal_lab.agents.tool_calls import GRAMMARS
from areal_lab.agents.tools.box import CallableTool
from areal_lab.agents.tools.python import Python

Name: TypeAlias = Literal["lines", "python", "json"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, found in a response."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """What begins like a call and cannot be read."""

    why: str
    """For the model."""


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls and their results are written."""

    find: Callable[[str], Sequence[Call | Malformed]]
    """The calls in the text of a turn; none if the turn is an answer."""
    results: Callable[[str, Sequence[str]], str]
    """What is put behind a turn, from its text and the text of each call's result."""
    around: str = "{results}"
    """Text around the results, unless the workflow says otherwise."""
    stops: tuple[str, ...] = ()
    """Strings that end a turn, in addition to those of the run."""
    ends: Callable[[str], bool] = bool
    """Whether the text that one of `stops` ended is a whole turn. If not, it continues."""


def lines(tool: CallableTool, *, call: str = "Tool:", result: str = "Result:") -> Notation:
    r"""One line a call, of one tool with one argument: `Tool: 34 * 27`, then `Result: 918`.

    >>> lines(Calculator()).find("Tool: 34 * 27\n")
    [Call(tool='calculator', arguments={'expression': '34 * 27'})]

    Args:
        tool: what a line calls.
        call: what a call begins with.
        result: what a result begins with; empty for one that says itself what it is.

    Raises:
        ValueError: the tool takes more or less than one argument, or `call` is empty.
    """
    if not call.strip():
        raise ValueError(f"call is {call!r}, but must be what a call begins with, such as Tool:")
    arguments = list(tool.parameters.get("required", ()))
    if len(arguments) != 1:
        raise ValueError(
            f"the tool {tool.name} takes {len(arguments)} arguments, but a line has one; choose "
            "another tool, or notation json"
        )
    begins = f"{result} " if result else ""

    def find(text: str) -> list[Call | Malformed]:
        line = text.strip()
        if not line.startswith(call):
            return []
        return [Call(tool.name, {arguments[0]: line.removeprefix(call).strip()})]

    return Notation(find, lambda _, texts: "".join(f"{begins}{text}\n" for text in texts))


_OPEN: Final = "```python"
_CLOSE: Final = "```"
_OUTPUT: Final = "```output"
_FENCE: Final = re.compile(r"```python[ \t]*\n(.*?)```", re.DOTALL)


def python_fence() -> Notation:
    r"""A program in a Markdown fence, whose output follows in another one, as in ToRA.

    >>> python_fence().find("Let us see.\n```python\nprint(6 * 7)\n```\n")
    [Call(tool='python', arguments={'code': 'print(6 * 7)\n'})]

    The first fence of a turn ends it and is run. Fences of other languages are text, and so is a
    turn without a fence. Source: ToRA (arXiv:2309.17452), figure 2.
    """

    def find(text: str) -> list[Call | Malformed]:
        if found := _FENCE.search(text):
            return [Call(Python.name, {"code": found[1]})]
        if _OPEN in text:
            return [Malformed(f"the fence {_OPEN} is not closed by a line {_CLOSE}")]
        return []

    def results(said: str, texts: Sequence[str]) -> str:
        opens = "" if said.endswith(_OUTPUT) else _OUTPUT if said.endswith("\n") else f"\n{_OUTPUT}"
        (text,) = texts  # a turn has one fence
        return f"{opens}\n{text}\n{_CLOSE}\n"

    # The model may begin the fence of the output itself. Fences of other languages end a turn as
    # well, and those without one begin so.
    return Notation(
        find,
        results,
        stops=(f"{_CLOSE}\n", _OUTPUT),
        ends=lambda text: _FENCE.search(text) is not None,
    )


def json_calls() -> Notation:
    r"""Calls as JSON between tags, as Hermes and Qwen write them; several run at the same time.

    >>> json_calls().find('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    [Call(tool='add', arguments={'a': 2})]

    A turn ends as the model ends it, or at the stop strings of the run.
    """

    def find(text: str) -> list[Call | Malformed]:
        found: list[Call | Malformed] = []
        for piece in GRAMMARS["hermes"](text):
            if piece.call is not None:
                found.append(Call(piece.call.name, json.loads(piece.call.arguments)))
            elif piece.malformed:
                found.append(
                    Malformed(
                        'a call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>, '
                        "in JSON"
                    )
                )
        return found

    def results(_: str, texts: Sequence[str]) -> str:
        return "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in texts)

    return Notation(find, results, around="\n{results}")
