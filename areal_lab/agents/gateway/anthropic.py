"""Anthropic's messages: POST /messages, and prompt sizes from /messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from areal_lab.agents.gateway import reading
from areal_lab.agents.gateway.calls import Answer, Call, Dialect, usage_of
from areal_lab.agents.gateway.errors import ApiError, anthropic_error, invalid
from areal_lab.agents.gateway.reading import Body
from areal_lab.agents.gateway.stream import content_pieces, event, text_pieces
from areal_lab.agents.messages import ChatReply, ChatRequest, Message, Tool, ToolCall

_BILLING: Final = "x-anthropic-billing-header:"
"""First part of Claude Code's system prompt, which changes between calls and is meant for
Anthropic's servers: with it, no call would continue an earlier one."""
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})


_KNOWN: Final = frozenset(
    {
        *("messages", "model", "system", "tools", "tool_choice", "max_tokens", "temperature"),
        *("top_p", "stop_sequences", "stream", "thread", "output_format"),
    }
)


def parse(body: Body) -> Call:
    """Parse the body of a request."""
    found = reading.items(body, "messages")
    if not found:
        raise invalid("messages is missing or empty", "messages")
    choice, form = reading.tool_choice(body), reading.json_form(body)
    tools, notes = reading.tools_of(reading.items(body, "tools"), _tool)
    reading.require_tool(choice, tools, notes)
    thread = body.get("thread")
    thread = None if thread is None else reading.record(thread, "thread")
    return Call(
        request=ChatRequest(
            messages=tuple(
                message
                for index, each in enumerate(found)
                for message in _messages(
                    reading.record(each, f"messages[{index}]"), f"messages[{index}]"
                )
            ),
            tools=tools,
            tool_choice=choice.kind,
            tool_name=choice.tool,
            max_new_tokens=reading.most_tokens(body, "max_tokens"),
            temperature=reading.temperature(body),
            top_p=reading.top_p(body),
            stop=reading.stops(body, "stop_sequences"),
            json_schema=form.schema,
        ),
        system=_system(body.get("system")),
        model=reading.text(body, "model") or "",
        stream=reading.flag(body, "stream"),
        follows=_followed(thread),
        inherits=True,
        keep=thread is not None,
        instruction=form.instruction,
        schema_field=form.field,
        user=reading.user(body),
        notes=(
            *reading.sampling_notes(body, choice, form),
            *notes,
            *reading.unknown_note(body, _KNOWN),
        ),
    )


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Encode the whole reply as one object."""
    each = answer.replies[0]
    return {
        "id": answer.interaction_id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": _blocks(each),
        "stop_reason": _stop_reason(each),
        "stop_sequence": each.stop,
        "usage": _usage(answer),
    }


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Encode the reply as a stream of blocks."""
    each = answer.replies[0]
    begun = {
        **reply(call, answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_usage(answer), "output_tokens": 0},
    }
    yield _event("message_start", message=begun)
    empty: dict[str, Any]
    for index, block in enumerate(_blocks(each)):
        match block["type"]:
            case "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                pieces = [
                    {"type": "thinking_delta", "thinking": piece}
                    for piece in text_pieces(block["thinking"])
                ]
                pieces.append({"type": "signature_delta", "signature": ""})
            case "text":
                empty = {"type": "text", "text": ""}
                pieces = [
                    {"type": "text_delta", "text": piece}
                    for piece, _ in content_pieces(each)
                    if piece
                ]
            case _:
                empty = {**block, "input": {}}
                pieces = [
                    {"type": "input_json_delta", "partial_json": piece}
                    for piece in text_pieces(json.dumps(block["input"]))
                ]
        yield _event("content_block_start", index=index, content_block=empty)
        for piece in pieces:
            yield _event("content_block_delta", index=index, delta=piece)
        yield _event("content_block_stop", index=index)
    delta = {"stop_reason": _stop_reason(each), "stop_sequence": each.stop}
    yield _event("message_delta", delta=delta, usage=_usage(answer))
    yield _event("message_stop")


def unknown(interaction_id: str) -> ApiError:
    """Error of a call that continues an unknown thread; clients then send the whole history."""
    return ApiError(
        404,
        f"thread_not_found: no thread of this session ends with {interaction_id}",
        param="thread.previous_message_id",
        code="thread_not_found",
    )


