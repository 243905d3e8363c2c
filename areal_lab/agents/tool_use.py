"""Use tools within a response: the model writes a call, the tool's result is put behind it.

    prompt --> "Tool: 34 * 27\n" --> "Result: 918\n" --> "Answer: 918\n" --> score
               '---- turn 0 ----'    '-observation-'    '--- turn 1 ---'

How calls and results are written is a `Notation`; `lines` is for small models and few-shot prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from areal_lab.agents.tools import Calculator, CallableTool, ScrambledCalculator, ToolBox
from areal_lab.agents.workflow import Episode, Row, Turn, WorkflowEngine, ended, room
from areal_lab.config.suggest import nearest
from areal_lab.data.trajectory import Observation, SampleEnd, Segment


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, found in a response."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls and their results are written."""

    find: Callable[[str], Call | None]
    """The call in the text of a turn; None if the turn is an answer."""
    result: Callable[[str], str]
    """What is put behind a call, from the tool's text."""


def lines(tool: CallableTool, *, call: str = "Tool:", result: str = "Result:") -> Notation:
    r"""One line a call, of one tool with one argument: `Tool: 34 * 27`, then `Result: 918`.

    >>> lines(Calculator()).find("Tool: 34 * 27\n")
    Call(tool='calculator', arguments={'expression': '34 * 27'})

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
            "another tool, or another notation"
        )
    begins = f"{result} " if result else ""

    def find(text: str) -> Call | None:
        line = text.strip()
        if not line.startswith(call):
            return None
        return Call(tool.name, {arguments[0]: line.removeprefix(call).strip()})

    return Notation(find, lambda text: f"{begins}{text}\n")


def _search(**keywords: Any) -> CallableTool:
    from areal_lab.agents.search import Search  # its package is an extra

    return Search(**keywords)


TOOLS: Final[Mapping[str, Callable[..., CallableTool]]] = {
    "calculator": Calculator,
    "scrambled_calculator": ScrambledCalculator,
    "search": _search,
}


def make_tool(setting: str | Mapping[str, Any]) -> CallableTool:
    """A tool by its name, or `{name: search, corpus: corpus.jsonl}`.

    Raises:
        ValueError: in one line: the name or a keyword is unknown, or a value is out of its bounds.
    """
    keywords = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = str(keywords.pop("name", ""))
    if name not in TOOLS:
        raise ValueError(
            f"the tool is {name!r}, but must be one of {', '.join(TOOLS)}"
            f"{nearest(name, list(TOOLS))}"
        )
    try:
        return TOOLS[name](**keywords)
    except TypeError as error:
        raise ValueError(f"the tool {name}: {error}") from error


class ToolUse:
    """Turns with a tool until the model answers.

    The reward is that of the last turn, which has the answer. A sample that spends all its turns on
    calls is scored on its last one.

    Args:
        max_turns: of the model, its answer included.
        tool: by name, or with its keywords.
        call: what a line that calls the tool begins with.
        result: what the tool's result begins with; may be empty.
        timeout_s: of the tool.

    Raises:
        ValueError: a number is out of its bounds, or a name unknown.
    """

    def __init__(
        self,
        *,
        max_turns: int = 4,
        tool: str | Mapping[str, Any] = "calculator",
        call: str = "Tool:",
        result: str = "Result:",
        timeout_s: float = 10.0,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but must be >= 1")
        made = make_tool(tool)
        self._max_turns = max_turns
        self._notation = lines(made, call=call, result=result)
        self._tools = ToolBox(made, timeout_s=timeout_s)

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        prompt = engine.encode(str(data["prompt"]), begins=True)
        context, parts, turns = prompt, list[Segment | Observation](), list[Turn]()
        end: SampleEnd
        while True:
            generated = await engine.turn(context)
            tokens = tuple(token for part in generated.segments for token in part.tokens)
            parts.extend(generated.segments)
            context += tokens
            text, end = engine.decode(tokens), ended(engine, context, generated)
            call = self._notation.find(text) if end == "stop" else None
            if call is None:  # an answer, or a text that was cut off
                turns.append(Turn(tokens=len(tokens)))
                break
            if len(turns) + 1 == self._max_turns:
                turns.append(Turn(tokens=len(tokens), tool=call.tool, outcome="not called"))
                end = "turns"
                break
            result = await self._tools.call(call.tool, call.arguments)
            turns.append(Turn(tokens=len(tokens), tool=call.tool, outcome=result.outcome))
            observed = engine.encode(self._notation.result(result.text))
            if room(engine, context + observed) < 1:
                end = "context"
                break
            parts.append(Observation(observed))
            context += observed
        return Episode(
            rows=(Row(prompt_tokens=prompt, parts=tuple(parts)),),
            outcome=await engine.score(text, data),
            end=end,
            turns=tuple(turns),
        )
