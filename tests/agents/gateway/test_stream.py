"""Pieces of text: all of it, in order, with every token once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.gateway.stream import (
    PIECE_TOKENS,
    chunks,
    content_pieces,
    event,
    text_pieces,
)
from areal_lab.agents.messages import Message
from tests.agents.gateway.scripted import made, says

TEXTS = st.lists(st.sampled_from(["", "", "a", "of ", "\U0001f600", "\n\n", "\xe9", "word "]))


@given(TEXTS)
def test_pieces_follow_the_tokens_if_these_are_the_content(texts: list[str]) -> None:
    reply = says("".join(texts), texts=texts)
    pieces = content_pieces(reply)
    assert "".join(text for text, _ in pieces) == reply.message.content
    assert tuple(token for _, tokens in pieces for token in tokens) == reply.shown
    for text, tokens in pieces:
        assert text == "".join(each for each, _ in tokens)
        assert text or len(pieces) == 1
    for _, tokens in pieces[:-1]:
        assert len(tokens) >= PIECE_TOKENS


@given(st.text(min_size=1), TEXTS)
def test_other_content_is_cut_by_length_and_keeps_its_tokens(
    content: str, texts: list[str]
) -> None:
    reply = made(Message(role="assistant", content=content), texts=[*texts, "<tool_call>"])
    pieces = content_pieces(reply)
    assert "".join(text for text, _ in pieces) == content
    assert tuple(token for _, tokens in pieces for token in tokens) == reply.shown


def test_a_piece_waits_for_the_end_of_a_character() -> None:
    """Three tokens of an emoji: the text comes with the last of them."""
    texts = [*["x"] * (PIECE_TOKENS - 1), "", "", "\U0001f600", "y"]
    pieces = content_pieces(says("".join(texts), texts=texts))
    assert [text for text, _ in pieces] == ["x" * (PIECE_TOKENS - 1), "\U0001f600y"]
    inside = ["", *["x"] * PIECE_TOKENS]
    assert len(content_pieces(says("".join(inside), texts=inside))) == 2
    leading = [*[""] * PIECE_TOKENS, "\U0001f600"]
    assert len(content_pieces(says("".join(leading), texts=leading))) == 1


def test_nothing_has_no_pieces() -> None:
    assert content_pieces(says("")) == []
    assert list(text_pieces("")) == []


@given(st.text())
def test_events_are_ascii_and_one_line(text: str) -> None:
    line = event({"text": text}, "kind")
    assert line.isascii()
    assert line.count(b"\n") == 3
    assert len(line.decode().splitlines()) == 3


@given(st.lists(st.binary(min_size=1, max_size=9)), st.integers(1, 20))
def test_chunks_are_all_events_in_order(events: list[bytes], most_bytes: int) -> None:
    joined = list(chunks(iter(events), most_bytes=most_bytes))
    assert b"".join(joined) == b"".join(events)
    assert all(len(each) < most_bytes + 9 for each in joined)
