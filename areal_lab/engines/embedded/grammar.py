"""JSON schemas as grammars of tokens: which tokens may come next, from llguidance.

    schema --Grammars.matcher--> Matcher --allowed--> mask of the logits
                                    ^--------accept-------- sampled token

JSON is written in one line, with a space after commas and colons, as `json.dumps` does: where
white space is free, small models write it until the response is full.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import numpy as np

from areal_lab.data.tokenize import TextCodec

if TYPE_CHECKING:
    from jaxtyping import Bool
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

PACKAGE: Final = "llguidance"
_FORM: Final[JsonCompileOptions] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_KEPT: Final = 64
"""Schemas that are kept compiled."""


class Matcher:
    """The grammar of one response, up to its last token."""

    def __init__(self, matcher: LLMatcher, ends: Set[int], vocabulary: int) -> None:
        self._matcher = matcher
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._vocabulary = vocabulary

    def allowed(self) -> Bool[np.ndarray, " V"]:
        """Mask of the tokens that may come next; end tokens only behind a complete value."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)
        mask[self._ends] = self._matcher.is_accepting()
        return mask

    def accept(self, token: int) -> bool:
        """Append a sampled token; returns True if nothing may follow it.

        Raises:
            ValueError: the grammar has become too large.
        """
        if token in self._ends:
            return True
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise ValueError(_line(self._matcher.get_error()))
        return self._matcher.is_stopped()


class Grammars:
    """Grammars for one model, compiled when they are first needed."""

    def __init__(
        self, codec: Callable[[], TextCodec], *, vocabulary: int, end_tokens: Set[int]
    ) -> None:
        """Compile nothing yet.

        Args:
            codec: loads the tokenizer of the model.
            vocabulary: columns of the logits.
            end_tokens: tokens that end a response of the model.
        """
        self._codec = codec
        self._vocabulary = vocabulary
        self._end_tokens = end_tokens
        self._tokenizer = lru_cache(1)(self._load)
        self._compiled = lru_cache(_KEPT)(self._compile)

    @staticmethod
    def installed() -> bool:
        """Return whether the library is installed."""
        return find_spec(PACKAGE) is not None

    def supported(self) -> bool:
        """Return whether the library reads the tokenizer."""
        try:
            self._tokenizer()
        except ValueError:
            return False
        return True

    def matcher(self, schema: str, stop_tokens: Set[int] = frozenset()) -> Matcher:
        """Begin a response that must match a schema.

        Args:
            schema: JSON text.
            stop_tokens: further tokens that end the response.

        Raises:
            ValueError: the schema or the tokenizer is not supported, in one line.
        """
        return Matcher(
            self._compiled(schema).deep_copy(), self._end_tokens | stop_tokens, self._vocabulary
        )

    def _compile(self, schema: str) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_FORM)
        except ValueError as error:
            raise ValueError(f"json_schema is not valid: {_line(error)}") from None
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"json_schema is not supported: {_line(matcher.get_error())}")
        return matcher

    def _load(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(
                self._codec().as_json(),
                n_vocab=self._vocabulary,
                eos_token=sorted(self._end_tokens) or None,
            )
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(
                f"json_schema is not supported with this tokenizer: {_line(error)}"
            ) from None


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
