"""How many logits exist at a time while log-probs are computed from hidden states.

Standard library only, so that the estimate of memory (`resolve`) and the computation
(`functional.logprobs`) share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TILE_ENTRIES: Final = (1 << 22, 1 << 24)
"""Fewest and most logits of one tile on a CPU: 16 to 64 MiB in float32."""
_TILE_ENTRIES_GPU: Final = 1 << 26
"""The same on a GPU, where each tile costs a dozen launches."""
_CACHE_BYTES: Final = 96 << 20
"""Logits kept for the backward pass, at least."""
_TILE_AND_CACHE_BYTES: Final = 160 << 20
"""What a small tile leaves of this is kept, too."""


@dataclass(frozen=True, slots=True)
class LogitTiles:
    """Logits in memory."""

    entries: int
    """Of one tile."""
    cache_bytes: int
    """Largest size of those that are kept for the backward pass."""

    def bytes(self, tokens: int, vocab: int, number_bytes: int) -> int:
        """Bytes of one tile and of what is kept."""
        logits = number_bytes * tokens * vocab
        return min(number_bytes * self.entries, logits) + min(logits, self.cache_bytes)


def largest_tile(*, cpu: bool) -> int:
    """Most logits of one tile by default."""
    return _TILE_ENTRIES[1] if cpu else _TILE_ENTRIES_GPU


def logit_tiles(
    tokens: int,
    weight_numbers: int,
    number_bytes: int,
    *,
    cpu: bool,
    entries: int | None = None,
) -> LogitTiles:
    """The default sizes.

    Every row of tiles adds to the whole gradient of the weight: more tokens take larger tiles.

    Args:
        tokens: whose log-probs are computed.
        weight_numbers: of the output embedding, whose gradient exists anyway.
        number_bytes: of the type of the product.
        entries: size of a tile that is chosen otherwise.
    """
    if entries is None:
        entries = largest_tile(cpu=cpu)
        if cpu:
            entries = max(_TILE_ENTRIES[0], min(entries, 2048 * tokens))
    left = _TILE_AND_CACHE_BYTES - entries * number_bytes
    return LogitTiles(entries, max(weight_numbers * number_bytes // 2, _CACHE_BYTES, left))
