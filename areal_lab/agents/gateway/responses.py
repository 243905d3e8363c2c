"""OpenAI's responses: POST /responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from areal_lab.agents.gateway import reading
from areal_lab.agents.gateway.calls import Answer, Call, Dialect, usage_of
from areal_lab.agents.gateway.errors import ApiError, invalid, openai_error
from areal_lab.agents.gateway.reading import Body
from areal_lab.agents.gateway.stream import (
    COMMENT,
    content_pieces,
    event,
    logprob_entries,
    text_pieces,
)
from areal_lab.agents.messages import ChatReply, ChatRequest, Message, Tool, ToolCall

_ECHO: Final[dict[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields that a response repeats, with their defaults."""
_LOGPROBS: Final = "message.output_text.logprobs"
Item = dict[str, Any]
_KNOWN: Final = frozenset(
    {*_ECHO, "model", "input", "include", "stream", "stream_options", "stop", "seed"}
)


def parse(body: Body) -> Call:
    """Parse the body of a request."""
    choice, form = reading.tool_choice(body), reading.json_form(body)
    tools, notes = reading.tools_of(reading.items(body, "tools"), _tool)
    reading.require_tool(choice, tools, notes)
    instructions = body.get("instructions")
    include = reading.items(body, "include")
    return Call(
        request=ChatRequest(
            messages=_messages(body.get("input")),
            tools=tools,
            tool_choice=choice.kind,
            tool_name=choice.tool,
            max_new_tokens=reading.most_tokens(body, "max_output_tokens"),
            temperature=reading.temperature(body),
            top_p=reading.top_p(body),
            stop=reading.stops(body, "stop"),
            seed=reading.seed(body),
            json_schema=form.schema,
        ),
        system=_instructions(instructions),
        model=reading.text(body, "model") or "",
        stream=reading.flag(body, "stream"),
        logprobs=_LOGPROBS in include,
        follows=reading.text(body, "previous_response_id") or "",
        keep=body.get("store") is not False,
        instruction=form.instruction,
        schema_field=form.field,
        user=reading.user(body),
        notes=(
            *reading.sampling_notes(body, choice, form),
            *notes,
            *reading.unknown_note(body, _KNOWN),
        ),
        echo={
            name: default if body.get(name) is None else body[name]
            for name, default in _ECHO.items()
        },
    )


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Encode the whole response as one object."""
    return _response(call, answer, _items(call, answer))


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Encode the response as a stream.

    A truncated reply also ends with `response.completed`, and reports it inside: OpenAI's own
    client knows no other final event.
    """
    number = 0

    def numbered(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number - 1, **fields}, kind)

    begun = {
        **_response(call, answer, []),
        "status": "in_progress",
        "incomplete_details": None,
        "usage": None,
    }
    yield numbered("response.created", response=begun)
    yield numbered("response.in_progress", response=begun)
    items = _items(call, answer)
    for index, item in enumerate(items):
        place = {"output_index": index}
        yield numbered("response.output_item.added", item=_begun(item), **place)
        place["item_id"] = item["id"]
        match item["type"]:
            case "reasoning":
                yield from _reasoning_events(numbered, place, item["content"][0])
            case "message":
                yield from _message_events(numbered, place, item["content"][0], call, answer)
            case _:
                kind = "response.function_call_arguments"
                for piece in text_pieces(item["arguments"]):
                    yield numbered(f"{kind}.delta", delta=piece, **place)
                yield numbered(
                    f"{kind}.done", arguments=item["arguments"], name=item["name"], **place
                )
        yield numbered("response.output_item.done", item=item, output_index=index)
    yield numbered("response.completed", response=_response(call, answer, items))


