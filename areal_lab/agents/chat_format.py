"""Notation of conversations in a model's chat template: properties of template and vocabulary, by
trial.

    prompt | sampled response <end of turn> | template text in between, and the next messages
                                          '------------------ bridge -----------------------'

Sampled tokens are never encoded again: the prompt that continues a conversation is the earlier
prompt, the sampled tokens, and a bridge (the turn suffix). The bridge is cut out of an outline: the
rendered conversation with a placeholder for every sampled response, so that the end of each
response can be located.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from typing import Final

from areal_lab.agents.control_text import ControlText
from areal_lab.agents.messages import Message, Tool, ToolCall
from areal_lab.agents.plain import (
    CALL_FORMS,
    PlainForm,
    plain_messages,
    plain_tools,
    with_system_in_question,
    with_tools_text,
)
from areal_lab.agents.template import SOME_DAY, ChatTemplate, TemplateRefusal
from areal_lab.agents.tool_calls import split_thinking
from areal_lab.data.tokenize import TextCodec

_SYSTEM: Final = Message(role="system", content="probe_system")
_USER: Final = Message(role="user", content="What is it?")
_AGAIN: Final = Message(role="user", content="And this?")
_ANSWER: Final = Message(role="assistant", content="fine")
_THOUGHT: Final = "probe_thought"
_THOUGHTFUL: Final = replace(_ANSWER, reasoning=_THOUGHT)
_TOOL: Final = Tool(name="probe_name", description="probe", parameters={"type": "object"})
_CALL: Final = ToolCall(call_id="call00000", name="probe_name", arguments='{"probe_key": "p"}')
"""Mistral's templates accept only ids of nine letters and digits."""
_CALLING: Final = Message(role="assistant", tool_calls=(_CALL,))
_TWO_CALLS: Final = replace(
    _CALLING, tool_calls=(_CALL, replace(_CALL, call_id="call00001", name="second_name"))
)
_RESULT: Final = Message(role="tool", content="probe_result", call_id=_CALL.call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFacts:
    """Facts about a chat template and a vocabulary, found by trials."""

    bridges_to_user: bool
    """True if a following user message leaves the earlier text unchanged, so the prompt can
    continue sampled tokens. Otherwise the conversation is encoded from text."""
    bridges_to_results: bool
    """The same for a following tool result."""
    form: PlainForm
    """Message parts that the template supports, and parts that must be text."""
    thinking: bool
    """True if the template knows `<think>`: text before the response that clients do not send
    back."""
    opens_thinking: bool
    """True if the prompt ends with `<think>`, so the model starts inside."""
    keeps_thinking: bool
    """True if the text keeps thinking after the next user message."""


@dataclass(frozen=True, slots=True)
class _End:
    """End of an assistant message in the template."""

    text: str
    token: int
    before: tuple[str, ...] = ()
    """Control tokens between the placeholder of the message and its end."""


class ChatFormat:
    """Render and encode conversations for one model."""

    def __init__(
        self, template: ChatTemplate, codec: TextCodec, *, describe_tools: bool = True
    ) -> None:
        """Test a template."""
        self.codec = codec
        self._template = template
        self._describe_tools = describe_tools
        self._control = ControlText(codec, template.source)
        self._form = PlainForm()
        self._end: _End | None = None
        self._end_of_calls: _End | None = None
        self._exact = True
        prompt = self.text([_USER], now=SOME_DAY)
        self._form = self._find_form()
        self._end = self._find_end()
        self._end_of_calls = self._find_end_of_calls()
        calling = (_CALLING, replace(_CALLING, reasoning=_THOUGHT))
        to_user = [self._bridge_is_exact(a, _AGAIN) for a in (_ANSWER, _THOUGHTFUL, *calling)]
        to_results = [self._bridge_is_exact(answer, _RESULT) for answer in calling]
        self._exact = False not in to_user + to_results
        opens = prompt.rstrip().endswith("<think>")
        self.facts = FormatFacts(
            bridges_to_user=self._exact and True in to_user,
            bridges_to_results=self._exact and True in to_results,
            form=self._form,
            thinking=opens
            or "</think>" in template.source
            or _THOUGHT in self._tried(_USER, _THOUGHTFUL),
            opens_thinking=opens,
            keeps_thinking=_THOUGHT in self._tried(_USER, _THOUGHTFUL, _AGAIN),
        )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an assistant message; sampling must stop at them."""
        ends = (self._end, self._end_of_calls)
        return tuple(dict.fromkeys(end.token for end in ends if end is not None))

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        now: datetime,
        speaks_next: bool = True,
    ) -> str:
        """Render a conversation up to the start of the assistant's message, for `encode`.

        With `speaks_next=False` the text omits the header of the next assistant message.
        """
        if tools and not self._form.tools:
            messages = with_tools_text(messages, tools) if self._describe_tools else messages
            tools = ()
        if not self._form.system:
            messages = with_system_in_question(messages)
        try:
            plain = self._control.plain(plain_messages(messages, self._form))
            described = self._control.plain(plain_tools(tools))
        except RecursionError as error:
            raise TemplateRefusal(
                "a message or a tool has JSON that is nested too deeply"
            ) from error
        return self._template.render(plain, described, now=now, speaks_next=speaks_next)

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a whole conversation that `text` rendered."""
        return self._control.encode(text)

    def stand_in(self, answer: Message, number: int) -> Message:
        """Return the placeholder of a sampled response in an outline."""
        mark = _mark(number)
        reasoning = None if answer.reasoning is None else _thought_mark(number)
        if not self._form.writes_calls(answer):
            return Message(role="assistant", content=mark, reasoning=reasoning)
        *others, last = answer.tool_calls
        calls = [replace(call, arguments="{}") for call in others]
        calls.append(replace(last, arguments=json.dumps({"value": mark})))
        return Message(role="assistant", tool_calls=tuple(calls), reasoning=reasoning)

    def bridge(
        self, outline: str, start: int, answer: Message, number: int, *, last_token: int | None
    ) -> tuple[int, ...] | None:
        """Tokens between a sampled response and the end of a prompt.

        None if the template does not write the response, or its thinking, after that prompt.
        `outline` is the whole conversation with placeholders. If `last_token`, the last one of the
        response, is not an end of turn (the response was cut off), the bridge begins with the end
        of the turn.
        """
        mark = _mark(number)
        at = outline.find(mark, start) if self._exact else -1
        thought = answer.reasoning is not None
        if at < 0 or (thought and outline.find(_thought_mark(number), start, at) < 0):
            return None
        calls = self._form.writes_calls(answer)
        end = self._end_of_calls if calls else self._end
        rest = outline[at + len(mark) :]
        if end is None:
            # Without an end mark the message could end anywhere behind its calls.
            return None if calls else self._control.encode(rest, after=self._control.anchor)
        between, found, behind = rest.partition(end.text)
        as_tried = self._control.all(between) == end.before and (calls or not between.strip())
        if not (found and as_tried):
            return None
        if last_token != end.token:
            # The model closed its calls itself; a line break before the end belongs to the
            # template.
            behind = end.text + behind if calls else rest
        return self._control.encode(behind, after=end.text)

    def probe_call(self) -> tuple[str, ToolCall]:
        """Render a call as the model should write it, to find its grammar.

        Returns the text without the end of the turn, and the call.
        """
        before, text = self._tried(_USER), self._tried(_USER, _CALLING, _RESULT)
        end = self._end_of_calls or self._end
        said = text[_shared_characters(before, text) :]
        if end is not None:
            said = said.partition(end.text)[0]
        # The prompt opens the thinking, and the template closes it before the call.
        opened = self.facts.opens_thinking and "</think>" in said
        return split_thinking(said, opened=opened)[1], _CALL

    # --- trying -----------------------------------------------------------------------------------

    def _tried(self, *messages: Message, tools: Sequence[Tool] = ()) -> str:
        """Render a conversation; empty if the template refuses it."""
        try:
            return self.text(messages, tools, now=SOME_DAY)
        except TemplateRefusal:
            return ""

    def _find_form(self) -> PlainForm:
        for calls in (*CALL_FORMS, None):
            self._form = PlainForm(calls=calls)
            texts = (self._tried(_USER, _CALLING), self._tried(_USER, _CALLING, _RESULT))
            if any("probe_key" in text for text in texts):
                break
        results = _RESULT.content in self._tried(_USER, _CALLING, _RESULT)
        self._form = replace(self._form, results=results)
        return replace(
            self._form,
            several_calls="second_name" in self._tried(_USER, _TWO_CALLS, _RESULT),
            tools=_TOOL.name in self._tried(_USER, tools=(_TOOL,)),
            system=_SYSTEM.content in self._tried(_SYSTEM, _USER),
        )

    def _find_end(self) -> _End | None:
        answer = Message(role="assistant", content=_mark(0))
        _, mark, rest = self._tried(_USER, answer, _AGAIN).partition(_mark(0))
        found = self._control.first(rest)
        if not mark or found is None or rest[: found.start()].strip():
            return None
        return self._end_named(found[0])

    def _find_end_of_calls(self) -> _End | None:
        if self._form.calls is None:
            return None
        call = replace(_CALL, arguments=json.dumps({"value": _mark(0)}))
        answer = replace(_CALLING, tool_calls=(call,))
        _, mark, rest = self._tried(_USER, answer, _RESULT).partition(_mark(0))
        between, result, _ = rest.partition(_RESULT.content)
        found = self._control.all(between)
        if not (mark and result and found):
            return None
        # A control token may also close a call; the end of other messages ends this one.
        usual = self._end is not None and self._end.text in found
        at = found.index(self._end.text) if self._end is not None and usual else 0
        return self._end_named(found[at], before=found[:at])

    def _end_named(self, text: str, before: tuple[str, ...] = ()) -> _End | None:
        token = self.codec.token(text)
        return None if token is None else _End(text, token, before)

    def _bridge_is_exact(self, answer: Message, following: Message) -> bool | None:
        """Return whether a bridge has the same tokens as the template's text; None without a
        bridge.
        """
        before, whole = self._tried(_USER), self._tried(_USER, answer, following)
        outline = self._tried(_USER, self.stand_in(answer, 0), following)
        if not (whole.startswith(before) and outline.startswith(before)):
            return None
        end = self._end_of_calls if self._form.writes_calls(answer) else self._end
        ended = None if end is None else end.token
        bridge = self.bridge(outline, len(before), answer, 0, last_token=ended)
        if not bridge:
            return None
        after = bridge if ended is None else (ended, *bridge)
        return self.encode(whole)[-len(after) :] == after


_WHOLE: Final = re.compile(r"<[^<>\s]{1,80}>|\[[^\[\]\s]{1,80}\]|\w+|.", re.DOTALL)


def _shared_characters(one: str, other: str) -> int:
    """Length of the common prefix of two texts, up to a whole tag or word of both."""
    pairs = zip(_WHOLE.finditer(one), _WHOLE.finditer(other), strict=False)
    same = takewhile(lambda pair: pair[0][0] == pair[1][0], pairs)
    return sum(len(piece[0]) for piece, _ in same)


def _mark(number: int) -> str:
    return f"@@answer{number}@@"


def _thought_mark(number: int) -> str:
    return f"@@thought{number}@@"
