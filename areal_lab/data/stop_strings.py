"""Find the first token of a response with which a stop string is complete.

    tokens    " The", " an", "sw", "er", ": 4"        stop string "wer:"
    window              [ the last few tokens ]       decoded after each token: complete with ": 4"

The text is that of all tokens, special ones by their names. A window of tokens is decoded each
time, never the whole response: its size depends on the longest stop string only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lab.data.tokenize import TextCodec

_HALF_BYTES = 3
"""Bytes of a character that is not complete, at most."""
_CONTEXT_TOKENS = _HALF_BYTES + 1
"""Tokens decoded before those of a stop string: the rest of a character, and a token whose leading
space some vocabularies drop at the beginning of a text."""
_HALF = "\ufffd"
"""What bytes that are no character are decoded to."""


class StopScanner:
    """The stop strings of one response, whose tokens come one after the other."""

    def __init__(self, codec: TextCodec, stops: Sequence[str], before: Sequence[int] = ()) -> None:
        """Start at the beginning of a response, or after some of its tokens.

        Args:
            stops: not empty, as `check_stop_strings` wants them.
            before: tokens of the response so far, in which none is complete.
        """
        check_stop_strings(stops)
        self._codec = codec
        self._stops = tuple(stops)
        # A token has at least one byte of text.
        size = max(len(stop.encode()) for stop in stops) + _CONTEXT_TOKENS
        self._window: deque[int] = deque(filter(codec.has, before), maxlen=size)

    def completing(self, tokens: Sequence[int]) -> int | None:
        """Index of the first of the next tokens that completes a stop string; None if none does."""
        for index, token in enumerate(tokens):
            if not self._codec.has(token):
                continue  # it has no text, and would take a place in the window
            self._window.append(token)
            if self._is_complete():
                return index
        return None

    def _is_complete(self) -> bool:
        """Whether a stop string is in the text of the window."""
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
    """Check that every string can appear in a text.

    Raises:
        ValueError: naming the string.
    """
    for stop in stops:
        if not stop:
            raise ValueError("a stop string is empty, but must have a character")
        if _HALF in stop:
            raise ValueError(
                f"the stop string {stop!r} has a replacement character (U+FFFD), which stands for "
                "characters that are not complete; leave it out"
            )
