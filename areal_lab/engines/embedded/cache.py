"""Keys and values of the running requests, one row each, and the prefixes that requests share.

Prefixes that requests share: of running requests, by row, and of ended ones, in copies.

An agent's next turn repeats its conversation so far, so keys and values of ended requests are kept
until the next turn takes them, new weights come, or the memory is needed for later ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_ROW_STEP = 8
_TOKEN_STEP = 64
_IDLE_BYTES = 1 << 28
"""An empty cache larger than this is released."""


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """The first `tokens` of row `source` are also those of rows `first` .. `last` (included)."""

    source: int
    first: int
    last: int
    tokens: int


class Cache(Protocol):
    """Keys and values of rows: `KVCache`, or `pages.PagedCache`, which has a limit."""

    @property
    def size_bytes(self) -> int:
        """Memory of keys and values."""
        ...

    @property
    def token_bytes(self) -> int:
        """Memory that keys and values of one token need."""
        ...

    @property
    def limit_bytes(self) -> int | None:
        """Most memory that it takes; None without a limit."""
        ...

    @property
    def most_tokens(self) -> int | None:
        """Longest row that fits if it is alone; None without a limit."""
        ...

    def admit(
        self, tokens: int, *, shared: int, source: int | None, kept: Any | None, spare: int
    ) -> bool:
        """Add a row for `tokens` tokens, the first `shared` of which are those of row `source` or
        of something kept; False, without a change, if then some of `spare` requests could not get
        more room.
        """
        ...

    def can_split(self, requests: int) -> bool:
        """Return whether this number of requests can leave the rows they share."""
        ...

    def extend(self, lengths: Sequence[int]) -> bool:
        """Make room for one more token in each row of these lengths; False if that takes more than
        the limit.
        """
        ...

    def reserve(self, rows: int, tokens: int, *, live: int, longest: int) -> None:
        """Allocate the memory of `rows` rows of `tokens` tokens; keeps `longest` tokens of `live`
        rows. It can be called again after it ran out of memory.
        """
        ...

    def fan_out(self, copies: Iterable[PrefixCopy]) -> None:
        """Give rows the first tokens of other rows."""
        ...

    def remove(self, row: int, last: int, tokens: int) -> None:
        """End a row; row `last`, of `tokens` tokens, takes its place."""
        ...

    def keep(self, row: int, tokens: int) -> Any:
        """Keep the first tokens of a row after its end, until `drop`."""
        ...

    def restore(self, kept: Any, row: int, tokens: int) -> None:
        """Give a row the first `tokens` kept tokens."""
        ...

    def drop(self, kept: Any) -> None:
        """Free something kept."""
        ...

    def retract(self) -> None:
        """Remove all rows."""
        ...

    def clear(self) -> None:
        """Remove all rows and what is kept."""
        ...

    def idle(self) -> None:
        """Free memory that is large and not needed without rows."""
        ...

    def release(self) -> None:
        """Free all memory."""
        ...


class KVCache:
    """Storage only: the batcher knows which request is in which row, and its length."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
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

    @property
    def limit_bytes(self) -> None:
        """No limit."""

    @property
    def most_tokens(self) -> None:
        """No limit."""

    @torch.inference_mode()
    def reserve(self, rows: int, tokens: int, *, live: int, longest: int) -> None:
        """Make room for `rows` rows of `tokens` tokens; keeps `longest` tokens of `live` rows.

        Grows by at least a quarter, so the total cost of copying stays proportional to the tokens.
        It can be called again after it ran out of memory: the last layer grows last.
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
            # Layer by layer, so old and new storage are never both complete.
            if old.shape[1] == rows and old.shape[3] == tokens:
                continue
            # Zeros, since attention multiplies values beyond a row's end by a weight of 0.
            new = old.new_zeros(2, rows, kv_heads, tokens, head_dim)
            new[:, :live, :, :longest] = old[:, :live, :, :longest]
            self.layers[index] = new

    def admit(
        self,
        tokens: int,  # noqa: ARG002 - rows have no limit here
        *,
        shared: int,  # noqa: ARG002 - as `tokens`
        source: int | None,  # noqa: ARG002 - as `tokens`
        kept: Any | None,  # noqa: ARG002 - as `tokens`
        spare: int,  # noqa: ARG002 - as `tokens`
    ) -> bool:
        """There is room for every row: `reserve` makes it."""
        return True

    def can_split(self, requests: int) -> bool:  # noqa: ARG002 - no limit
        """There is room for every row: `reserve` makes it."""
        return True

    def extend(self, lengths: Sequence[int]) -> bool:  # noqa: ARG002 - no limit
        """There is room for every token: `reserve` makes it."""
        return True

    def retract(self) -> None:
        """Nothing to do: a row has no memory but its place."""

    def drop(self, kept: list[Float[Tensor, "2 H T D"]]) -> None:
        """Nothing to do: a copy is freed with its last reference."""

    def release(self) -> None:
        """Release all memory; no row may be live."""
        self.layers = [self._empty] * len(self.layers)

    def clear(self) -> None:
        """As `release`, so that nothing of a failed step is left."""
        self.release()

    def idle(self) -> None:
        """Release an empty cache that is large."""
        if self.size_bytes > _IDLE_BYTES:
            self.release()

    def remove(self, row: int, last: int, tokens: int) -> None:
        """End a row; row `last`, of `tokens` tokens, takes its place."""
        if row != last:
            self.move(last, row, tokens)

    def keep(self, row: int, tokens: int) -> list[Float[Tensor, "2 H T D"]]:
        """Copy the first tokens of a row."""
        return self.copy(row, tokens)

    @torch.inference_mode()
    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of row `source` over row `target`."""
        for layer in self.layers:
            layer[:, target, :, :tokens] = layer[:, source, :, :tokens]

    @torch.inference_mode()
    def fan_out(self, copies: Iterable[PrefixCopy]) -> None:
        """Copy the first tokens of rows over other rows."""
        for layer in self.layers:
            for one in copies:
                target = layer[:, one.first : one.last + 1, :, : one.tokens]
                target.copy_(layer[:, one.source, :, : one.tokens].unsqueeze(1))

    @torch.inference_mode()
    def copy(self, row: int, tokens: int) -> list[Float[Tensor, "2 H T D"]]:
        """The first `tokens` of a row, by layer."""
        return [layer[:, row, :, :tokens].clone() for layer in self.layers]

    @torch.inference_mode()
    def restore(self, copied: list[Float[Tensor, "2 H T D"]], row: int, tokens: int) -> None:
        """Write the first `tokens` copied tokens to a row."""
        for layer, own in zip(self.layers, copied, strict=True):
            layer[:, row, :, :tokens] = own[:, :, :tokens]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


