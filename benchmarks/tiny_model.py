"""A language model with random weights that fits in a megabyte, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL = ("<unk>", "<end>")
_CHARACTERS = "0123456789+-*= \n"


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    initializer_range: float = 0.02,
    head_size: int = 16,
    kv_heads: int = 2,
    intermediate_size: int | None = None,
    words: Sequence[str] = (),
    context_tokens: int = 256,
) -> None:
    """Write a Llama of two layers, one token per character, as a Hugging Face folder.

    Args:
        initializer_range: standard deviation of the weights; 0.02 makes every token as likely.
        head_size: of each of four attention heads; SGLang and vLLM have kernels for 32, not for 16.
        kv_heads: key and value heads; 4 is attention without shared ones.
        intermediate_size: of the feed-forward layers; None is twice the hidden size.
        words: further tokens that it samples, such as calls of tools. Their text is encoded
            character by character all the same.
        context_tokens: longest prompt and response together.
    """
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_CHARACTERS, *words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    end = vocabulary["<end>"]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=4 * head_size,
        intermediate_size=intermediate_size or 8 * head_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
