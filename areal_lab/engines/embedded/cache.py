"""Keys and values of the running requests, one row each, kept compact.

    layer l:  [2, rows, kv_heads, capacity, head_dim]      rows 0 .. live - 1 are in use
                 k/v

Decoding reads the view `[:, :live, :, :longest]`. Rows and capacity grow in steps; the last row
moves into a freed one.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_ROW_STEP = 8
_TOKEN_STEP = 64


class KVCache:
    """Storage only: the batcher knows which request is in which row, and its length."""

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._empty = torch.empty(2, 0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self.layers: list[Float[Tensor, "2 R H C D"]] = [self._empty] * layers

    @property
    def rows(self) -> int:
        """Rows that fit without growing."""
        return self.layers[-1].shape[1]

    @property
    def capacity(self) -> int:
        """Tokens a row can hold without growing."""
        return self.layers[-1].shape[3]

    @property
    def size_bytes(self) -> int:
        """Memory held now."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Memory that keys and values of one token need."""
        _, _, kv_heads, _, head_dim = self._empty.shape
        return len(self.layers) * 2 * kv_heads * head_dim * self._empty.element_size()

    @torch.inference_mode()
    def reserve(self, rows: int, tokens: int, *, live: int, longest: int) -> None:
        """Make room for `rows` rows of `tokens` tokens; keeps `longest` tokens of `live` rows.

        Grows by at least a quarter, so the total cost of copying stays proportional to the tokens.
        After it failed for want of memory it can be called again: the last layer grows last.
        """
        if rows <= self.rows and tokens <= self.capacity:
            return
        if rows > self.rows:
            rows = _round_up(max(rows, self.rows + self.rows // 4), _ROW_STEP)
        if tokens > self.capacity:
            tokens = _round_up(max(tokens, self.capacity + self.capacity // 4), _TOKEN_STEP)
        rows, tokens = max(rows, self.rows), max(tokens, self.capacity)
        _, _, kv_heads, _, head_dim = self._empty.shape
        for index, old in enumerate(self.layers):
            # Layer by layer, so that old and new storage do not exist in full at the same time.
            if old.shape[1] == rows and old.shape[3] == tokens:
                continue
            # Zeros, since attention multiplies values beyond a row's end by a weight of 0.
            new = old.new_zeros(2, rows, kv_heads, tokens, head_dim)
            new[:, :live, :, :longest] = old[:, :live, :, :longest]
            self.layers[index] = new

    def release(self) -> None:
        """Release all memory; no row may be live."""
        self.layers = [self._empty] * len(self.layers)

    @torch.inference_mode()
    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of row `source` over row `target`."""
        for layer in self.layers:
            layer[:, target, :, :tokens] = layer[:, source, :, :tokens]

    @torch.inference_mode()
    def copy(self, row: int, tokens: int) -> list[Float[Tensor, "2 H T D"]]:
        """The first `tokens` of a row, by layer."""
        return [layer[:, row, :, :tokens].clone() for layer in self.layers]

    @torch.inference_mode()
    def restore(self, copied: list[Float[Tensor, "2 H T D"]], row: int, tokens: int) -> None:
        """Write the first `tokens` of what was copied to a row."""
        for layer, own in zip(self.layers, copied, strict=True):
            layer[:, row, :, :tokens] = own[:, :, :tokens]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
