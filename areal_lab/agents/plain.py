"""Messages and tools as the plain data that chat templates read.

Parts that a template cannot write become text: tools in the system message, calls in the content of
the assistant, results and system messages in those of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import Any, Final

from areal_lab.agents.messages import Message, Tool, ToolCall
from areal_lab.agents.template import Plain

TOOLS_TEXT: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>{{"name": <function-name>, "arguments": <args-json-object>}}</tool_call>"""
"""Description of tools for templates that ignore them (wording of Qwen2.5's template)."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form in which a template expects tool calls."""

    as_text: bool
    """True if arguments are JSON text, False if an object."""
    no_content: str | None
    """Content of a message that has calls only."""


CALL_FORMS: Final = tuple(CallForm(text, empty) for text in (False, True) for empty in ("", None))
"""In the order in which they are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainForm:
    """Message parts that a template supports, and parts that must be text."""

    calls: CallForm | None = CALL_FORMS[0]
    """None writes calls as text of the assistant."""
    several_calls: bool = True
    """True if the template supports several calls in a message; otherwise these are text."""
    results: bool = True
    """True if it supports tool results. Otherwise they are text of the user."""
    tools: bool = True
    """True if it describes tools. Otherwise `TOOLS_TEXT` does, in the system message."""

    system: bool = True
    """True if it supports system messages. Otherwise they start the first user message."""

    def writes_calls(self, message: Message) -> bool:
        """Return whether a message has calls and the template writes them."""
        count = len(message.tool_calls)
        return self.calls is not None and (count == 1 or (count > 1 and self.several_calls))


def plain_messages(messages: Sequence[Message], form: PlainForm) -> list[Plain]:
    """Convert messages to the form of a template."""
    names = {call.call_id: call.name for message in messages for call in message.tool_calls}
    plain: list[Plain] = []
    for is_result, together in groupby(messages, lambda message: message.role == "tool"):
        if not is_result:
            plain += [_plain_message(message, form) for message in together]
        elif form.results:
            plain += [_plain_result(message, names) for message in together]
        else:
            # One message for all: some templates require user and assistant to alternate.
            responses = (f"<tool_response>\n{m.content}\n</tool_response>" for m in together)
            plain.append({"role": "user", "content": "\n".join(responses)})
    return plain


def plain_tools(tools: Sequence[Tool]) -> list[Plain]:
    """Convert tools to the form of a template."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def tools_text(tools: Sequence[Tool]) -> str:
    """Description of tools, and of how to call them, for a model."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in plain_tools(tools))
    return TOOLS_TEXT.format(tools=lines)


def with_tools_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Append the description of tools to the system message, which is added if missing."""
    text = tools_text(tools)
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [Message(role="system", content=text), *messages]


def with_system_in_question(messages: Sequence[Message]) -> list[Message]:
    """Move the leading system messages into the first user message."""
    system = list(takewhile(lambda message: message.role == "system", messages))
    others = list(messages[len(system) :])
    if not system:
        return others
    text = "\n\n".join(message.content for message in system)
    if others and others[0].role == "user":
        return [replace(others[0], content=f"{text}\n\n{others[0].content}"), *others[1:]]
    return [Message(role="user", content=text), *others]


def _plain_message(message: Message, form: PlainForm) -> Plain:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if form.calls is not None and form.writes_calls(message):
        as_text = form.calls.as_text
        plain["content"] = message.content or form.calls.no_content
        plain["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if as_text else _parsed(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    elif message.tool_calls:
        written = [message.content] if message.content else []
        written += [_call_text(call) for call in message.tool_calls]
        plain["content"] = "\n".join(written)
    return plain


def _plain_result(message: Message, names: Mapping[str, str]) -> Plain:
    plain = {"role": "tool", "content": message.content, "tool_call_id": message.call_id}
    name = names.get(message.call_id)
    return plain if name is None else {**plain, "name": name}


def _parsed(arguments: str) -> Any:
    """Arguments as an object; text that is not a JSON object stays text."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _call_text(call: ToolCall) -> str:
    """A call in the notation of `TOOLS_TEXT`."""
    written = {"name": call.name, "arguments": _parsed(call.arguments)}
    return f"<tool_call>{json.dumps(written, ensure_ascii=False)}</tool_call>"
