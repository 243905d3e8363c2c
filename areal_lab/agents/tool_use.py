r"""Tools within a response: the model writes a call, and the tool's result is put behind it.

    prompt --> "Tool: 34 * 27\n" --> "Result: 918\n" --> "Answer: 918\n" --> score
               '---- turn 0 ----'    '-observation-'    '--- turn 1 ---'

A `Notation` defines the text of calls and results; `lines` is for small models and few-shot
prompts.

How a model writes calls of tools, and how it reads their results.

lines    Tool: 34 * 27                                      Result: 918
python   a fence ```python with a program                   a fence ```output
json     <tool_call>{"name": "add", ...}</tool_call>        <tool_response>...</tool_response>

What begins like a call and cannot be read is a call, too: the model gets an error as its result.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

from areal_lab.agents.messages import Tool
from areal_lab.agents.plain import tools_text
from areal_lab.agents.tool_calls import GRAMMARS
from areal_lab.agents.tools.box import MOST_CHARACTERS, CallableTool, ToolBox, ToolResult
from areal_lab.agents.tools.catalogue import make_tool
from areal_lab.agents.tools.mcp import McpServers, is_mcp
from areal_lab.agents.tools.python import Python
from areal_lab.agents.workflow import Episode, Row, WorkflowEngine, ended, room
from areal_lab.config.unknown import nearest
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Turn
from areal_lab.engines.protocol import Generated
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.service import RewardError

DESCRIBED: Final = "{tools}"
"""Placeholder in a prompt for the description of tools, for models without examples of them."""

RESULTS: Final = "{results}"
MOST_CALLS: Final = 16
"""Maximum calls of one turn that are executed."""


class ToolUse:
    """Turns with tools until the model responds without a call.

    The reward is that of the last turn, even if all turns were spent on calls. Results are context
    and never trained on. The reward function gets the conversation as `example["trajectory"]`:
    dictionaries with `role`, `content`, and `tool_calls` of the model's turns. `{tools}` in a
    prompt is replaced by a description of the tools.

    Args:
        max_turns: maximum turns of the model, including the final response.
        notation: text form of calls: `lines` of one tool with one argument, `python` fences, or
            `json` (`notations`).
        tool: name of the tool, or name and keywords; empty is the calculator, with `python` the
            sandbox.
        tools: several tools, with `json`.
        call: prefix of a line that calls the tool, with `lines`.
        result: prefix of the tool's result, with `lines`; may be empty.
        around: text around the results of a turn, such as the turn marks of a chat template;
            `{results}` is replaced. Empty takes the notation's. Control tokens are only those in
            this text: results that spell one are encoded as ordinary text.
        timeout_s: time limit of a call.
        most_characters: maximum characters of a result that the model sees; longer ones are cut,
            with a note.
        sandbox: containment of programs; by default the value of `reward.sandbox`.

    Raises:
        ValueError: a number is out of its bounds, or a name unknown.
        NoSandbox: programs cannot be contained like that here.
    """

    def __init__(
        self,
        *,
        max_turns: int = 4,
        notation: Name = "lines",
        tool: str | Mapping[str, Any] = "",
        tools: Sequence[str | Mapping[str, Any]] = (),
        call: str = "Tool:",
        result: str = "Result:",
        around: str = "",
        timeout_s: float = 10.0,
        most_characters: int = MOST_CHARACTERS,
        sandbox: LevelSetting = "auto",
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}, but must be >= 1")
        if around and RESULTS not in around:
            raise ValueError(f"around is {around!r}, but must contain {RESULTS}")
        wanted = _wanted(notation, tool, tools)
        self._servers = [_servers(one, timeout_s) for one in wanted if is_mcp(one)]
        if self._servers and notation != "json":
            raise ValueError(f"the tool mcp needs notation json, but notation is {notation}")
        made = [
            make_tool(one, sandbox=sandbox, timeout_s=timeout_s)
            for one in wanted
            if not is_mcp(one)
        ]
        self._max_turns = max_turns
        self._notation = _notation(notation, made, call=call, result=result)
        self._around = around or self._notation.around
        self._box = partial(ToolBox, timeout_s=timeout_s, most_characters=most_characters)
        self._made = made
        self._tools = self._box(*made)

    async def open(self, model: Path) -> None:
        """See `Opens`: start the servers of tools."""
        del model
        served = [tool for servers in self._servers for tool in await servers.open()]
        try:
            self._tools = self._box(*self._made, *served)
        except ValueError as error:
            raise RewardError(f"rollout.workflow: {error}") from None

    async def close(self) -> None:
        """Stop the servers of tools."""
        await asyncio.gather(*(servers.close() for servers in self._servers))

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        prompt = engine.encode(self._described(str(data["prompt"])), begins=True)
        context, parts, turns = prompt, list[Segment | Observation](), list[Turn]()
        said: list[dict[str, Any]] = []
        end: SampleEnd
        while True:
            generated = await self._turn(engine, context)
            tokens = generated.tokens
            parts.extend(generated.segments)
            context += tokens
            text, end = engine.decode(tokens), ended(engine, context, generated)
            calls = self._notation.find(text) if end == "stop" else ()
            said.append(_said(text, calls))
            if not calls:  # a final response, or a truncated text
                turns.append(Turn(tokens=len(tokens)))
                break
            if len(turns) + 1 == self._max_turns:
                not_called = [(_name(call), "not called") for call in calls]
                turns.append(Turn.of_calls(len(tokens), not_called))
                end = "turns"
                break
            results = await self._results(calls)
            outcomes = [one.outcome for one in results]
            turns.append(
                Turn.of_calls(len(tokens), list(zip(map(_name, calls), outcomes, strict=True)))
            )
            plain = [engine.plain(one.text, within=self._around) for one in results]
            told = self._notation.results(text, plain)
            said += [{"role": "tool", "content": one.text} for one in results]
            observed = engine.encode(self._around.replace(RESULTS, told))
            if room(engine, context + observed) < 1:
                end = "context"
                break
            parts.append(Observation(observed))
            context += observed
        return Episode(
            rows=(Row(prompt_tokens=prompt, parts=tuple(parts)),),
            outcome=await engine.score(text, {**data, "trajectory": said}),
            end=end,
            turns=tuple(turns),
        )

    async def _turn(self, engine: WorkflowEngine, context: tuple[int, ...]) -> Generated:
        """Sample one turn; it continues after a stop string of the notation that did not end it."""
        stops = self._notation.stops
        if not stops:
            return await engine.turn(context)
        sampling = engine.sampling
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *stops))))
        segments: tuple[Segment, ...] = ()
        tokens: tuple[int, ...] = ()
        while True:
            generated = await engine.turn(context + tokens, sampling)
            new = generated.tokens
            segments, tokens = (*segments, *generated.segments), tokens + new
            generated = replace(generated, segments=segments)
            said = engine.decode(new)
            if generated.finish_reason != "stop" or not any(stop in said for stop in stops):
                return generated
            if self._notation.ends(engine.decode(tokens)):
                return generated
            left = min(engine.sampling.max_new_tokens - len(tokens), room(engine, context + tokens))
            if left < 1:
                return replace(generated, finish_reason="length")
            sampling = replace(sampling, max_new_tokens=left)

    async def _results(self, calls: Sequence[Call | Malformed]) -> list[ToolResult]:
        """Results of all calls, run concurrently; in their order."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._result(call, place)) for place, call in enumerate(calls)
            ]
        return [task.result() for task in tasks]

    async def _result(self, call: Call | Malformed, place: int) -> ToolResult:
        if isinstance(call, Malformed):
            return ToolResult(f"error: {call.why}", "malformed")
        if place >= MOST_CALLS:
            return ToolResult(f"error: a turn has at most {MOST_CALLS} calls", "error")
        return await self._tools.call(call.tool, call.arguments)

    def _described(self, prompt: str) -> str:
        if DESCRIBED not in prompt:
            return prompt
        tools = [
            Tool(name=one.name, description=one.description, parameters=one.parameters)
            for one in self._tools.tools
        ]
        return prompt.replace(DESCRIBED, tools_text(tools))


