"""Tokenization with the model's tokenizer, without torch.

The `tokenizers` library reads `tokenizer.json` in 0.2 s; `transformers` would import torch (takes
seconds and hundreds of MB) into a process that does no tensor math.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"


class TextCodec:
    """Encodes prompts and decodes completions."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A saved tokenizer may have truncation and padding enabled.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: str | Path) -> TextCodec:
        """Load the tokenizer of a Hugging Face model folder.

        Raises:
            ValueError: if the folder has no readable `tokenizer.json`; names the fix.
        """
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {TOKENIZER_FILE}; make one with transformers: "
                f"AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
            )
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

    @property
    def vocabulary(self) -> int:
        """Number of tokens, including added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt, with a begin-of-text token if the model's tokenizer adds one."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode many texts on several threads."""
        return [tuple(encoding.ids) for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion, without special tokens such as end-of-text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def stop_token_ids(self, stops: Sequence[str]) -> tuple[int, ...]:
        """The single token of each stop string.

        Generation ends at exactly this token: with `"\\n"`, a token for two line breaks does not
        end it.

        Raises:
            ValueError: naming the string and its tokens if they are not exactly one.
        """
        ids = []
        for stop in stops:
            encoding = self._tokenizer.encode(stop, add_special_tokens=False)
            if len(encoding.ids) != 1:
                raise ValueError(
                    f"gconfig.stop has {stop!r}, which is {len(encoding.ids)} tokens in this "
                    f"vocabulary ({', '.join(map(repr, encoding.tokens))}), but must be one token"
                )
            ids.append(int(encoding.ids[0]))
        return tuple(ids)
