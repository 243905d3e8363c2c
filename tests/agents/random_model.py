"""A model of random answers: cut off, aborted, under weights that change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.protocol import Generated, SamplingParams
from areal_lab.rewards.service import RewardOutcome
from tests.agents import smollm2

CALL = '<tool_call>{"name": "add", "arguments": { "b": 3,"a":2}}</tool_call>'
BAD_CALLS = ('<tool_call>{"name": "add", "argu', CALL.replace("add", "mul"), "<tool_call>{}")
OPENINGS = ("", "", "\n", " ", "<think>\nhm\n</think>\n\n", "hm\n</think>\n\n")


@dataclass
class RandomModel:
    """Samples the turns of one session, and remembers after which prompts."""

    form: ChatFormat
    rng: Random
    script: Sequence[str] = ()
    """Answers before the random ones; each ends with an end token, if there is room."""
    context_tokens: int = 100_000
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=120))
    longest_s: float = 4.0
    """Of a turn."""
    call: str = CALL
    """How it calls a tool."""
    version: int = 0
    """Of the weights; they change while it samples."""
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Prompts, by the names of their requests."""
    asked_with: list[SamplingParams] = field(default_factory=list)

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        number = len(self.asked)
        room = self.context_tokens - len(prompt_tokens)
        assert room > 0
        self.asked[f"r{number}"] = tuple(prompt_tokens)
        self.asked_with.append(sampling or self.sampling)
        before = self.version
        if self.longest_s:
            await asyncio.sleep(self.rng.uniform(0, self.longest_s))
        self.version += self.rng.random() < 0.4
        tokens, finish = self._sampled(number)
        limit = min(room, self.asked_with[number].max_new_tokens)
        if len(tokens) > limit:
            tokens, finish = tokens[:limit], "length"
        # The weights may have changed more than once, or again in the middle.
        cuts = sorted(self.rng.randint(0, len(tokens)) for _ in range(self.version - before))
        edges = [0, *cuts, len(tokens)]
        return Generated(
            request_id=f"r{number}",
            segments=tuple(
                Segment(
                    tuple(tokens[start:end]),
                    tuple(-self.rng.random() for _ in range(start, end)),
                    before + index,
                )
                for index, (start, end) in enumerate(pairwise(edges))
                if end > start
            ),
            finish_reason=finish,
            retractions=0,
            cached_tokens=0,
        )

    def _sampled(self, number: int) -> tuple[list[int], FinishReason]:
        encode, rng = self.form.codec.encode, self.rng
        end = list(self.form.end_tokens[:1])
        if number < len(self.script):
            return [*encode(self.script[number]), *end], "stop"
        tokens = list(encode(rng.choice(OPENINGS)))
        # Encoding their text again would often give other tokens.
        tokens += [rng.randrange(smollm2.VOCABULARY) for _ in range(rng.randint(0, 6))]
        if rng.random() < 0.5:
            texts = (*(self.call for _ in BAD_CALLS), *BAD_CALLS)
            tokens += encode("".join(rng.choices(texts, k=rng.randint(1, 2))))
        finish: FinishReason = rng.choice(("stop", "stop", "length", "abort"))
        return ([*tokens, *end] if finish == "stop" else tokens), finish

    # --- what else a workflow is given ---

    def give_up(self) -> None:
        """Its turns end by themselves."""

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        del begins
        return self.form.codec.encode(text)

    def plain(self, text: str, *, within: str = "") -> str:
        raise AssertionError(f"conversations are encoded by their format, and not {text}{within}")

    def decode(self, tokens: Sequence[int]) -> str:
        return self.form.codec.decode(tokens)

    async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
        raise AssertionError(f"the agent returns the reward itself, not for {completion} {data}")
