"""Contexts of ended sequences, which stay in an engine's cache until others need the room.

Those that were used last are kept longest, and lose their ends first (radix cache of SGLang, block
cache of vLLM). Running sequences always come first.
"""

from __future__ import annotations

from collections.abc import Hashable


class KeptContexts:
    """Tokens by key, in the order of their last use."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, int] = {}
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """In total."""
        return self._tokens

    def keep(self, key: Hashable, tokens: int, room: int) -> None:
        """Keep a context that was just used, and as much of older ones as fits.

        Args:
            room: tokens that running sequences leave free.
        """
        self._tokens += tokens - self._kept.pop(key, 0)
        self._kept[key] = tokens
        self.make_room(room)

    def find(self, key: Hashable, room: int) -> int:
        """Tokens that are left of a context."""
        self.make_room(room)
        return self._kept.get(key, 0)

    def forget(self, key: Hashable) -> None:
        """It belongs to a running sequence now."""
        self._tokens -= self._kept.pop(key, 0)

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self._tokens = 0

    def make_room(self, room: int) -> None:
        """Forget the oldest ones until the others fit."""
        while self._tokens > max(0, room):
            oldest = next(iter(self._kept))
            lost = min(self._tokens - max(0, room), self._kept[oldest])
            self._tokens -= lost
            self._kept[oldest] -= lost
            if not self._kept[oldest]:
                del self._kept[oldest]
