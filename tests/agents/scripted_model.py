"""A model that says what a script writes, in tokens of a real vocabulary.

    prompt tokens --read--> messages --script--> text --pieces--> tokens that no encoder chooses

What the script sees is decoded from the tokens of the prompt, so that a result of a tool which it
repeats has been there. A text is encoded in pieces of a few characters: decoding it and encoding
it again gives other tokens. Each sampled token has a log-prob of its own, by which it is found in
exported rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import SessionTree
from areal_lab.agents.workflow import TurnSampler
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.protocol import Generated, SamplingParams
from tests.agents.check_rows import check_rows

_TURN: Final = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
"""A message of ChatML."""


class Said(NamedTuple):
    """A message, as the model reads it."""

    role: str
    text: str


class Sampled(NamedTuple):
    """What the model says to a prompt."""

    tokens: Sequence[int]
    finish: FinishReason


Sample = Callable[[tuple[int, ...], SamplingParams], Awaitable[Sampled]]


@dataclass
class ScriptedModel:
    """The engines of one session (`sampler.TurnSampler`)."""

    sample: Sample
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=4096))
    context_tokens: int = 100_000
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request."""
    answers: dict[str, Generated] = field(default_factory=dict)

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        """See `TurnSampler.turn`; the weights change between turns, and within them."""
        assert len(prompt_tokens) < self.context_tokens, "there is no room for a token"
        how = sampling or self.sampling
        request_id = f"turn-{len(self.prompts)}"
        self.prompts[request_id] = tuple(prompt_tokens)
        tokens, finish = await self.sample(tuple(prompt_tokens), how)
        most = min(how.max_new_tokens, self.context_tokens - len(prompt_tokens))
        if len(tokens) > most:
            tokens, finish = tokens[:most], "length"
        version, half = len(self.answers) // 2, (len(tokens) + 1) // 2
        number = sum(len(tokens) for tokens in self._sampled())
        segments = []
        for place, part in enumerate((tokens[:half], tokens[half:])):
            logprobs = tuple(-1e-6 * (number + place * half + i) for i in range(len(part)))
            if part:
                segments.append(Segment(tuple(part), logprobs, version + place))
        self.answers[request_id] = Generated(
            request_id=request_id,
            segments=tuple(segments),
            finish_reason=finish,
            retractions=0,
            cached_tokens=0,
        )
        return self.answers[request_id]

    def _sampled(self) -> list[tuple[int, ...]]:
        return [part.tokens for answer in self.answers.values() for part in answer.segments]

    def conversation(
        self,
        form: ChatFormat,
        *,
        session: str = "s",
        grammar: str = "hermes",
        sampler: TurnSampler | None = None,
    ) -> TreeConversation:
        """The conversation of a session with this model."""
        return TreeConversation(
            SessionTree(form, now=datetime(2026, 3, 9, 12), session=session),
            ReplyReader(form, grammar=grammar, context_tokens=self.context_tokens),
            sampler or self,
            end_tokens=form.end_tokens,
        )

    def check(self, conversation: TreeConversation, rows: Sequence[dict[str, Any]]) -> None:
        """What was sampled is what is trained: every token once, behind its own prompt.

        Args:
            conversation: with this model.
            rows: its export, by branches.
        """
        turns = conversation.tree.turns
        names = [turn.generated.request_id for turn in turns]
        assert sorted(names) == sorted(self.prompts)
        check_rows(conversation.tree, [self.prompts[name] for name in names])
        sampled = Counter(
            one
            for answer in self.answers.values()
            for part in answer.segments
            for one in zip(part.tokens, part.logprobs, strict=True)
        )
        trained = Counter(
            one
            for row in rows
            for part in row["parts"]
            if "observation" not in part
            for one in zip(part["tokens"], part["logprobs"], strict=True)
        )
        assert trained == sampled
        assert max(sampled.values(), default=1) == 1


def writing(form: ChatFormat, script: Callable[[list[Said]], str]) -> Sample:
    """A model that says what a script writes to the messages of a prompt in ChatML."""
    (end,) = form.end_tokens

    async def sample(prompt: tuple[int, ...], _sampling: SamplingParams) -> Sampled:
        text = form.codec.decode_all(prompt)
        assert text.endswith("<|im_start|>assistant\n"), text[-100:]
        said = script([Said(*found) for found in _TURN.findall(text)])
        return Sampled((*in_pieces(form, said), end), "stop")

    return sample


def in_pieces(form: ChatFormat, text: str) -> list[int]:
    """Tokens of a text that its encoding does not have: it is cut into one and two
    characters."""
    tokens: list[int] = []
    for start in range(0, len(text), 3):
        tokens += form.codec.encode(text[start : start + 1])
        tokens += form.codec.encode(text[start + 1 : start + 3])
    assert form.codec.decode(tokens) == text
    assert len(text) < 4 or tokens != list(form.codec.encode(text)), text
    return tokens
