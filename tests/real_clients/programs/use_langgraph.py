"""LangGraph's agent over LangChain's client of OpenAI: both protocols, whole and streamed."""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from tasks import Task, do


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def two_turns(task: Task, *, stream: bool = False, **options: Any) -> list[str]:
    model = ChatOpenAI(model="gpt-5", base_url=f"{task.url}/v1", api_key=task.key, **options)
    agent = create_react_agent(model, [add], prompt="Be exact.")

    def ran(messages: list[Any]) -> list[Any]:
        if not stream:
            return agent.invoke({"messages": messages})["messages"]
        state: dict[str, Any] = {}
        for kind, found in agent.stream({"messages": messages}, stream_mode=["messages", "values"]):
            state = found if kind == "values" else state
        return state["messages"]

    first = ran([("user", task.question)])
    second = ran([*first, ("user", task.again)])
    return [first[-1].text, second[-1].text]


def chat(task: Task) -> list[str]:
    return two_turns(task)


def chat_stream(task: Task) -> list[str]:
    return two_turns(task, stream=True)


def responses(task: Task) -> list[str]:
    return two_turns(task, use_responses_api=True)


def responses_stream(task: Task) -> list[str]:
    return two_turns(task, stream=True, use_responses_api=True)


do(
    chat=chat,
    chat_stream=chat_stream,
    responses=responses,
    responses_stream=responses_stream,
)
