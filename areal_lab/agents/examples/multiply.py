"""An agent that multiplies by calling a tool, written with OpenAI's client.

    user:      Question: 60 * 64
    assistant: multiply({"a": 60, "b": 64})
    tool:      3840
    assistant: Answer: 3840

Examples with and without the tool precede the question, as in `areal_lab.data.arithmetic`: a small
model then calls it in some of its samples. Needs `pip install 'areal_lab[openai]'`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.extras import require

require("areal_lab.agents.examples.multiply", "openai")

from openai import AsyncOpenAI  # noqa: E402 - only if it is there

MOST_REPLIES: Final = 3
"""Maximum replies of the model, including the final one."""
TOOL: Final[Any] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_EXAMPLES: Final = ((34, 27, False), (12, 15, True), (61, 18, False), (25, 32, True))
"""Factors, and whether the tool is called."""


async def run_agent_return_reward(data: Mapping[str, Any]) -> float:
    """Solve one question; 1 if the result is right, else 0.

    `data` has `base_url` and `api_key`, `question` (`60 * 64`) and `answer` (`3840`).
    """
    messages: list[Any] = [*_examples(), _asked(data["question"])]
    async with AsyncOpenAI(base_url=data["base_url"], api_key=data["api_key"]) as client:
        for _ in range(MOST_REPLIES):
            reply = await client.chat.completions.create(
                model="any", messages=messages, tools=[TOOL]
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == f"Answer: {data['answer']}")
            messages.append(message)
            messages += [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": multiply(call.function.arguments),
                }
                for call in message.tool_calls
                if call.type == "function"
            ]
    return 0.0


def multiply(arguments: str) -> str:
    """Result of the tool, from the JSON of its arguments."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, TypeError, KeyError):
        return "error: a and b must be integers"


def _asked(question: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Question: {question}"}


def _examples() -> list[dict[str, Any]]:
    messages = []
    for number, (a, b, uses_tool) in enumerate(_EXAMPLES):
        messages.append(_asked(f"{a} * {b}"))
        if uses_tool:
            name = f"call{number:05}"
            function = {"name": "multiply", "arguments": json.dumps({"a": a, "b": b})}
            call = {"id": name, "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": name, "content": str(a * b)},
            ]
        messages.append({"role": "assistant", "content": f"Answer: {a * b}"})
    return messages
