"""OpenAI's chat completions: POST /chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from areal_lab.agents.gateway import reading
from areal_lab.agents.gateway.calls import Answer, Call, Dialect, usage_of
from areal_lab.agents.gateway.errors import ApiError, invalid, openai_error
from areal_lab.agents.gateway.reading import Body
from areal_lab.agents.gateway.stream import (
    COMMENT,
    DONE,
    Shown,
    Tops,
    content_pieces,
    event,
    logprob_entries,
    text_pieces,
)
from areal_lab.agents.messages import ChatFinish, ChatReply, ChatRequest, Message, Role, Tool

MOST_REPLIES: Final = 128
"""OpenAI's upper bound of `n`."""
_FINISH: Final[dict[ChatFinish, str]] = {
    "stop": "stop",
    "length": "length",
    "context": "length",
    "tool_calls": "tool_calls",
}
_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


_KNOWN: Final = frozenset(
    {
        *("messages", "model", "tools", "tool_choice", "functions", "function_call", "n", "seed"),
        *("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream"),
        *("stream_options", "logprobs", "top_logprobs"),
    }
)


def parse(body: Body) -> Call:
    """Parse the body of a request."""
    messages = reading.items(body, "messages")
    if not messages:
        raise invalid("messages is missing or empty", "messages")
    choice, form = reading.tool_choice(body), reading.json_form(body)
    tools, tool_notes = _tools(body)
    reading.require_tool(choice, tools, tool_notes)
    options = body.get("stream_options")
    options = {} if options is None else reading.record(options, "stream_options")
    return Call(
        request=ChatRequest(
            messages=tuple(
                _message(reading.record(each, f"messages[{index}]"), f"messages[{index}]")
                for index, each in enumerate(messages)
            ),
            tools=tools,
            tool_choice=choice.kind,
            tool_name=choice.tool,
            max_new_tokens=reading.most_tokens(body, "max_completion_tokens", "max_tokens"),
            temperature=reading.temperature(body),
            top_p=reading.top_p(body),
            stop=reading.stops(body, "stop"),
            replies=reading.integer(body, "n", least=1, most=MOST_REPLIES) or 1,
            seed=reading.seed(body),
            top_logprobs=reading.integer(body, "top_logprobs", least=0, most=20) or 0,
            json_schema=form.schema,
        ),
        model=reading.text(body, "model") or "",
        stream=reading.flag(body, "stream"),
        stream_usage=reading.flag(options, "include_usage"),
        logprobs=reading.flag(body, "logprobs"),
        instruction=form.instruction,
        schema_field=form.field,
        user=reading.user(body),
        notes=(
            *reading.sampling_notes(body, choice, form),
            *tool_notes,
            *reading.unknown_note(body, _KNOWN),
        ),
    )


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Encode the whole reply as one object."""
    return {
        **_head(call, answer, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _reply_message(each),
                "finish_reason": _FINISH[each.finish],
                "logprobs": _logprobs(each.shown, each.top) if call.logprobs else None,
            }
            for index, each in enumerate(answer.replies)
        ],
        "usage": _usage(answer),
    }


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Encode the reply as a stream: role, content, calls and finish reason, one choice after
    another.

    The clients of OpenAI, LangChain, pydantic-ai, litellm and openai-agents accept this form.
    """
    head = _head(call, answer, "chat.completion.chunk")
    if call.stream_usage:
        head["usage"] = None
    for index, each in enumerate(answer.replies):
        place = 0
        for delta, shown in _deltas(each):
            top = each.top[place : place + len(shown)]
            logprobs = _logprobs(shown, top) if call.logprobs and shown else None
            place += len(shown)
            if not delta and logprobs is None:
                continue
            yield event({**head, "choices": [_choice(index, delta, logprobs)]})
        yield event({**head, "choices": [_choice(index, {}, None, _FINISH[each.finish])]})
    if call.stream_usage:
        yield event({**head, "choices": [], "usage": _usage(answer)})
    yield DONE


def unknown(interaction_id: str) -> ApiError:
    """Error of a call that follows an unknown reply; this protocol has no such calls."""
    return invalid(f"there is no completion {interaction_id}")