def unknown(interaction_id: str) -> ApiError:
    """Error of a call that follows a response which is not stored."""
    return ApiError(
        400,
        f"previous_response_id is {interaction_id}, but this session has stored no such response",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def error_event(error: ApiError) -> bytes:
    """Error within a stream: the protocol's event, which OpenAI's client raises only if it also has
    the form of other errors.
    """
    return event(
        {
            "type": "error",
            "sequence_number": 0,
            "code": error.code or error.type,
            "message": error.message,
            "param": error.param,
            **openai_error(error),
        },
        "error",
    )


# --- requests ------------------------------------------------------------------------------------


def _instructions(found: object) -> tuple[Message, ...]:
    if found is None or found == "":
        return ()
    if isinstance(found, str):
        return (Message(role="system", content=found),)
    return _messages(found, "instructions")


def _messages(found: object, where: str = "input") -> tuple[Message, ...]:
    if isinstance(found, str):
        return (Message(role="user", content=found),)
    if not isinstance(found, list) or not found:
        raise invalid(f"{where} is missing; it must be a string or a list of items", where)
    reading.few(found, where)
    history = _History()
    for index, each in enumerate(found):
        place = f"{where}[{index}]"
        history.add(reading.record(each, place), place)
    history.close()
    return tuple(history.messages)


@dataclass(slots=True)
class _History:
    """Messages of a list of items, in which one reply of a model is several items: thinking, a
    message, and calls.
    """

    messages: list[Message] = field(default_factory=list)
    reasoning: str | None = None
    content: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, item: Body, where: str) -> None:
        kind = item.get("type")
        match kind:
            case None | "message":
                self._add_message(item, where)
            case "function_call":
                call_id = reading.text(item, "call_id", f"{where}.") or ""
                self.calls.append(reading.function_call(item, call_id, where))
            case "function_call_output":
                self.close()
                self.messages.append(
                    Message(
                        role="tool",
                        content=reading.content_text(item.get("output"), f"{where}.output"),
                        call_id=reading.text(item, "call_id", f"{where}.") or "",
                    )
                )
            case "reasoning":
                self.close()
                # Summaries replace the thinking if its content is missing.
                parts = item.get("content") or item.get("summary")
                self.reasoning = reading.content_text(parts, f"{where}.content") or None
            case _:
                raise invalid(
                    f"{where}.type is {reading.shown(kind)}, but must be message, function_call, "
                    "function_call_output or reasoning",
                    f"{where}.type",
                )

    def _add_message(self, item: Body, where: str) -> None:
        role = reading.required(item, "role", f"{where}.")
        content = reading.content_text(item.get("content"), f"{where}.content")
        if role == "assistant":
            if self.content is not None or self.calls:
                self.close()
            self.content = content
            return
        self.close()
        if role not in ("system", "developer", "user"):
            raise invalid(
                f"{where}.role is {reading.shown(role)}, but must be system, developer, user or "
                "assistant",
                f"{where}.role",
            )
        self.messages.append(Message(role="user" if role == "user" else "system", content=content))

    def close(self) -> None:
        """Finish the reply that is being assembled."""
        if self.reasoning is None and self.content is None and not self.calls:
            return
        self.messages.append(
            Message(
                role="assistant",
                content=self.content or "",
                tool_calls=tuple(self.calls),
                reasoning=self.reasoning,
            )
        )
        self.reasoning, self.content, self.calls = None, None, []


def _tool(found: Body, where: str) -> Tool | None:
    return reading.function_tool(found, where) if found.get("type") == "function" else None


# --- replies -------------------------------------------------------------------------------------


def _response(call: Call, answer: Answer, output: list[Item]) -> dict[str, Any]:
    cut = _cut(answer.replies[0])
    usage = usage_of(answer)
    return {
        "id": answer.interaction_id,
        "object": "response",
        "created_at": answer.created_s,
        "status": "incomplete" if cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": call.model,
        "output": output,
        **call.echo,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        },
    }


def _cut(each: ChatReply) -> bool:
    return each.finish in ("length", "context")


def _items(call: Call, answer: Answer) -> list[Item]:
    """Output items: thinking, the message, the calls; an empty reply is an empty message."""
    each = answer.replies[0]
    message = each.message
    suffix = answer.interaction_id.removeprefix(RESPONSES.id_prefix)
    items: list[Item] = []
    if message.reasoning is not None:
        items.append(
            {
                "id": f"rs_{suffix}",
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": message.reasoning}],
                "status": "completed",
            }
        )
    if message.content or not message.tool_calls:
        items.append(
            {
                "id": f"msg_{suffix}",
                "type": "message",
                "status": "incomplete" if _cut(each) else "completed",
                "role": "assistant",
                "content": [
                    {
                        "type": "output_text",
                        "text": message.content,
                        "annotations": [],
                        "logprobs": logprob_entries(each.shown) if call.logprobs else [],
                    }
                ],
            }
        )
    for index, one in enumerate(message.tool_calls):
        items.append(
            {
                "id": f"fc_{suffix}_{index}",
                "type": "function_call",
                "status": "completed",
                "call_id": one.call_id,
                "name": one.name,
                "arguments": one.arguments,
            }
        )
    return items


def _begun(item: Item) -> Item:
    empty: Item = {"status": "in_progress"}
    if "content" in item:
        empty["content"] = []
    if "arguments" in item:
        empty["arguments"] = ""
    return {**item, **empty}


def _reasoning_events(
    numbered: Callable[..., bytes], place: dict[str, Any], part: Item
) -> Iterator[bytes]:
    where = {**place, "content_index": 0}
    yield numbered("response.content_part.added", part={**part, "text": ""}, **where)
    for piece in text_pieces(part["text"]):
        yield numbered("response.reasoning_text.delta", delta=piece, **where)
    yield numbered("response.reasoning_text.done", text=part["text"], **where)
    yield numbered("response.content_part.done", part=part, **where)


def _message_events(
    numbered: Callable[..., bytes],
    place: dict[str, Any],
    part: Item,
    call: Call,
    answer: Answer,
) -> Iterator[bytes]:
    where = {**place, "content_index": 0}
    begun = {**part, "text": "", "logprobs": []}
    yield numbered("response.content_part.added", part=begun, **where)
    for piece, shown in content_pieces(answer.replies[0]):
        entries = logprob_entries(shown, with_bytes=False) if call.logprobs else []
        if piece or entries:
            yield numbered("response.output_text.delta", delta=piece, logprobs=entries, **where)
    yield numbered(
        "response.output_text.done", text=part["text"], logprobs=part["logprobs"], **where
    )
    yield numbered("response.content_part.done", part=part, **where)


RESPONSES: Final = Dialect(
    name="responses",
    id_prefix="resp_",
    parse=parse,
    reply=reply,
    events=events,
    unknown=unknown,
    error=openai_error,
    error_event=error_event,
    keep_alive=COMMENT,
)
