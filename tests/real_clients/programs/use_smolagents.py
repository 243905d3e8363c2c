"""smolagents: agents that call tools, and agents that write code, whole and streamed."""

from __future__ import annotations

from typing import Any

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool
from tasks import Task, do


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other one.
    """
    return a + b


def two_turns(task: Task, kind: Any, *, stream: bool = False) -> list[str]:
    model = OpenAIModel("gpt-5", api_base=f"{task.url}/v1", api_key=task.key)
    agent = kind(tools=[add], model=model, stream_outputs=stream, verbosity_level=LogLevel.OFF)
    return [str(agent.run(task.question)), str(agent.run(task.again, reset=False))]


def tools(task: Task) -> list[str]:
    return two_turns(task, ToolCallingAgent)


def tools_stream(task: Task) -> list[str]:
    return two_turns(task, ToolCallingAgent, stream=True)


def code(task: Task) -> list[str]:
    return two_turns(task, CodeAgent)


do(tools=tools, tools_stream=tools_stream, code=code)
