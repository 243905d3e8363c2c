"""Text to tokens and back, and stop strings as single tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.data.tokenize import TextCodec
from tests.data.byte_tokenizer import BEGIN, END, byte_tokenizer, save_byte_tokenizer

texts = st.text(st.characters(codec="utf-8"), max_size=30).filter(lambda text: "<" not in text)


@given(texts)
def test_decode_undoes_encode(text: str) -> None:
    codec = TextCodec(byte_tokenizer())
    assert codec.decode(codec.encode(text)) == text
    assert len(codec.encode(text)) == len(text.encode())


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


def test_truncation_and_padding_of_a_saved_tokenizer_are_dropped() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert len(TextCodec(tokenizer).encode("2 + 3 =")) == 7


def test_stop_strings_become_their_token() -> None:
    codec = TextCodec(byte_tokenizer(begins=True))
    assert codec.stop_token_ids(["\n", "<end>"]) == (*codec.encode("\n")[1:], END)


@pytest.mark.parametrize("stop", ["ab", ""])
def test_a_stop_string_of_several_tokens_is_refused_with_its_tokens(stop: str) -> None:
    with pytest.raises(
        ValueError, match=rf"gconfig.stop has '{stop}', which is {len(stop)} tokens"
    ):
        TextCodec(byte_tokenizer()).stop_token_ids(["\n", stop])


def test_a_folder_gives_its_tokenizer(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    assert TextCodec.load(tmp_path).encode("7") == TextCodec(byte_tokenizer()).encode("7")


def test_a_folder_without_a_tokenizer_is_refused_with_a_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json; make one"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        TextCodec.load(tmp_path)


def test_data_and_preflight_load_no_torch() -> None:
    modules = (
        "areal_lab.data.sources, areal_lab.data.tokenize, areal_lab.preflight.check, "
        "areal_lab.cli.app"
    )
    script = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