def _servers(setting: str | Mapping[str, Any], timeout_s: float) -> McpServers:
    keywords = {} if isinstance(setting, str) else {**setting}
    keywords.pop("name", None)
    try:
        return McpServers(**{"timeout_s": timeout_s, **keywords})
    except TypeError as error:
        raise ValueError(f"the tool mcp: {error}") from error


def _wanted(
    notation: str, tool: str | Mapping[str, Any], tools: Sequence[str | Mapping[str, Any]]
) -> Sequence[str | Mapping[str, Any]]:
    """Settings of the tools to create."""
    if notation not in get_args(Name):
        names = ", ".join(get_args(Name))
        raise ValueError(
            f"notation is {notation!r}, but must be one of {names}"
            f"{nearest(notation, get_args(Name))}"
        )
    if tool and tools:
        raise ValueError("tool and tools are both given; put all into tools")
    if tools and notation != "json":
        raise ValueError(
            f"tools has {len(tools)} entries, but notation {notation} calls one tool; give tool, "
            "or notation json"
        )
    if isinstance(tools, str):
        raise ValueError(f"tools is {tools!r}, but must be a list; write tool, or [{tools}]")
    if notation != "python":
        return tools or [tool or "calculator"]
    name = tool if isinstance(tool, str) else tool.get("name", "")
    if name not in ("", "python"):
        raise ValueError(f"the tool is {name!r}, but notation python runs programs; leave tool out")
    return [tool or "python"]


