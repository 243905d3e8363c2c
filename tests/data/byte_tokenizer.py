"""A tokenizer whose tokens are bytes, plus begin-of-text and end-of-text tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BEGIN, END = 256, 257


def byte_tokenizer(*, begins: bool = False) -> Tokenizer:
    """One token per byte; `begins` adds a begin-of-text token before each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<begin> $A", special_tokens=[("<begin>", BEGIN)]
        )
    return tokenizer


def save_byte_tokenizer(folder: Path, *, begins: bool = False) -> None:
    """As the `tokenizer.json` of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(begins=begins).save(str(folder / "tokenizer.json"))
