"""Agents as users write them: they know a base URL and a key, and nothing of areal_lab."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any


def ask(url: str, key: str, messages: Sequence[Mapping[str, str]], **more: Any) -> dict[str, Any]:
    """One chat completion."""
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps({"model": "any", "messages": list(messages), **more}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def two_questions(data: Mapping[str, Any]) -> float:
    """Ask, ask again with the answer in the history, and return a reward."""
    url, key = data["base_url"], data["api_key"]
    messages = [{"role": "user", "content": data["prompt"].splitlines()[-1]}]
    first = ask(url, key, messages)["choices"][0]["message"]
    messages += [{"role": "assistant", "content": first["content"]}]
    messages += [{"role": "user", "content": "9 + 9 ="}]
    second = ask(url, key, messages, temperature=0.1)["choices"][0]["message"]
    return float(len(first["content"] + second["content"]) % 2)


async def rewards_of_replies(data: Mapping[str, Any]) -> dict[str, float]:
    """A reward for the first of two replies, by its id."""
    import asyncio

    url, key = data["base_url"], data["api_key"]
    messages = [{"role": "user", "content": "1 + 1 ="}]
    first = await asyncio.to_thread(ask, url, key, messages)
    messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}]
    messages += [{"role": "user", "content": "2 + 2 ="}]
    await asyncio.to_thread(ask, url, key, messages)  # no reward is for this one
    return {first["id"]: float(len(first["choices"][0]["message"]["content"]) % 2)}


def rewards_in_two_ways(data: Mapping[str, Any]) -> float | dict[str, float]:
    """A number, or a reward of the reply."""
    answer = ask(data["base_url"], data["api_key"], [{"role": "user", "content": "1 + 1 ="}])
    return 1.0 if answer["usage"]["completion_tokens"] % 2 else {answer["id"]: 1.0}


def reads_the_environment(data: Mapping[str, Any]) -> float:
    """As a client without arguments does, in a process of its own."""
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    assert (url, key) == (data["base_url"], data["api_key"])
    answer = ask(url, key, [{"role": "user", "content": "2 + 2 ="}])
    return float(len(answer["choices"][0]["message"]["content"]) % 2)


def asks_nothing(data: Mapping[str, Any]) -> float:
    """Returns a reward for no token at all."""
    del data
    return 1.0


def crashes(data: Mapping[str, Any]) -> float:
    """Fails after it has sampled, with all that it was given, as tracebacks of some clients do."""
    ask(data["base_url"], data["api_key"], [{"role": "user", "content": "1 ="}])
    raise KeyError(f"no such page: {dict(data)}")


def dies(data: Mapping[str, Any]) -> float:
    """Its process ends without a word, after it has sampled."""
    ask(data["base_url"], data["api_key"], [{"role": "user", "content": "1 ="}])
    os._exit(3)


TIMES = {
    "type": "function",
    "function": {
        "name": "times",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}


def multiplies(data: Mapping[str, Any]) -> float:
    """Do what the model calls for, as clients do: arguments are rewritten, text is stripped, and
    the results of parallel calls come back in another order."""
    history: list[Any] = [{"role": "user", "content": data["prompt"]}]
    reply = ask(data["base_url"], data["api_key"], history, tools=[TIMES])
    message = reply["choices"][0]["message"]
    message["content"] = (message["content"] or "").strip()
    results = [{"role": "user", "content": "+"}] if "tool_calls" not in message else []
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, indent=1)
        product = str(arguments["a"] * arguments["b"])
        results.insert(0, {"role": "tool", "tool_call_id": call["id"], "content": product})
    last = ask(data["base_url"], data["api_key"], [*history, message, *results], tools=[TIMES])
    return float(last["usage"]["completion_tokens"] % 2)
