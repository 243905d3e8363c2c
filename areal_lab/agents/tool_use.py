r"""Use tools within a response: the model writes a call, the tool's result is put behind it.

    prompt --> "Tool: 34 * 27\n" --> "Result: 918\n" --> "Answer: 918\n" --> score
               '---- turn 0 ----'    '-observation-'    '--- turn 1 ---'

How calls and results are written is a `Notation`; `lines` is for small models and few-shot prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

from areal_lab.agents.messages import Tool
from areal_lab.agents.notations import (
    Call,
    Malformed,
    Name,
    Notation,
    json_calls,
    lines,
    python_fence,
)
from areal_lab.agents.plain import tools_text
from areal_lab.agents.tools.box import MOST_CHARACTERS, CallableTool, ToolBox, ToolResult
from areal_lab.agents.tools.catalogue import make_tool
from areal_lab.agents.workflow import Episode, Row, Turn, WorkflowEngine, ended, room
from areal_lab.config.suggest import nearest
from areal_lab.data.trajectory import Observation, SampleEnd, Segment
from areal_lab.engines.protocol import Generated
from areal_lab.host.isolation import LevelSetting

DESCRIBED: Final = "{tools}"
"""Place in a prompt where the tools are described, for models that know no examples of them."""

RESULTS: Final = "{results}"
MOST_CALLS: Final = 16
"""Calls of one turn that are performed."""


class ToolUse:
    """Turns with tools until the model answers.

    The reward is that of the last turn, which has the answer. A sample that spends all its turns on
    calls is scored on its last one. Results are context and never trained on. The reward function
    gets all of it as `example["trajectory"]`: dictionaries with `role`, `content`, and `tool_calls`
    of the model's turns. `{tools}` in a prompt is replaced by a description of the tools.

    Args:
        max_turns: of the model, its answer included.
        notation: how calls are written: `lines` of one tool with one argument, `python` fences, or
            `json` (`notations`).
        tool: by name, or with its keywords; empty is the calculator, with `python` the sandbox.
        tools: several, with `json`.
        call: what a line that calls the tool begins with, with `lines`.
        result: what the tool's result begins with, with `lines`; may be empty.
        around: text around the results of a turn, such as the marks of a chat template's turns;
            `{results}` is replaced. Empty takes the notation's. Control tokens are only those that
            it writes: results that spell one are encoded as ordinary text.
        timeout_s: of a call.
        most_characters: of a result that the model sees; what is longer is cut, visibly.
        sandbox: of programs; the value of `reward.sandbox`, unless given.

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
        made = [make_tool(one, sandbox=sandbox, timeout_s=timeout_s) for one in wanted]
        self._max_turns = max_turns
        self._notation = _notation(notation, made, call=call, result=result)
        self._around = around or self._notation.around
        self._tools = ToolBox(*made, timeout_s=timeout_s, most_characters=most_characters)

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`.

        Raises:
            ToolBroken: a tool cannot work at all.
        """
        prompt = engine.encode(self._described(str(data["prompt"])), begins=True)
        context, parts, turns = prompt, list[Segment | Observation](), list[Turn]()
        said: list[dict[str, Any]] = []
        end: SampleEnd
        while True:
            generated = await self._turn(engine, context)
            tokens = tuple(token for part in generated.segments for token in part.tokens)
            parts.extend(generated.segments)
            context += tokens
            text, end = engine.decode(tokens), ended(engine, context, generated)
            calls = self._notation.find(text) if end == "stop" else ()
            said.append(_said(text, calls))
            if not calls:  # an answer, or a text that was cut off
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
        """One turn; it continues where a stop string of the notation did not end it."""
        stops = self._notation.stops
        if not stops:
            return await engine.turn(context)
        sampling = engine.sampling
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *stops))))
        segments: tuple[Segment, ...] = ()
        tokens: tuple[int, ...] = ()
        while True:
            generated = await engine.turn(context + tokens, sampling)
            new = tuple(token for part in generated.segments for token in part.tokens)
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
        """Of all calls, at the same time; in their order."""
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


def _wanted(
    notation: str, tool: str | Mapping[str, Any], tools: Sequence[str | Mapping[str, Any]]
) -> Sequence[str | Mapping[str, Any]]:
    """The tools to make.

    Raises:
        ValueError: they do not go with the notation.
    """
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
    """For logs: what the model wrote may be anything."""
    if isinstance(call, Malformed):
        return "?"
    return " ".join(call.tool.replace(",", " ").split())[:_MOST_NAME] or "?"


_MOST_NAME: Final = 60
