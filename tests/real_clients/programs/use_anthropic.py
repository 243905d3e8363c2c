"""Anthropic's own client: messages, whole and streamed, and its tool runner."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic, beta_tool
from tasks import Task, do

TOOL: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
REQUEST: dict[str, Any] = {
    "model": "claude-opus",
    "max_tokens": 1000,
    "system": "Be exact.",
    "tools": [TOOL],
}


def opened(task: Task, **options: Any) -> Anthropic:
    return Anthropic(base_url=task.url, api_key=task.key, **options)


def messages(task: Task, *, stream: bool = False) -> list[str]:
    client = opened(task)
    history: list[Any] = [{"role": "user", "content": task.question}]

    def answer() -> str:
        while True:
            if stream:
                with client.messages.stream(messages=history, **REQUEST) as events:
                    for _ in events:
                        pass
                    message = events.get_final_message()
            else:
                message = client.messages.create(messages=history, **REQUEST)
            history.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                return "".join(part.text for part in message.content if part.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": part.id,
                    "content": str(part.input["a"] + part.input["b"]),
                }
                for part in message.content
                if part.type == "tool_use"
            ]
            history.append({"role": "user", "content": results})

    first = answer()
    history.append({"role": "user", "content": task.again})
    return [first, answer()]


def messages_stream(task: Task) -> list[str]:
    return messages(task, stream=True)


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def runner(task: Task, *, stream: bool = False) -> list[str]:
    """Its loop of tools, in which the gateway holds the history."""
    question: Any = [{"role": "user", "content": task.question}]
    options = {**REQUEST, "tools": [add], "messages": question}
    found = []
    for each in opened(task).beta.messages.tool_runner(stream=stream, **options):
        message = each.get_final_message() if stream else each
        found += [part.text for part in message.content if part.type == "text"]
    return found


def runner_stream(task: Task) -> list[str]:
    return runner(task, stream=True)


def impatient(task: Task) -> list[str]:
    """Gives up, and sends the same again."""
    client = opened(task, timeout=0.5, max_retries=20)
    asked: Any = [{"role": "user", "content": task.again}]
    reply = client.messages.create(model="claude-opus", max_tokens=100, messages=asked)
    return [part.text for part in reply.content if part.type == "text"]


def refused(task: Task) -> list[str]:
    """Errors are the client's own, of their classes, and are not tried again."""
    wrong = Anthropic(base_url=task.url, api_key="wrong")
    asked: Any = [{"role": "user", "content": task.again}]
    calls = [
        lambda: wrong.messages.create(model="claude-opus", max_tokens=1, messages=asked),
        lambda: opened(task).messages.create(model="claude-opus", max_tokens=0, messages=asked),
        lambda: opened(task).messages.create(model="claude-opus", max_tokens=1, messages=[]),
    ]
    found = []
    for call in calls:
        try:
            call()
        except anthropic.APIStatusError as error:
            found.append(type(error).__name__)
    counted = opened(task).messages.count_tokens(model="claude-opus", messages=asked)
    reply = opened(task).messages.create(model="claude-opus", max_tokens=100, messages=asked)
    assert reply.usage.input_tokens == counted.input_tokens, (reply.usage, counted)
    return found


do(
    messages=messages,
    messages_stream=messages_stream,
    runner=runner,
    runner_stream=runner_stream,
    impatient=impatient,
    refused=refused,
)