def error_event(error: ApiError) -> bytes:
    """Error event within a stream."""
    return event(anthropic_error(error), "error")


# --- requests ------------------------------------------------------------------------------------


def _system(found: object) -> tuple[Message, ...]:
    if isinstance(found, list):
        found = [part for part in found if not _is_billing(part)]
    content = reading.content_text(found, "system")
    return (Message(role="system", content=content),) if content else ()


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def _messages(found: Body, where: str) -> Iterator[Message]:
    """Messages of one entry; tool results inside a user message become separate messages."""
    content = found.get("content")
    match found.get("role"):
        case "system":
            yield Message(role="system", content=reading.content_text(content, f"{where}.content"))
        case "user":
            yield from _user(content, f"{where}.content")
        case "assistant":
            yield _assistant(content, f"{where}.content")
        case role:
            raise invalid(
                f"{where}.role is {reading.shown(role)}, but must be user, assistant or system",
                f"{where}.role",
            )


def _user(content: object, where: str) -> Iterator[Message]:
    if not isinstance(content, list):
        yield Message(role="user", content=reading.content_text(content, where))
        return
    reading.few(content, where)
    texts: list[str] = []
    found = False
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if isinstance(part, dict) and part.get("type") == "tool_result":
            if texts:
                yield Message(role="user", content="".join(texts))
                texts = []
            yield Message(
                role="tool",
                content=reading.content_text(part.get("content"), f"{place}.content"),
                call_id=reading.text(part, "tool_use_id", f"{place}.") or "",
            )
            found = True
        else:
            texts.append(reading.part_text(part, place))
    if texts or not found:
        yield Message(role="user", content="".join(texts))


def _assistant(content: object, where: str) -> Message:
    if not isinstance(content, list):
        return Message(role="assistant", content=reading.content_text(content, where))
    reading.few(content, where)
    texts: list[str] = []
    calls: list[ToolCall] = []
    thinking: list[str] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            call_id = reading.text(part, "id", f"{place}.") or ""
            function = {"name": part.get("name"), "arguments": part.get("input")}
            calls.append(reading.function_call(function, call_id, place))
        elif isinstance(kind, str) and kind in _THINKING:
            thinking.append(reading.text(part, "thinking", f"{place}.") or "")
        else:
            texts.append(reading.part_text(part, place))
    return Message(
        role="assistant",
        content="".join(texts),
        tool_calls=tuple(calls),
        reasoning="".join(thinking) if thinking else None,
    )


def _tool(found: Body, where: str) -> Tool | None:
    if found.get("type", "custom") not in ("custom", None):
        return None
    return reading.function_tool(found, where, schema="input_schema")


def _followed(thread: Body | None) -> str:
    match None if thread is None else thread.get("type"):
        case None | "create":
            return ""
        case "continue":
            assert thread is not None
            return reading.required(thread, "previous_message_id", "thread.")
        case kind:
            raise invalid(
                f"thread.type is {reading.shown(kind)}, but must be create or continue",
                "thread.type",
            )


# --- replies -------------------------------------------------------------------------------------


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _blocks(each: ChatReply) -> list[dict[str, Any]]:
    message = each.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        block = {"type": "tool_use", "id": call.call_id, "name": call.name}
        blocks.append({**block, "input": _arguments(call)})
    return blocks


def _arguments(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object, as this protocol requires; other values are wrapped in one."""
    try:
        found = reading.parse_value(call.arguments)
    except ValueError:
        found = call.arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _stop_reason(each: ChatReply) -> str:
    match each.finish:
        case "stop":
            return "end_turn" if each.stop is None else "stop_sequence"
        case "length":
            return "max_tokens"
        case "context":
            return "model_context_window_exceeded"
        case "tool_calls":
            return "tool_use"


def _usage(answer: Answer) -> dict[str, int]:
    usage = usage_of(answer)
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }


ANTHROPIC: Final = Dialect(
    name="messages",
    id_prefix="msg_",
    parse=parse,
    reply=reply,
    events=events,
    unknown=unknown,
    error=anthropic_error,
    error_event=error_event,
    keep_alive=event({"type": "ping"}, "ping"),
)
