"""A part of every packed row, where several processes divide its tokens among them.

    tokens [P] --own--> [p]    all of a layer but attention, and the output layer
    heads, tokens of this rank --to_heads--> its heads, all tokens --to_tokens--> back

Rows are padded to a multiple of the processes: P' tokens, p = P' / count of them here. Padding is
in no tree: nothing attends to it. `H` heads, `D` head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """Which part is here, and how the processes that have the others are reached.

    All of them compute the same loss from what they have gathered, and the gradients of what one
    gave to the others are summed: each parameter gets `count` times its gradient, over all of them.
    """

    rank: int = 0
    count: int = 1
    exchange: Callable[[Tensor], Tensor] = _same
    """Send the i-th piece along the first axis to process i; what came from process i is the i-th
    piece. Differentiable."""

    def own(self, values: Shaped[Tensor, " N"]) -> Shaped[Tensor, " n"]:
        """This part of values of the whole row, padded with zeros to equal parts."""
        if self.count == 1:
            return values
        padded = functional.pad(values, (0, -len(values) % self.count))
        return padded.chunk(self.count)[self.rank]

    def gather(self, values: Shaped[Tensor, "n *rest"]) -> Shaped[Tensor, "N *rest"]:
        """The values of all processes, one after the other, on each of them; padded."""
        if self.count == 1:
            return values
        return self.exchange(values.expand(self.count, *values.shape)).flatten(0, 1)

    def to_heads(
        self, query: Float[Tensor, "1 H p D"], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all tokens, of this process's share of the heads.

        Key heads are repeated where there are too few for a share of them. One exchange for all.

        Args:
            key: (1, K, p, D); K divides H, and `count` does.
            value: (1, K, p, D).

        Returns:
            (1, H / count, P', D), and keys and values with heads that divide these.
        """
        times = self._repeats(query.shape[1], key.shape[1])
        repeated = (x if times == 1 else x.repeat_interleave(times, dim=1) for x in (key, value))
        pieces = [x[0].unflatten(0, (self.count, -1)) for x in (query, *repeated)]
        received = self.exchange(torch.cat(pieces, dim=1))
        rows = received.transpose(0, 1).flatten(1, 2)[None]
        q, k, v = rows.split([piece.shape[1] for piece in pieces], dim=1)
        return q, k, v

    def to_tokens(self, output: Float[Tensor, "1 h P D"]) -> Float[Tensor, "1 H p D"]:
        """Inverse of `to_heads`, for the output of attention, padded."""
        pieces = output[0].unflatten(1, (self.count, -1)).transpose(0, 1)
        return self.exchange(pieces).flatten(0, 1)[None]

    def _repeats(self, heads: int, key_heads: int) -> int:
        """Fewest copies of each key head that are shared evenly."""
        times = self.count // math.gcd(self.count, key_heads)
        assert heads % self.count == 0, (heads, self.count)
        # Whole groups of queries remain, because both K and the processes divide H.
        return times


WHOLE: Final = SequencePart()
"""One process has all tokens."""
