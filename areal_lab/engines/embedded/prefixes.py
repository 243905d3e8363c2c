"""Prefixes that requests share: of running requests, by row, and of ended ones, in copies.

An agent's next turn repeats its conversation so far, so keys and values of ended requests are kept
until the next turn takes them, new weights come, or the memory is needed for later ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")
_BIG_ENDIAN = ">u4"


class Prefixes(Generic[T]):
    """Token sequences with what they belong to, in lexical order: the longest common prefix of a
    prompt is the one with a neighbor. Searching all of them took half of the time of a batch of
    1,000 prompts."""

    def __init__(self, entries: Iterable[tuple[np.ndarray, T]] = ()) -> None:
        """Start with these."""
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
        """Forget an entry."""
        at = self._of.index(of)
        del self._keys[at], self._of[at]

    def longest_of(self, tokens: np.ndarray) -> tuple[T | None, int]:
        """The entry with the longest common prefix, and its length: at most all tokens except the
        last, whose logits are needed."""
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
    """Keys and values of a request that has ended."""

    tokens: int
    layers: list[Float[Tensor, "2 H T D"]]

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)


class KeptPrefixes:
    """The last prefixes that fit into a limit of memory."""

    def __init__(self, most_bytes: int) -> None:
        """Keep nothing yet, and never more than this."""
        self._most_bytes = most_bytes
        self._by_age: list[KeptPrefix] = []
        self._prefixes: Prefixes[KeptPrefix] = Prefixes()
        self.size_bytes = 0
        """Memory held."""

    def longest_of(self, tokens: np.ndarray) -> tuple[KeptPrefix | None, int]:
        """The one with the longest common prefix, and its length, as `Prefixes.longest_of`."""
        return self._prefixes.longest_of(tokens)

    def add(
        self,
        tokens: np.ndarray,
        size_bytes: int,
        copy: Callable[[], list[Float[Tensor, "2 H T D"]]],
    ) -> None:
        """Keep these tokens, unless they alone exceed the limit; forgets the oldest ones before.

        Args:
            tokens: whose keys and values these are.
            size_bytes: of the copy.
            copy: called if they are kept, once there is room.
        """
        if size_bytes > self._most_bytes:
            return
        while self.size_bytes + size_bytes > self._most_bytes:
            self._forget(self._by_age[0])
        kept = KeptPrefix(len(tokens), copy())
        self._by_age.append(kept)
        self._prefixes.add(tokens, kept)
        self.size_bytes += kept.size_bytes

    def used(self, kept: KeptPrefix, tokens: int) -> None:
        """Forget a prefix that a request has copied in full: that request is kept, longer, when it
        ends, unless it is aborted.

        Args:
            kept: the prefix.
            tokens: how many of its tokens were copied; the last one may be missing, since the
                logits of a prompt's last token are needed.
        """
        if tokens >= kept.tokens - 1:
            self._forget(kept)

    def clear(self) -> None:
        """Forget all."""
        self._by_age, self._prefixes, self.size_bytes = [], Prefixes(), 0

    def _forget(self, kept: KeptPrefix) -> None:
        self._by_age.remove(kept)
        self._prefixes.remove(kept)
        self.size_bytes -= kept.size_bytes


def _in_order(tokens: np.ndarray) -> bytes:
    """Bytes with the order of the tokens."""
    return tokens.astype(_BIG_ENDIAN).tobytes()


def _common_tokens(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two keys, in tokens."""
    a, b = np.frombuffer(left, _BIG_ENDIAN), np.frombuffer(right, _BIG_ENDIAN)
    count = min(len(a), len(b))
    different = a[:count] != b[:count]
    return int(different.argmax()) if different.any() else count
