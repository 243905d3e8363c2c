"""Text to tokens and back, and stop strings as tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, processors

from areal_lab.agents.control_text import control_text
from areal_lab.data.images import encode_prompt
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.wrapping import Wrapping
from tests.data.byte_tokenizer import BEGIN, END, byte_tokenizer, save_byte_tokenizer

texts = st.text(st.characters(codec="utf-8"), max_size=30).filter(lambda text: "<" not in text)


@given(texts)
def test_decode_undoes_encode(text: str) -> None:
    codec = TextCodec(byte_tokenizer())
    assert codec.decode(codec.encode(text)) == text
    assert len(codec.encode(text)) == len(text.encode())


multibyte = st.text("aé€😀ॐ\u200d\ufffd \n", max_size=12)


def byte_fallback_tokenizer() -> Tokenizer:
    """Words with a leading space, and bytes for other characters, as Llama 2 has them."""
    pieces = ["<unk>", "\u2581", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def assert_texts_grow_token_by_token(
    codec: TextCodec, tokens: tuple[int, ...], *, final: bool = True
) -> None:
    """`final` says that later tokens never change the text of earlier ones."""
    text = codec.decode(tokens)
    added = codec.characters(tokens, text)
    assert added is not None
    assert sum(added) == len(text)
    assert len(added) == len(tokens)
    assert min(added, default=0) >= 0
    for count in range(len(tokens) if final else 0):
        so_far = text[: sum(added[:count])]
        # Nothing is said before its bytes are there.
        assert codec.decode(tokens[:count]).startswith(so_far)


@given(multibyte)
def test_the_last_byte_of_a_character_adds_it(text: str) -> None:
    codec = TextCodec(byte_tokenizer())
    tokens = codec.encode(text)
    assert_texts_grow_token_by_token(codec, tokens)
    if "\ufffd" not in text:  # which looks like a character that is not complete yet
        expected = [n for c in text for n in [0] * (len(c.encode()) - 1) + [1]]
        assert list(codec.characters(tokens, text) or ()) == expected


@given(multibyte, st.integers(1, 3))
def test_a_character_that_was_cut_off_belongs_to_the_last_token(text: str, cut: int) -> None:
    codec = TextCodec(byte_tokenizer())
    tokens = codec.encode(text + "😀")[:-cut]
    assert_texts_grow_token_by_token(codec, tokens)
    added = codec.characters(tokens, codec.decode(tokens))
    assert added is not None
    assert added[-1] > 0


BYTES = st.sampled_from([0xE2, 0x82, 0xAC, 0x20, 0x61, 0xF0, 0x9F]) | st.integers(0, 255)


@given(st.lists(st.integers(0, 257), max_size=10), st.lists(BYTES, max_size=10))
def test_bytes_that_are_no_characters_have_a_place_too(ids: list[int], values: list[int]) -> None:
    assert_texts_grow_token_by_token(TextCodec(byte_tokenizer()), tuple(ids))
    # This one decodes a whole run of bytes at once: as text, or as one mark a byte.
    of_words = TextCodec(byte_fallback_tokenizer())
    assert_texts_grow_token_by_token(of_words, tuple(4 + value for value in values), final=False)


def test_the_text_of_other_tokens_is_refused() -> None:
    codec = TextCodec(byte_tokenizer())
    assert codec.characters(codec.encode("abc"), "abx") is None
    assert codec.characters((), "a") is None
    assert codec.characters((), "") == ()
    assert codec.characters((END, END), "") == (0, 0)


def test_special_tokens_are_the_models_own_and_never_text() -> None:
    codec = TextCodec(byte_tokenizer(begins=True))
    tokens = codec.encode("12")
    assert tokens[0] == BEGIN
    assert codec.decode((*tokens, END)) == "12"
    assert codec.vocabulary == 258


def test_many_texts_are_encoded_as_one_is() -> None:
    codec = TextCodec(byte_tokenizer(begins=True))
    texts = ["2 + 3 =", "", "é"]
    assert codec.encode_all(texts) == [codec.encode(text) for text in texts]


def test_a_prompt_has_one_begin_of_text_whoever_writes_it() -> None:
    added, plain = byte_tokenizer(begins=True), byte_tokenizer()
    ended = byte_tokenizer()
    ended.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", BEGIN), ("<end>", END)]
    )
    two = byte_tokenizer()
    two.post_processor = processors.TemplateProcessing(
        single="<begin> <end> $A", special_tokens=[("<begin>", BEGIN), ("<end>", END)]
    )
    for tokenizer, text, begins in (
        (added, "ab", [BEGIN]),
        (added, "<begin>ab", [BEGIN]),
        (added, "<begin><begin>ab", [BEGIN, BEGIN]),  # the text has two
        (added, " <begin>ab", [BEGIN, *plain.encode(" ").ids, BEGIN]),
        (plain, "ab", []),
        (plain, "<begin>ab", [BEGIN]),
        (ended, "ab", [BEGIN]),  # a response follows, so that nothing has ended
        (ended, "<begin>ab", [BEGIN]),
        (two, "<begin><end>ab", [BEGIN, END]),
        (two, "<begin>ab", [BEGIN, END, BEGIN]),
    ):
        codec = TextCodec(tokenizer)
        expected = (*begins, *plain.encode("ab").ids)
        assert codec.encode(text) == codec.encode_all([text])[0] == expected, text
        assert encode_prompt(codec, None, text).tokens == expected
        if text in ("ab", "<begin>ab"):  # a chat template writes its own, or none
            written = tuple(plain.encode(text).ids)
            assert encode_prompt(codec, None, text, begins=False).tokens == written
        assert control_text(codec).encode(text, begins=True) == expected
        said = (*plain.encode("c").ids, END)
        for response in ("c", "c<end>"):
            rule = Wrapping(end_token=END)
            assert rule.tokens(codec, text, response) == (*expected, *said)
        around = Wrapping(prefix=text.removesuffix("ab"), end_token=END)
        assert around.tokens(codec, "ab", "c") == (*expected, *said)


def test_truncation_and_padding_of_a_saved_tokenizer_are_dropped() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert len(TextCodec(tokenizer).encode("2 + 3 =")) == 7


def test_a_stop_string_that_is_one_token_becomes_it() -> None:
    codec = TextCodec(byte_tokenizer(begins=True))
    line_break = codec.encode("\n")[1:]
    assert codec.stops(["\n", "<end>"]) == ((*line_break, END), ())
    assert codec.stops(["ab", "\n", "é"]) == (line_break, ("ab", "é"))


def test_special_tokens_have_names_where_nothing_is_left_out() -> None:
    codec = TextCodec(byte_tokenizer())
    assert codec.decode_all((*codec.encode("a"), END, *codec.encode("b"))) == "a<end>b"
    assert [codec.has(token) for token in (0, END, END + 1)] == [True, True, False]


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    assert TextCodec.load(tmp_path).encode("7") == TextCodec(byte_tokenizer()).encode("7")


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    rows = TextCodec.load(tmp_path).vocabulary
    for more in (1, 0):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": rows + more}))
        assert TextCodec.load(tmp_path).encode("a") == TextCodec(byte_tokenizer()).encode("a")
    (token,) = TextCodec(byte_tokenizer()).encode("a")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": token}))
    assert TextCodec.load(tmp_path).encode("") == ()
    with pytest.raises(ValueError, match=rf"has 'a' as token {token}, but the model has {token} "):
        TextCodec.load(tmp_path).encode("a")


def test_a_folder_without_a_tokenizer_is_refused_with_a_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json; make one"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        TextCodec.load(tmp_path)


def test_data_and_resolve_load_no_torch() -> None:
    modules = (
        "areal_lab.data.sources, areal_lab.data.tokenize, areal_lab.resolve.check, "
        "areal_lab.cli.app"
    )
    script = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
