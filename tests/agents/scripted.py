"""An engine that says what it is told, one byte per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lab.agents.control_text import control_text
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.protocol import Generated, SamplingParams
from areal_lab.rewards.service import RewardOutcome
from tests.data.byte_tokenizer import byte_tokenizer

CODEC = TextCodec(byte_tokenizer())


@dataclass
class Scripted:
    """The engine of one sample: its turns are the texts of a script, cut off at their limit."""

    script: Sequence[str]
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of completions; 0 of others."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=100))
    context_tokens: int = 1000
    stream: str = "train"
    group: int = 0
    prompts: list[str] = field(default_factory=list)
    """What each turn continued."""
    scored: list[str] = field(default_factory=list)
    given_up: bool = False

    def give_up(self) -> None:
        self.given_up = True

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        assert len(prompt_tokens) < self.context_tokens, "there is no room for a token"
        self.prompts.append(self.decode(prompt_tokens))
        limit = (sampling or self.sampling).max_new_tokens
        limit = min(limit, self.context_tokens - len(prompt_tokens))
        tokens = self.encode(self.script[len(self.prompts) - 1])
        reason: FinishReason = "stop" if len(tokens) <= limit else "length"
        tokens = tokens[:limit]
        version = len(self.prompts) // 2  # weights change between turns, and within them
        half = max(1, len(tokens) // 2)
        halves = [tokens[:half], tokens[half:]]
        return Generated(
            request_id=f"turn-{len(self.prompts)}",
            segments=tuple(
                Segment(part, (-0.5,) * len(part), version + place)
                for place, part in enumerate(halves)
                if part
            ),
            finish_reason=reason,
            retractions=0,
            cached_tokens=0,
        )

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        return control_text(CODEC).encode(text, begins=begins)

    def plain(self, text: str, *, within: str = "") -> str:
        return str(control_text(CODEC, within).plain(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return CODEC.decode(tokens)

    async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
        del data
        self.scored.append(completion)
        return RewardOutcome("ok", self.rewards.get(completion, 0.0))
