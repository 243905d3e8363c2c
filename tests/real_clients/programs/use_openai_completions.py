"""OpenAI's own client: completions of plain text and top log-probs, whole and streamed."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

given = json.load(sys.stdin)
client = OpenAI(base_url=f"{given['url']}/v1", api_key=given["key"])


def completion(*, stream: bool) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"logprobs": 3, "echo": True, "max_tokens": 4, "temperature": 0}
    found = client.completions.create(
        model="any", prompt=given["prompts"], stream=stream, seed=1, **asked
    )
    parts = found if stream else [found]
    choices = [choice for part in parts for choice in part.choices]
    return [choice.model_dump() for choice in choices]


def chat(*, stream: bool) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12, "seed": 1}
    messages: Any = [{"role": "user", "content": given["prompts"][0]}]
    if not stream:
        whole = client.chat.completions.create(model="any", messages=messages, **asked)
        return [each.model_dump() for each in whole.choices[0].logprobs.content]
    return [
        each.model_dump()
        for part in client.chat.completions.create(
            model="any", messages=messages, stream=True, **asked
        )
        if part.choices and part.choices[0].logprobs
        for each in part.choices[0].logprobs.content
    ]


print(
    json.dumps(
        {
            "completion": (completion(stream=False), completion(stream=True)),
            "chat": (chat(stream=False), chat(stream=True)),
        }
    )
)
