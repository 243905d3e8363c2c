"""Tokenization with the model's tokenizer, without torch.

The `tokenizers` library reads `tokenizer.json` in 0.2 s; `transformers` would import torch (seconds
and hundreds of MB) into a process that does no tensor math.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from areal_lab.host.foreign import read_json

TOKENIZER_FILE = "tokenizer.json"
_CONFIG = "config.json"
_MOST_PREFIXES = 2000
"""Longest response, in tokens, of which every prefix may be decoded: half a second."""


class Stops(NamedTuple):
    """Stop conditions of a response, in addition to the model's end tokens."""

    token_ids: tuple[int, ...]
    strings: tuple[str, ...]


class TextCodec:
    """Encode prompts and decode completions with a tokenizer.

    `rows` is the number of rows of the model's embedding: larger tokens are refused; None takes
    all.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int | None = None) -> None:
        self._rows = rows
        # A saved tokenizer may have truncation and padding enabled.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._begin = next(filter(None, map(self._added_before, "a0 ")), ())

    @classmethod
    def load(cls, folder: str | Path) -> TextCodec:
        """Load the tokenizer of a Hugging Face model folder."""
        path, config = Path(folder) / TOKENIZER_FILE, Path(folder) / _CONFIG
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {TOKENIZER_FILE}; make one with transformers: "
                f"AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
            )
        try:
            return cls(Tokenizer.from_file(str(path)), _rows(config))
        except Exception as error:  # the library raises bare Exceptions
            why = " ".join(str(error).split())[:500]
            raise ValueError(f"{path} is not a tokenizer: {why}") from error

    def as_json(self) -> str:
        """The tokenizer in the format of `tokenizer.json`."""
        return str(self._tokenizer.to_str())

    @property
    def vocabulary(self) -> int:
        """Number of tokens, including added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt; see `encode_all`."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str], *, begins: bool = True) -> list[tuple[int, ...]]:
        """Encode many texts on several threads.

        With `begins`, as for prompts, a text gets the begin-of-text token that the model's
        tokenizer adds, if any, unless the text already begins with it (from a chat template). An
        end token that some tokenizers add is removed: the response continues the prompt.
        """
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        begin = self._begin if begins else ()
        found = []
        for encoding in encoded:
            tokens = tuple(encoding.ids)
            if self._rows is not None and tokens and (worst := max(tokens)) >= self._rows:
                raise ValueError(
                    f"the tokenizer has {self._tokenizer.id_to_token(worst)!r:.60} as token "
                    f"{worst:,}, but the model has {self._rows:,} (vocab_size in {_CONFIG}): use "
                    "the tokenizer of this model, or add rows by transformers' "
                    "resize_token_embeddings and save both"
                )
            found.append(tokens if tokens[: len(begin)] == begin else begin + tokens)
        return found

    def _added_before(self, text: str) -> tuple[int, ...]:
        """Text that the tokenizer adds before a text; empty if it has no token for it."""
        plain = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not plain:
            return ()
        whole = self._tokenizer.encode(text).ids
        starts = range(len(whole) - len(plain) + 1)
        at = next((at for at in starts if whole[at : at + len(plain)] == plain), 0)
        return tuple(whole[:at])

    def token(self, text: str) -> int | None:
        """Id of a token by its name; None if it does not exist."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion, without special tokens such as end-of-text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def decode_all(self, tokens: Iterable[int]) -> str:
        """Text of tokens, special ones by their names."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def has(self, token: int) -> bool:
        """Return whether a token has a text. A model's output layer may have more rows."""
        return self._tokenizer.id_to_token(token) is not None

    @property
    def special_tokens(self) -> dict[int, str]:
        """Names of the special tokens, which `decode` leaves out, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {int(token): added[token].content for token in added if added[token].special}

    @property
    def added_tokens(self) -> dict[int, str]:
        """Names of all tokens that were added to the vocabulary, including special ones, by id."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {int(token): added[token].content for token in added}

    def characters(self, tokens: Sequence[int], text: str) -> tuple[int, ...] | None:
        """Number of characters of the text that each token adds; their sum is the text's length.

        A token that ends inside a character adds none of it: the last token of a character adds it.
        None if the text does not grow token by token (another text, or a long response of invalid
        bytes, in a vocabulary that decodes them in one piece).
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
        except Exception:  # the library raises bare Exceptions for invalid bytes
            return None
        if not (tokens and text.startswith("".join(pieces))):
            return None if text else (0,) * len(tokens)
        added = [len(piece) for piece in pieces]
        added[-1] += len(text) - sum(added)  # an incomplete character
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
    """Length of the common prefix."""
    differing = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))


def _rows(config: Path) -> int | None:
    """Rows of the embedding by the configuration of a model; None if unknown.

    Errors in such a file are reported where the folder is checked.
    """
    try:
        whole = read_json(config)
    except (OSError, ValueError):
        return None
    text = whole.get("text_config") if isinstance(whole, dict) else None
    said = (one.get("vocab_size") for one in (text, whole) if isinstance(one, dict))
    return next((rows for rows in said if type(rows) is int and rows > 0), None)
