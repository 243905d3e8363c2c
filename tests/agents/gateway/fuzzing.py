"""Bodies, headers and paths that a gateway may get: mostly good ones, with something wrong in some.

history of messages --body_of--> body --mutated--> body --raw--> bytes
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

from hypothesis import strategies as st

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.messages import Message, ToolCall
from areal_lab.engines.protocol import SamplingParams
from tests.agents.gateway.scripted import chat_of, message_of, response_of, sse
from tests.agents.scripted_model import Sample, Sampled

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]

# --- values --------------------------------------------------------------------------------------

ODD_TEXT: Final = st.sampled_from(
    [
        *(
            "",
            " ",
            "\n",
            "\x00",
            "END",
            "<|im_end|>",
            "<tool_call>",
            "</think>",
            "\ufdd0",
            "\ud83d",
        ),
        *("x" * 300, "null", "{", "\u2028", "\N{PARTY POPPER}", "user", "add", "[TOOL_CALLS] ["),
    ]
)
SCALARS: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e300, 1.5]),
    ODD_TEXT,
)
JSON: Final = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "name", "id", "function", ""]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)

TOOLS: Final[list[dict[str, Any]]] = [
    {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
    {"name": "look up", "parameters": {"properties": {"<|im_end|>": {"type": ["string", None]}}}},
    {"name": "\N{PARTY POPPER}", "description": "\x00", "parameters": {}},
]

_STOPS = st.one_of(ODD_TEXT, st.lists(ODD_TEXT, max_size=4))
_COMMON: Final[dict[str, st.SearchStrategy[Any]]] = {
    "temperature": st.sampled_from([0, 0.7, 1, 2, None]),
    "top_p": st.sampled_from([0.1, 1, None]),
    "stream": st.booleans(),
    "metadata": st.just({"user_id": "x"}),
    "top_k": st.just(5),
}
OPTIONS: Final[dict[str, dict[str, st.SearchStrategy[Any]]]] = {
    "chat": {
        **_COMMON,
        "max_tokens": st.integers(1, 9),
        "max_completion_tokens": st.integers(1, 9),
        "stop": _STOPS,
        "n": st.integers(1, 4),
        "seed": st.integers(),
        "stream_options": st.just({"include_usage": True}),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 20),
        "tool_choice": st.sampled_from(["none", "auto", "required"]),
        "response_format": st.just({"type": "json_object"}),
    },
    "responses": {
        **_COMMON,
        "max_output_tokens": st.integers(1, 9),
        "store": st.booleans(),
        "include": st.just(["message.output_text.logprobs"]),
        "tool_choice": st.just({"type": "function", "name": "add"}),
        "parallel_tool_calls": st.booleans(),
    },
    "messages": {
        **_COMMON,
        "stop_sequences": _STOPS,
        "thread": st.just({"type": "create"}),
        "tool_choice": st.just({"type": "any"}),
        "thinking": st.just({"type": "adaptive"}),
    },
}
PATHS: Final = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


# --- bodies --------------------------------------------------------------------------------------


def body_of(dialect: str, history: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Any:
    """The body in which a client of a dialect sends a conversation."""
    match dialect:
        case "chat":
            wrapped = [{"type": "function", "function": tool} for tool in tools]
            return {
                "model": "gpt-x",
                "messages": [_chat(message) for message in history],
                **({"tools": wrapped} if tools else {}),
            }
        case "responses":
            flat = [{"type": "function", **tool} for tool in tools]
            items = [item for message in history for item in _items(message)]
            return {"model": "gpt-x", "input": items, **({"tools": flat} if tools else {})}
        case _:
            renamed = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
            system = [message.content for message in history if message.role == "system"]
            return {
                "model": "claude-x",
                "max_tokens": 20,
                "messages": [_blocks(each) for each in history if each.role != "system"],
                **({"system": "\n".join(system)} if system else {}),
                **({"tools": renamed} if tools else {}),
            }


def mutated(draw: Draw, body: Any) -> Any:
    """The body with one part of it replaced, left out or repeated."""
    body = copy.deepcopy(body)
    holder, key = draw(st.sampled_from(list(_places(body))))
    how = draw(st.sampled_from(["replace", "replace", "remove", "repeat"]))
    if how == "remove":
        del holder[key]
    elif how == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        holder[key] = draw(JSON)
    return body


def raw(draw: Draw, body: Any) -> bytes:
    """The bytes of a body, or of most of it, or of something else."""
    whole = json.dumps(body).encode()
    kinds = st.sampled_from([*["whole"] * 30, "utf-8", "utf-8", "cut", "bytes", "nan", "deep"])
    match draw(kinds):
        case "utf-8":
            whole = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        case "cut":
            whole = whole[: draw(st.integers(0, len(whole)))]
        case "bytes":
            whole = draw(st.binary(max_size=20))
        case "nan":
            whole = whole.replace(b"null", b"NaN").replace(b"0.7", b"1e999")
        case "deep":
            whole = b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    return whole


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Where something stands in a value: the containers and their keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _chat(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        found["tool_call_id"] = message.call_id
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return found


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        yield {
            "type": "function_call_output",
            "call_id": message.call_id,
            "output": message.content,
        }
        return
    if message.content or not message.tool_calls:
        yield {"role": message.role, "content": message.content}
    for call in message.tool_calls:
        yield {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }


def _blocks(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        block = {"type": "tool_result", "tool_use_id": message.call_id, "content": message.content}
        return {"role": "user", "content": [block]}
    if message.role == "user":
        return {"role": "user", "content": message.content}
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {
            "type": "tool_use",
            "id": call.call_id,
            "name": call.name,
            "input": json.loads(call.arguments),
        }
        for call in message.tool_calls
    ]
    return {"role": "assistant", "content": blocks}


# --- replies -------------------------------------------------------------------------------------


def replied(dialect: str, body: bytes, *, streamed: bool) -> tuple[str, Message] | None:
    """Id and message of a reply, whole or streamed; None if the stream ended with an error."""
    if streamed:
        events = sse(body)
        if "error" in events[-1][1] or events[-1][0] == "error":
            return None
        whole = {"chat": chat_of, "responses": response_of, "messages": message_of}[dialect](events)
    else:
        whole = json.loads(body)
    reader = {"chat": _of_chat, "responses": _of_response, "messages": _of_blocks}[dialect]
    return whole["id"], reader(whole)


def _of_chat(reply: dict[str, Any]) -> Message:
    message = reply["choices"][-1]["message"]
    return Message(
        role="assistant",
        content=message["content"] or "",
        reasoning=message.get("reasoning_content"),
        tool_calls=tuple(
            ToolCall(call_id=call["id"], **call["function"])
            for call in message.get("tool_calls", ())
        ),
    )


def _of_response(reply: dict[str, Any]) -> Message:
    of = {kind: [] for kind in ("reasoning", "message", "function_call")}
    for item in reply["output"]:
        of[item["type"]].append(item)
    return Message(
        role="assistant",
        content="".join(part["text"] for item in of["message"] for part in item["content"]),
        tool_calls=tuple(
            ToolCall(call_id=each["call_id"], name=each["name"], arguments=each["arguments"])
            for each in of["function_call"]
        ),
    )


def _of_blocks(reply: dict[str, Any]) -> Message:
    of = {kind: [] for kind in ("thinking", "text", "tool_use")}
    for block in reply["content"]:
        of[block["type"]].append(block)
    return Message(
        role="assistant",
        content="".join(block["text"] for block in of["text"]),
        reasoning="".join(block["thinking"] for block in of["thinking"]) or None,
        tool_calls=tuple(
            ToolCall(call_id=block["id"], name=block["name"], arguments=json.dumps(block["input"]))
            for block in of["tool_use"]
        ),
    )


# --- what the model says -------------------------------------------------------------------------

_PIECES: Final = (
    *("\n", "\n\n", " ", "END", "Hi", "<think>\nhm\n</think>\n\n", "hm</think>"),
    '<tool_call>{"name": "add", "arguments": { "a":2,"b": [1]}}</tool_call>',
    '<tool_call>{"name": "look up", "arguments": {"x": "\\ud83d"}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
    '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>',
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    '{"name": "add", "parameters": {"a": 1}}',
)


def babbling(form: ChatFormat, seed: int) -> Sample:
    """A model that says anything: pieces of text, calls, tokens at random, nothing; in its time."""
    chance = random.Random(seed)

    async def sample(_prompt: tuple[int, ...], _sampling: SamplingParams) -> Sampled:
        for _ in range(chance.randrange(3)):
            # Less, as long and longer than a stream waits before it shows a sign of life.
            await asyncio.sleep(chance.choice([0, 0.01, 15.0, 40.0]))
        tokens: list[int] = []
        for _ in range(chance.randrange(4)):
            if chance.random() < 0.3:
                tokens += [chance.randrange(form.codec.vocabulary) for _ in range(3)]
            else:
                tokens += form.codec.encode(chance.choice(_PIECES))
        finish = chance.choice(["stop", "stop", "stop", "length", "abort"])
        if finish == "stop":
            tokens += form.end_tokens[:1]
        return Sampled(tokens, finish)

    return sample
