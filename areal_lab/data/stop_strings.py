"""Find the first token of a response that completes a stop string.

    tokens    " The", " an", "sw", "er", ": 4"        stop string "wer:"
    window              [ the last few tokens ]       decoded after each token: complete with ": 4"

The text is that of all tokens, special ones by their names. Only a window of tokens is decoded each
time, never the whole response: its size depends only on the longest stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lab.data.tokenize import TextCodec

MOST_STOPS = 256
MOST_STOP_BYTES = 1024
_HALF_BYTES = 3
"""Maximum bytes of an incomplete character."""
_CONTEXT_TOKENS = _HALF_BYTES + 1
"""Tokens decoded before those of a stop string: the rest of a character, and a token whose
leading space some vocabularies drop at the beginning of a text."""
_HALF = "\ufffd"
"""Replacement character of invalid bytes."""


class StopScanner:
    """Stop strings of one response, whose tokens arrive one by one."""

    def __init__(self, codec: TextCodec, stops: Sequence[str], before: Sequence[int] = ()) -> None:
        """Start at the beginning of a response, or after some of its tokens."""
        check_stop_strings(stops)
        self._codec = codec
        self._stops = tuple(stops)
        # A token has at least one byte of text.
        size = max(len(stop.encode()) for stop in stops) + _CONTEXT_TOKENS
        self._window: deque[int] = deque(filter(codec.has, before), maxlen=size)

    def completing(self, tokens: Sequence[int]) -> int | None:
        """Index of the first of the next tokens that completes a stop string; None without one."""
        for index, token in enumerate(tokens):
            if not self._codec.has(token):
                continue  # it has no text, and would take a place in the window
            self._window.append(token)
            if self._is_complete():
                return index
        return None

    def _is_complete(self) -> bool:
        """Return whether a stop string is in the text of the window."""
        tokens = list(self._window)
        for start in range(_HALF_BYTES + 1):
            text = self._codec.decode_all(tokens[start:])
            if any(stop in text for stop in self._stops):
                return True
            # With byte fallback (Llama 2), the rest of a character spoils all bytes behind it.
            if not text.startswith(_HALF):
                return False
        return False


def check_stop_strings(stops: Sequence[str]) -> None:
    """Check that every string can occur in a text, and that searching for all of them is fast."""
    if len(stops) > MOST_STOPS:
        raise ValueError(f"there are {len(stops)} stop strings, but at most {MOST_STOPS} may be")
    for stop in stops:
        if not stop:
            raise ValueError("a stop string is empty, but must have a character")
        if _HALF in stop:
            raise ValueError(
                f"the stop string {stop!r} has a replacement character (U+FFFD), which stands for "
                "characters that are not complete; leave it out"
            )
        try:
            size = len(stop.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"the stop string {stop!a:.80} has half of a surrogate pair, which is no "
                "character; leave it out"
            ) from None
        if size > MOST_STOP_BYTES:
            raise ValueError(
                f"the stop string {stop[:20]!r}... has {size} bytes, but at most "
                f"{MOST_STOP_BYTES} may be: as many tokens are decoded after each token"
            )