def error_event(error: ApiError) -> bytes:
    """Error within a stream; OpenAI's client raises it."""
    return event(openai_error(error))


# --- requests ------------------------------------------------------------------------------------


def _message(found: Body, where: str) -> Message:
    name = reading.required(found, "role", f"{where}.")
    if name not in _ROLES:
        raise invalid(
            f"{where}.role is {reading.shown(name)}, but must be one of {', '.join(_ROLES)}",
            f"{where}.role",
        )
    role = _ROLES[name]
    content = reading.content_text(found.get("content"), f"{where}.content")
    if role == "tool":
        # Messages of the older role `function` have the function's name instead of an id.
        key = "name" if name == "function" else "tool_call_id"
        return Message(
            role=role, content=content, call_id=reading.text(found, key, f"{where}.") or ""
        )
    if role != "assistant":
        return Message(role=role, content=content)
    return _assistant(found, content, where)


def _assistant(found: Body, content: str, where: str) -> Message:
    calls = []
    for index, each in enumerate(reading.items(found, "tool_calls", f"{where}.")):
        place = f"{where}.tool_calls[{index}]"
        call = reading.record(each, place)
        call_id = reading.text(call, "id", f"{place}.") or ""
        calls.append(reading.function_call(call.get("function"), call_id, f"{place}.function"))
    function = found.get("function_call")
    if function is not None:
        name = reading.record(function, f"{where}.function_call").get("name")
        call_id = name if isinstance(name, str) else ""
        calls.append(reading.function_call(function, call_id, f"{where}.function_call"))
    thinking = found.get("reasoning_content", found.get("reasoning"))
    return Message(
        role="assistant",
        content=content,
        tool_calls=tuple(calls),
        reasoning=thinking if isinstance(thinking, str) else None,
    )


def _tools(body: Body) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    def tool(found: Body, where: str) -> Tool | None:
        if found.get("type", "function") != "function":
            return None
        return reading.function_tool(found.get("function"), f"{where}.function")

    tools, notes = reading.tools_of(reading.items(body, "tools"), tool)
    older, _ = reading.tools_of(
        reading.items(body, "functions"), reading.function_tool, "functions"
    )
    return tools + older, notes


# --- replies -------------------------------------------------------------------------------------


def _head(call: Call, answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.interaction_id,
        "object": kind,
        "created": answer.created_s,
        "model": call.model,
        "system_fingerprint": _fingerprint(answer),
    }


def _fingerprint(answer: Answer) -> str | None:
    """Newest version that sampled a token: OpenAI's field for changes of the model."""
    versions = [part.version for each in answer.replies for part in each.generated.segments]
    return f"version-{max(versions)}" if versions else None


def _reply_message(each: ChatReply) -> dict[str, Any]:
    message = each.message
    found: dict[str, Any] = {
        "role": "assistant",
        "content": None if message.tool_calls and not message.content else message.content,
        "refusal": None,
    }
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


def _deltas(each: ChatReply) -> Iterator[tuple[dict[str, Any], Shown]]:
    message = each.message
    calls_only = message.tool_calls and not message.content
    yield {"role": "assistant", "content": None if calls_only else ""}, ()
    for piece in text_pieces(message.reasoning or ""):
        yield {"reasoning_content": piece}, ()
    for piece, shown in content_pieces(each):
        # Without text only log-probs remain, of hidden tokens.
        yield ({"content": piece} if piece else {}), shown
    for index, call in enumerate(message.tool_calls):
        function = {"name": call.name, "arguments": ""}
        start = {"index": index, "id": call.call_id, "type": "function", "function": function}
        yield {"tool_calls": [start]}, ()
        for piece in text_pieces(call.arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, ()


def _choice(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(shown: Shown, top: Tops = ()) -> dict[str, Any]:
    return {"content": logprob_entries(shown, top), "refusal": None}


def _usage(answer: Answer) -> dict[str, Any]:
    usage = usage_of(answer)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


CHAT: Final = Dialect(
    name="chat",
    id_prefix="chatcmpl-",
    parse=parse,
    reply=reply,
    events=events,
    unknown=unknown,
    error=openai_error,
    error_event=error_event,
    keep_alive=COMMENT,
)
