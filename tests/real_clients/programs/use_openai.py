"""OpenAI's own client: chat completions and responses, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
from openai import OpenAI
from tasks import Task, do

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
CHAT: dict[str, Any] = {"model": "gpt-5", "tools": [{"type": "function", "function": ADD}]}
RESPONSES: dict[str, Any] = {
    "model": "gpt-5",
    "instructions": "Be exact.",
    "tools": [{"type": "function", **ADD, "strict": False}],
}


def opened(task: Task, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{task.url}/v1", api_key=task.key, **options)


def added(arguments: str) -> str:
    numbers = json.loads(arguments)
    return str(numbers["a"] + numbers["b"])


def chat(task: Task, *, stream: bool = False) -> list[str]:
    client = opened(task)
    messages: list[Any] = [
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": task.question},
    ]

    def answer() -> str:
        while True:
            if stream:
                with client.chat.completions.stream(messages=messages, **CHAT) as events:
                    for _ in events:
                        pass
                    message = events.get_final_completion().choices[0].message
            else:
                message = (
                    client.chat.completions.create(messages=messages, **CHAT).choices[0].message
                )
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = {"role": "tool", "tool_call_id": call.id}
                messages.append({**result, "content": added(call.function.arguments)})

    first = answer()
    messages.append({"role": "user", "content": task.again})
    return [first, answer()]


def chat_stream(task: Task) -> list[str]:
    return chat(task, stream=True)


def responses(task: Task, *, stream: bool = False) -> list[str]:
    client = opened(task)
    items: list[Any] = [{"role": "user", "content": task.question}]

    def answer() -> str:
        while True:
            if stream:
                with client.responses.stream(input=items, **RESPONSES) as events:
                    for _ in events:
                        pass
                    response = events.get_final_response()
            else:
                response = client.responses.create(input=items, **RESPONSES)
            items.extend(item.to_dict() for item in response.output)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                result = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**result, "output": added(call.arguments)})

    first = answer()
    items.append({"role": "user", "content": task.again})
    return [first, answer()]


def responses_stream(task: Task) -> list[str]:
    return responses(task, stream=True)


def responses_stored(task: Task) -> list[str]:
    """The gateway holds the history."""
    client = opened(task)
    called = client.responses.create(input=task.question, **RESPONSES)
    results: list[Any] = [
        {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": added(call.arguments),
        }
        for call in called.output
    ]
    first = client.responses.create(input=results, previous_response_id=called.id, **RESPONSES)
    second = client.responses.create(input=task.again, previous_response_id=first.id, **RESPONSES)
    return [first.output_text, second.output_text]


def several(task: Task) -> list[str]:
    """Three replies to the second question."""
    create = opened(task).chat.completions.create
    question: Any = {"role": "user", "content": task.again}
    first = create(model="gpt-5", messages=[question]).choices[0].message
    reply = create(model="gpt-5", messages=[question, first, question], n=3)
    return [choice.message.content or "" for choice in reply.choices]


def impatient(task: Task) -> list[str]:
    """Gives up, and sends the same again."""
    client = opened(task, timeout=0.5, max_retries=20)
    messages: list[Any] = [{"role": "user", "content": task.again}]
    reply = client.chat.completions.create(model="gpt-5", messages=messages)
    return [reply.choices[0].message.content or ""]


def refused(task: Task) -> list[str]:
    """Errors are the client's own, of their classes, and are not tried again."""
    wrong = OpenAI(base_url=task.url, api_key="wrong")
    calls = [
        lambda: wrong.chat.completions.create(model="gpt-5", messages=[]),
        lambda: opened(task).chat.completions.create(model="gpt-5", messages=[]),
        lambda: opened(task).responses.create(model="gpt-5", input=[]),
        lambda: opened(task).responses.create(input="x", model="m", previous_response_id="resp_0"),
    ]
    found = []
    for call in calls:
        try:
            call()
        except openai.APIStatusError as error:
            found.append(type(error).__name__)
    opened(task).chat.completions.create(
        model="gpt-5", messages=[{"role": "user", "content": task.again}]
    )
    return found


do(
    chat=chat,
    chat_stream=chat_stream,
    responses=responses,
    responses_stream=responses_stream,
    responses_stored=responses_stored,
    several=several,
    impatient=impatient,
    refused=refused,
)
