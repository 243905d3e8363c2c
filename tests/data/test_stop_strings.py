"""Stop strings: found with the first token after which decoding everything finds one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_lab.data.stop_strings import StopScanner, check_stop_strings
from areal_lab.data.tokenize import TextCodec
from tests.data.byte_tokenizer import byte_tokenizer
from tests.data.test_tokenize import byte_fallback_tokenizer

PIECES = ("a", "b", "ab", "ba", " a", "\n", "\n\n", "bb\n", "é", "€", "😀", "<")
CUT = (b"\xe2", b"\x82\xac", b"\xf0\x9f", b"\x98", b"\x80", b"a\xe2", b"\x82", b"\xacb", b"\xff")
"""Tokens that begin or end inside a character, one that is never part of one among them."""
SPECIAL = "<end>"
UNKNOWN = 1000
"""A row of the output layer without a token."""


def codec_of_pieces() -> TextCodec:
    """One token for each piece of text or bytes, and a special one."""
    letters = _letter_of_byte()
    pieces = [*(piece.encode() for piece in PIECES), *CUT]
    vocabulary = {"".join(letters[b] for b in piece): index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return TextCodec(tokenizer)


def _letter_of_byte() -> dict[int, str]:
    """GPT-2's letter for each byte: printable ones are their own, the others follow from 256."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {byte: chr(byte) for byte in own}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


CODEC = codec_of_pieces()
END = len(PIECES) + len(CUT)
TOKENS = st.lists(st.integers(0, END) | st.just(UNKNOWN), max_size=40)
STOPS = st.lists(
    st.text("ab \né€😀", min_size=1, max_size=5) | st.just(f"a{SPECIAL}"), min_size=1, max_size=3
)


def decoding_everything(codec: TextCodec, stops: Sequence[str], tokens: Sequence[int]) -> int:
    """Tokens up to the end, by decoding every prefix; all tokens if no stop string appears."""
    for count in range(1, len(tokens) + 1):
        text = codec.decode_all(tokens[:count])
        if any(stop in text for stop in stops):
            return count
    return len(tokens)


def by_scanner(
    codec: TextCodec, stops: Sequence[str], tokens: Sequence[int], cuts: Sequence[int] = ()
) -> int:
    """The same by one scanner, whose tokens come in parts."""
    scanner = StopScanner(codec, stops)
    for start, end in pairwise([0, *sorted(cuts), len(tokens)]):
        index = scanner.completing(tokens[start:end])
        if index is not None:
            return start + index + 1
    return len(tokens)


@given(TOKENS, STOPS, st.lists(st.integers(0, 40), max_size=3))
def test_a_response_ends_where_decoding_everything_ends_it(
    tokens: list[int], stops: list[str], cuts: list[int]
) -> None:
    parts = [min(cut, len(tokens)) for cut in cuts]
    assert by_scanner(CODEC, stops, tokens, parts) == decoding_everything(CODEC, stops, tokens)


@given(TOKENS, STOPS, st.integers(0, 40))
def test_a_scanner_may_start_in_the_middle(tokens: list[int], stops: list[str], at: int) -> None:
    end = decoding_everything(CODEC, stops, tokens)
    start = min(at, max(end - 1, 0))
    index = StopScanner(CODEC, stops, tokens[:start]).completing(tokens[start:])
    assert (len(tokens) if index is None else start + index + 1) == end


@given(st.text("ab €😀\n", max_size=20), st.text("ab €😀\n", min_size=1, max_size=4))
def test_bytes_decoded_in_runs_end_it_there_too(text: str, stop: str) -> None:
    """Where one byte that is no character spoils all bytes around it."""
    codec, tokens = TextCodec(byte_fallback_tokenizer()), list[int]()
    for character in text:
        word = {" ": [1], "b": [3]}.get(character)
        tokens += word or [4 + byte for byte in character.encode()]
    assert by_scanner(codec, [stop], tokens) == decoding_everything(codec, [stop], tokens)


def test_a_string_may_be_spelled_byte_by_byte_between_tokens_without_text() -> None:
    codec = TextCodec(byte_tokenizer())
    spelled = codec.encode("a😀😀é")
    tokens = [token for byte in spelled for token in (byte, *[UNKNOWN] * 9)]
    end = tokens.index(spelled[-1], len(tokens) - 10) + 1
    assert by_scanner(codec, ["😀😀é"], tokens) == end
    assert decoding_everything(codec, ["😀😀é"], tokens) == end


class Counted(TextCodec):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode_all(self, tokens: Iterable[int]) -> str:
        listed = list(tokens)
        type(self).decoded += len(listed)
        return super().decode_all(listed)


def test_the_cost_of_a_token_does_not_depend_on_the_response() -> None:
    counts = []
    for length in (1000, 2000):
        Counted.decoded = 0
        scanner = StopScanner(Counted(CODEC._tokenizer), ["abba"])
        assert scanner.completing([0] * length) is None
        counts.append(Counted.decoded)
    assert counts[1] - counts[0] == 1000 * (len("abba") + 4)


def test_strings_that_no_text_can_have_are_refused() -> None:
    check_stop_strings(["a", " \n"])
    with pytest.raises(ValueError, match="a stop string is empty"):
        check_stop_strings(["a", ""])
    with pytest.raises(ValueError, match=r"has a replacement character \(U\+FFFD\)"):
        check_stop_strings(["a\ufffd"])
