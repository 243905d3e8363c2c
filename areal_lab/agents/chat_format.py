"""How a model writes conversations: what its template and its vocabulary do, found by trying.

    prompt | sampled answer <end of turn> | what the template puts between, and the next messages
                                          '------------------ bridge -----------------------'

Sampled tokens are never encoded again: a prompt that continues a conversation is the prompt before,
the sampled tokens and a bridge. The bridge comes out of an outline of the conversation: its text
with a stand-in for every sampled answer, in which the place where an answer ended can be found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from os.path import commonprefix
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
from areal_lab.agents.template import ChatTemplate, TemplateRefusal
from areal_lab.data.tokenize import TextCodec

_SOME_DAY: Final = datetime(2026, 1, 1)
_SYSTEM: Final = Message(role="system", content="probe_system")
_USER: Final = Message(role="user", content="What is it?")
_AGAIN: Final = Message(role="user", content="And this?")
_ANSWER: Final = Message(role="assistant", content="fine")
_THOUGHT: Final = "probe_thought"
_THOUGHTFUL: Final = replace(_ANSWER, reasoning=_THOUGHT)
_TOOL: Final = Tool(name="probe_name", description="probe", parameters={"type": "object"})
_CALL: Final = ToolCall(call_id="call00000", name="probe_name", arguments='{"probe_key": "p"}')
"""Mistral's templates refuse ids that have not nine letters and digits."""
_CALLING: Final = Message(role="assistant", tool_calls=(_CALL,))
_TWO_CALLS: Final = replace(
    _CALLING, tool_calls=(_CALL, replace(_CALL, call_id="call00001", name="second_name"))
)
_RESULT: Final = Message(role="tool", content="probe_result", call_id=_CALL.call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatFacts:
    """What was found out about a template and a vocabulary."""

    bridges_to_user: bool
    """Whether the text before is left as it is when the user speaks again, so that the prompt can
    continue sampled tokens. Otherwise it is encoded from text."""
    bridges_to_results: bool
    """The same when a tool has answered."""
    form: PlainForm
    """What the template can write, and what has to be text."""
    thinking: bool
    """Whether the template knows `<think>`: a text before the answer that clients do not send."""
    opens_thinking: bool
    """Whether the prompt ends with `<think>`, so that the model begins inside."""
    keeps_thinking: bool
    """Whether thinking stays in the text after the user has spoken again."""


@dataclass(frozen=True, slots=True)
class _End:
    """How the template ends a message of the assistant."""

    text: str
    token: int
    before: tuple[str, ...] = ()
    """Control tokens between what stands in for the message and its end."""


class ChatFormat:
    """Renders and encodes conversations for one model."""

    def __init__(
        self, template: ChatTemplate, codec: TextCodec, *, describe_tools: bool = True
    ) -> None:
        """Try out a template.

        Args:
            template: of the model.
            codec: its vocabulary.
            describe_tools: whether tools are described in the system message if the template
                ignores them. False leaves that to the agent's own prompt.

        Raises:
            ValueError: in one line, if the template refuses a question of the user.
        """
        self.codec = codec
        self._template = template
        self._describe_tools = describe_tools
        self._control = ControlText(codec, template.source)
        self._form = PlainForm()
        self._end: _End | None = None
        self._end_of_calls: _End | None = None
        self._exact = True
        prompt = self.text([_USER], now=_SOME_DAY)
        self._form = self._find_form()
        self._end = self._find_end()
        self._end_of_calls = self._find_end_of_calls()
        calling = (_CALLING, replace(_CALLING, reasoning=_THOUGHT))
        to_user = [self._bridge_is_exact(a, _AGAIN) for a in (_ANSWER, _THOUGHTFUL, *calling)]
        to_results = [self._bridge_is_exact(answer, _RESULT) for answer in calling]
        self._exact = False not in to_user + to_results
        self.facts = FormatFacts(
            bridges_to_user=self._exact and True in to_user,
            bridges_to_results=self._exact and True in to_results,
            form=self._form,
            thinking="</think>" in template.source or _THOUGHT in self._tried(_USER, _THOUGHTFUL),
            opens_thinking=prompt.rstrip().endswith("<think>"),
            keeps_thinking=_THOUGHT in self._tried(_USER, _THOUGHTFUL, _AGAIN),
        )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a message of the assistant; sampling has to stop at them."""
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
        """The text of a conversation, up to where the assistant begins to speak; for `encode`.

        Args:
            messages: in order, system messages included.
            tools: functions that the model may call.
            now: what the template takes for the present.
            speaks_next: False leaves out what begins the next message of the assistant.

        Raises:
            TemplateRefusal: the template refuses the conversation.
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
        """Tokens of a whole conversation that `text` made."""
        return self._control.encode(text)

    def stand_in(self, answer: Message, number: int) -> Message:
        """What stands for a sampled answer in an outline.

        Args:
            answer: as it was shown.
            number: of the answer; another one for each answer of a conversation.
        """
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
        """Tokens between a sampled answer and the end of a prompt.

        Args:
            outline: text of the whole conversation, with stand-ins for its sampled answers.
            start: characters of the prompt that the answer was sampled for.
            answer: as it was shown.
            number: of its stand-in.
            last_token: last sampled token of the answer; None if there is none. If it is not the
                end of the turn, because the answer was cut off, the bridge begins with this end.

        Returns:
            None if the template does not write the answer, or its thinking, after that prompt.
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
            # Without a mark at its end, the message could end anywhere behind its calls.
            return None if calls else self._control.encode(rest, after=self._control.anchor)
        between, found, behind = rest.partition(end.text)
        as_tried = self._control.all(between) == end.before and (calls or not between.strip())
        if not (found and as_tried):
            return None
        if last_token != end.token:
            # The model closed its calls itself; a line break before the end is the template's.
            behind = end.text + behind if calls else rest
        return self._control.encode(behind, after=end.text)

    def probe_call(self) -> tuple[str, ToolCall]:
        """A call as the model is expected to write it, by which its grammar is found.

        Returns:
            Its text, without the end of the turn, and the call.
        """
        before, text = self._tried(_USER), self._tried(_USER, _CALLING, _RESULT)
        end = self._end_of_calls or self._end
        said = text[len(commonprefix([before, text])) :]  # noqa: RUF071 - of characters, as meant
        return said if end is None else said.partition(end.text)[0], _CALL

    # --- trying -----------------------------------------------------------------------------------

    def _tried(self, *messages: Message, tools: Sequence[Tool] = ()) -> str:
        """The text of a conversation; empty if the template refuses it."""
        try:
            return self.text(messages, tools, now=_SOME_DAY)
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
        # What closes a call may be a control token, too; what ends other messages ends this one.
        usual = self._end is not None and self._end.text in found
        at = found.index(self._end.text) if self._end is not None and usual else 0
        return self._end_named(found[at], before=found[:at])

    def _end_named(self, text: str, before: tuple[str, ...] = ()) -> _End | None:
        token = self.codec.token(text)
        return None if token is None else _End(text, token, before)

    def _bridge_is_exact(self, answer: Message, following: Message) -> bool | None:
        """Whether a bridge has the tokens that the template's text has; None if there is none."""
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


def _mark(number: int) -> str:
    return f"@@answer{number}@@"


def _thought_mark(number: int) -> str:
    return f"@@thought{number}@@"
