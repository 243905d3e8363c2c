"""Tokenization with the model's tokenizer, without torch.

The `tokenizers` library reads `tokenizer.json` in 0.2 s; `transformers` would import torch (takes
seconds and hundreds of MB) into a process that does no tensor math.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TOKENIZER_FILE = "tokenizer.json"
_MOST_PREFIXES = 2000
"""Tokens of a response up to which every prefix of it may be decoded: half a second."""


class Stops(NamedTuple):
    """What ends a response, in addition to the model's end tokens."""

    token_ids: tuple[int, ...]
    strings: tuple[str, ...]


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

    def encode_all(self, texts: Sequence[str], *, begins: bool = True) -> list[tuple[int, ...]]:
        """Encode many texts on several threads.

        Args:
            begins: whether they begin a sequence, as prompts do; what continues one gets no
                begin-of-text token.
        """
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=begins)
        return [tuple(encoding.ids) for encoding in encoded]

    def token(self, text: str) -> int | None:
        """The id of a token by its name; None if there is no such token."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion, without special tokens such as end-of-text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special ones by their names."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def has(self, token: int) -> bool:
        """Whether a token has a text. A model's output layer may have more rows than that."""
        return self._tokenizer.id_to_token(token) is not None

    @property
    def special_tokens(self) -> dict[int, str]:
        """Names of the special tokens, which `decode` leaves out, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {int(token): added[token].content for token in added if added[token].special}

    @property
    def added_tokens(self) -> dict[int, str]:
        """Names of all tokens that were added to the vocabulary, special ones among them, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {int(token): added[token].content for token in added}

    def characters(self, tokens: Sequence[int], text: str) -> tuple[int, ...] | None:
        """How many characters of its text each token adds; their sum is the text's length.

        A token that ends inside a character adds none of it: the last token of a character adds it.

        Args:
            tokens: of a completion.
            text: what `decode` returns for them.

        Returns:
            None if the text does not grow token by token (it is not theirs, or a long response of
            bytes that are no characters, in a vocabulary that decodes them in one piece).
        """
        added = self._streamed(tokens, text)
        if added is None and len(tokens) <= _MOST_PREFIXES:
            added = self._from_prefixes(tokens, text)
        return added

    def _streamed(self, tokens: Sequence[int], text: str) -> tuple[int, ...] | None:
        stream, pieces = DecodeStream(skip_special_tokens=True), []
        try:
            for token in tokens:
                pieces.append(stream.step(self._tokenizer, token) or "")
        except Exception:  # the library raises bare Exceptions where bytes are no characters
            return None
        if not (tokens and text.startswith("".join(pieces))):
            return None if text else (0,) * len(tokens)
        added = [len(piece) for piece in pieces]
        added[-1] += len(text) - sum(added)  # a character that was cut off
        return tuple(added)

    def _from_prefixes(self, tokens: Sequence[int], text: str) -> tuple[int, ...] | None:
        if not tokens or self.decode(tokens) != text:
            return None
        ends = [0]
        for count in range(1, len(tokens)):
            ends.append(max(ends[-1], _common_characters(self.decode(tokens[:count]), text)))
        ends.append(len(text))
        return tuple(end - start for start, end in pairwise(ends))

    def stops(self, texts: Sequence[str]) -> Stops:
        """Stop texts as tokens where they are one token in this vocabulary, otherwise as strings.

        Generation ends at exactly this token: with `"\\n"`, a token for two line breaks does not
        end it. A string ends it with the token that completes it in the decoded text, whatever the
        tokens are.
        """
        ids, strings = [], []
        for text in texts:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            if len(encoding.ids) == 1:
                ids.append(int(encoding.ids[0]))
            else:
                strings.append(text)
        return Stops(tuple(ids), tuple(strings))


def _common_characters(left: str, right: str) -> int:
    """Length of the common beginning."""
    differing = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))
