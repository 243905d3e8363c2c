"""Server-sent events, and text in pieces of a few tokens.

Everything is ASCII: clients never get half a character, and line readers never split at a character
that JSON allows unescaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from areal_lab.agents.messages import ChatReply

Shown: TypeAlias = tuple[tuple[str, float], ...]
"""Text and log-prob of tokens."""
Tops: TypeAlias = tuple[Shown, ...]
"""The most likely tokens at the place of each token."""

PIECE_TOKENS: Final = 8
"""An event costs a gateway about 50 microseconds; one per token would be most of its work."""
_PIECE_CHARACTERS: Final = 32

COMMENT: Final = b": waiting\n\n"
"""Event that every reader of such streams ignores."""
DONE: Final = b"data: [DONE]\n\n"


def event(data: object, name: str = "") -> bytes:
    """Encode one event with JSON data."""
    line = json.dumps(data, separators=(",", ":")).encode("ascii")
    head = f"event: {name}\n".encode("ascii") if name else b""
    return b"%bdata: %b\n\n" % (head, line)


def text_pieces(text: str) -> Iterator[str]:
    """Split text without tokens, such as arguments, into pieces."""
    for start in range(0, len(text), _PIECE_CHARACTERS):
        yield text[start : start + _PIECE_CHARACTERS]


def content_pieces(reply: ChatReply) -> list[tuple[str, Shown]]:
    """Split the content of a reply into pieces, each with its tokens.

    Pieces follow the tokens if the content is exactly their text. It is not if the message was
    parsed into calls, or stripped of spaces or thinking. Then all tokens belong to the first piece.
    """
    content, shown = reply.message.content, reply.shown
    if "".join([text for text, _ in shown]) != content:
        pieces: list[tuple[str, Shown]] = [(piece, ()) for piece in text_pieces(content)]
        if pieces and shown:
            pieces[0] = (pieces[0][0], shown)
        return pieces or ([("", shown)] if shown else [])
    found: list[tuple[str, Shown]] = []
    start, text = 0, ""
    for end, (more, _) in enumerate(shown, 1):
        text += more
        # A token inside a character has no text: its piece continues until the character is whole.
        if end - start >= PIECE_TOKENS and text:
            found.append((text, shown[start:end]))
            start, text = end, ""
    if text or not found:
        return [*found, (text, shown[start:])] if shown else found
    last, tokens = found[-1]
    return [*found[:-1], (last, tokens + shown[start:])]


def chunks(events: Iterator[bytes], *, most_bytes: int = 16_384) -> Iterator[bytes]:
    """Join events to writes of about this size; the answer is complete, so none has to wait."""
    parts: list[bytes] = []
    size = 0
    for each in events:
        parts.append(each)
        size += len(each)
        if size >= most_bytes:
            yield b"".join(parts)
            parts, size = [], 0
    if parts:
        yield b"".join(parts)


def logprob_entries(
    shown: Shown, top: Tops = (), *, with_bytes: bool = True
) -> list[dict[str, Any]]:
    """Log-probs in the form of both OpenAI protocols, with those of other tokens if given."""
    entries: list[dict[str, Any]] = []
    for place, (text, logprob) in enumerate(shown):
        others = logprob_entries(top[place], with_bytes=with_bytes) if top else []
        for other in others:
            del other["top_logprobs"]
        entry: dict[str, Any] = {"token": text, "logprob": logprob, "top_logprobs": others}
        if with_bytes:
            entry["bytes"] = list(text.encode("utf-8", "replace"))
        entries.append(entry)
    return entries
