"""Pydantic AI: over both protocols of OpenAI, whole and streamed."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import Task, do


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def two_turns(task: Task, model: Any, *, stream: bool = False) -> list[str]:
    provider = OpenAIProvider(base_url=f"{task.url}/v1", api_key=task.key)
    agent = Agent(model("gpt-5", provider=provider), system_prompt="Be exact.", tools=[add])

    async def ran(text: str, history: Any = None) -> Any:
        if not stream:
            result = await agent.run(text, message_history=history)
            return result.output, result.all_messages()
        async with agent.run_stream(text, message_history=history) as streamed:
            output = await streamed.get_output()
            return output, streamed.all_messages()

    first, history = await ran(task.question)
    second, _ = await ran(task.again, history)
    return [first, second]


async def chat(task: Task) -> list[str]:
    return await two_turns(task, OpenAIChatModel)


async def chat_stream(task: Task) -> list[str]:
    return await two_turns(task, OpenAIChatModel, stream=True)


async def responses(task: Task) -> list[str]:
    return await two_turns(task, OpenAIResponsesModel)


async def responses_stream(task: Task) -> list[str]:
    return await two_turns(task, OpenAIResponsesModel, stream=True)


do(
    chat=chat,
    chat_stream=chat_stream,
    responses=responses,
    responses_stream=responses_stream,
)
