"""What a rollout generates with: one turn after another, on whatever engines are alive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from areal_lab.engines.protocol import Generated, SamplingParams


class TurnSampler(Protocol):
    """Samples the turns of one rollout.

    A call waits while engines are paused, and continues on another engine with the tokens so far if
    its own is lost: it fails only when the run ends.
    """

    @property
    def sampling(self) -> SamplingParams:
        """How the run samples; `max_new_tokens` is the most of one turn."""
        ...

    @property
    def context_tokens(self) -> int:
        """Most tokens of a prompt and its response together."""
        ...

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        """Sample the response to a prompt; concurrent calls are branches of the rollout.

        Args:
            prompt_tokens: the whole conversation so far.
            sampling: instead of the run's; its seed is ignored, each turn has one of its own.

        Raises:
            ValueError: the prompt leaves no room for a token.
        """
        ...