def _notation(name: Name, tools: Sequence[CallableTool], *, call: str, result: str) -> Notation:
    match name:
        case "lines":
            return lines(tools[0], call=call, result=result)
        case "python":
            return python_fence()
        case "json":
            return json_calls()


def _said(text: str, calls: Sequence[Call | Malformed]) -> dict[str, Any]:
    read = [
        {"name": call.tool, "arguments": dict(call.arguments)}
        for call in calls
        if isinstance(call, Call)
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": read} if read else {})}


def _name(call: Call | Malformed) -> str:
    """Name for logs: the model may have written anything."""
    if isinstance(call, Malformed):
        return "?"
    return " ".join(call.tool.replace(",", " ").split())[:_MOST_NAME] or "?"


_MOST_NAME: Final = 60


Name: TypeAlias = Literal["lines", "python", "json"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, found in a response."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Text that starts like a tool call but cannot be parsed."""

    why: str
    """Reason, for the model."""


@dataclass(frozen=True, slots=True)
class Notation:
    """Text form of tool calls and their results."""

    find: Callable[[str], Sequence[Call | Malformed]]
    """Parse the calls in the text of a turn; none if the turn is a final response."""
    results: Callable[[str, Sequence[str]], str]
    """Text behind a turn, from its text and the text of each call's result."""
    around: str = "{results}"
    """Default text around the results."""
    stops: tuple[str, ...] = ()
    """Strings that end a turn, in addition to those of the run."""
    ends: Callable[[str], bool] = bool
    """True if text that ends with one of `stops` is a whole turn. If not, the turn continues."""


def lines(tool: CallableTool, *, call: str = "Tool:", result: str = "Result:") -> Notation:
    r"""One line a call, of one tool with one argument: `Tool: 34 * 27`, then `Result: 918`.

    >>> lines(Calculator()).find("Tool: 34 * 27\n")
    [Call(tool='calculator', arguments={'expression': '34 * 27'})]

    The prefix `result` may be empty for a result that explains itself.
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
    r"""A program in a Markdown fence, whose output follows in another fence, as in ToRA.

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

    # The model may start the fence of the output itself. A fence of another language also ends a
    # turn, and a fence without a language starts like that.
    return Notation(
        find,
        results,
        stops=(f"{_CLOSE}\n", _OUTPUT),
        ends=lambda text: _FENCE.search(text) is not None,
    )


def json_calls() -> Notation:
    r"""Calls as JSON between tags, as Hermes and Qwen write them; several run concurrently.

    >>> json_calls().find('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    [Call(tool='add', arguments={'a': 2})]

    A turn ends where the model ends it, or at the stop strings of the run.
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