T = TypeVar("T")
_BIG_ENDIAN = ">u4"


class Prefixes(Generic[T]):
    """Token sequences with their owners, in lexical order: the longest common prefix of a prompt
    is with a neighbor. Searching all sequences took half of the time of a batch of 1,000
    prompts.
    """

    def __init__(self, entries: Iterable[tuple[np.ndarray, T]] = ()) -> None:
        """Start with these entries."""
        ordered = sorted(((_in_order(tokens), of) for tokens, of in entries), key=lambda e: e[0])
        self._keys = [key for key, _ in ordered]
        self._of = [of for _, of in ordered]

    def add(self, tokens: np.ndarray, of: T) -> None:
        """Let others share these tokens."""
        key = _in_order(tokens)
        at = bisect_right(self._keys, key)
        self._keys.insert(at, key)
        self._of.insert(at, of)

    def remove(self, of: T) -> None:
        """Remove an entry."""
        at = self._of.index(of)
        del self._keys[at], self._of[at]

    def longest_of(self, tokens: np.ndarray) -> tuple[T | None, int]:
        """Entry with the longest common prefix, and its length: at most all tokens except the
        last, whose logits are needed.
        """
        if not self._keys:
            return None, 0
        key = _in_order(tokens)
        at = bisect_right(self._keys, key)
        best: T | None = None
        shared = 0
        for neighbor in range(max(0, at - 1), min(len(self._keys), at + 1)):
            length = min(_common_tokens(self._keys[neighbor], key), len(tokens) - 1)
            if length > shared:
                best, shared = self._of[neighbor], length
        return best, shared


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """Keys and values of an ended request."""

    tokens: int
    size_bytes: int
    content: Any
    """What `Cache.keep` returned."""


class KeptPrefixes:
    """The newest prefixes within a memory limit."""

    def __init__(self, most_bytes: int, drop: Callable[[Any], None] | None = None) -> None:
        """Start empty, with this memory limit; `drop` gets the content of forgotten prefixes."""
        self._most_bytes = most_bytes
        self._drop = drop
        self._by_age: list[KeptPrefix] = []
        self._prefixes: Prefixes[KeptPrefix] = Prefixes()
        self.size_bytes = 0
        """Memory of the kept prefixes."""

    def longest_of(self, tokens: np.ndarray) -> tuple[KeptPrefix | None, int]:
        """Prefix with the longest common prefix, and its length, as `Prefixes.longest_of`."""
        return self._prefixes.longest_of(tokens)

    def add(
        self,
        tokens: np.ndarray,
        size_bytes: int,
        copy: Callable[[], Any],
    ) -> None:
        """Keep these tokens, unless they alone exceed the limit; drops the oldest ones before."""
        if size_bytes > self._most_bytes:
            return
        while self.size_bytes + size_bytes > self._most_bytes:
            self.forget(self._by_age[0])
        kept = KeptPrefix(len(tokens), size_bytes, copy())
        self._by_age.append(kept)
        self._prefixes.add(tokens, kept)
        self.size_bytes += kept.size_bytes

    def used(self, kept: KeptPrefix, tokens: int) -> None:
        """Drop a prefix that a request has copied in full: that request is kept, longer, when it
        ends, unless it is aborted.

        The last of the copied `tokens` may be missing, because the logits of a prompt's last token
        are needed.
        """
        if tokens >= kept.tokens - 1:
            self.forget(kept)

    def make_room(self, needed: KeptPrefix | None = None) -> bool:
        """Drop the oldest prefix other than `needed`; False if no other is left."""
        oldest = next((kept for kept in self._by_age if kept is not needed), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None

    def clear(self) -> None:
        """Drop all prefixes."""
        while self._by_age:
            self.forget(self._by_age[-1])

    def forget(self, kept: KeptPrefix) -> None:
        """Drop this prefix."""
        self._by_age.remove(kept)
        self._prefixes.remove(kept)
        self.size_bytes -= kept.size_bytes
        if self._drop is not None:
            self._drop(kept.content)


def _in_order(tokens: np.ndarray) -> bytes:
    """Bytes that sort like the tokens."""
    return tokens.astype(_BIG_ENDIAN).tobytes()


def _common_tokens(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two keys, in tokens."""
    a, b = np.frombuffer(left, _BIG_ENDIAN), np.frombuffer(right, _BIG_ENDIAN)
    count = min(len(a), len(b))
    different = a[:count] != b[:count]
    return int(different.argmax()) if different.any() else count
