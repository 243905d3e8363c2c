"""OpenAI's Agents SDK: over both protocols, whole and streamed, and a hand-off."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from tasks import Task, do

# It calls home otherwise.
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def chat_model(task: Task) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel("gpt-5", opened(task))


def responses_model(task: Task) -> OpenAIResponsesModel:
    return OpenAIResponsesModel("gpt-5", opened(task))


def opened(task: Task) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{task.url}/v1", api_key=task.key)


async def two_turns(task: Task, agent: Agent[Any], *, stream: bool = False) -> list[str]:
    async def ran(history: Any) -> Any:
        if not stream:
            return await Runner.run(agent, history)
        result = Runner.run_streamed(agent, history)
        async for _ in result.stream_events():
            pass
        return result

    first = await ran(task.question)
    second = await ran([*first.to_input_list(), {"role": "user", "content": task.again}])
    return [first.final_output, second.final_output]


def adder(model: Any) -> Agent[Any]:
    return Agent(name="adder", instructions="Be exact.", tools=[add], model=model)


async def chat(task: Task) -> list[str]:
    return await two_turns(task, adder(chat_model(task)))


async def chat_stream(task: Task) -> list[str]:
    return await two_turns(task, adder(chat_model(task)), stream=True)


async def responses(task: Task) -> list[str]:
    return await two_turns(task, adder(responses_model(task)))


async def responses_stream(task: Task) -> list[str]:
    return await two_turns(task, adder(responses_model(task)), stream=True)


async def hand_off(task: Task) -> list[str]:
    """Other instructions and other tools over the same history."""
    model = responses_model(task)
    triage = Agent(name="triage", instructions="Hand off.", handoffs=[adder(model)], model=model)
    result = await Runner.run(triage, task.question)
    return [result.final_output, result.last_agent.name]


do(
    chat=chat,
    chat_stream=chat_stream,
    responses=responses,
    responses_stream=responses_stream,
    hand_off=hand_off,
)
