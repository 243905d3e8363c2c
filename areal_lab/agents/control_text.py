"""Control tokens in text: only a template may write them.

If the text of a message spells one (`<|im_end|>` in a web page), it is encoded as ordinary text: it
is cut inside the token before rendering, and encoded in pieces. Control tokens are the special
tokens of a vocabulary, and other added tokens that the template contains. Marks of calls and of
thinking are ordinary vocabulary unless they are special: models write them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from areal_lab.agents.tool_calls import MARKS
from areal_lab.data.tokenize import TextCodec

_CUT: Final = "\ufdd0"
"""Mark of a cut. Unicode keeps this code point free for internal use; it is removed from
messages."""


class ControlText:
    """Encode rendered text in which only the template writes control tokens."""

    def __init__(self, codec: TextCodec, template: str) -> None:
        """Find the control tokens of a vocabulary."""
        self._codec = codec
        written = {text for text in codec.added_tokens.values() if text in template} - MARKS
        named = {*codec.special_tokens.values(), *written}
        control = sorted(named, key=lambda text: (-len(text), text))
        self._control = _one_of(control)
        # A token of one character cannot be cut.
        self._spelled = _one_of([text for text in control if len(text) > 1])
        self._anchor = next((text for text in control if self._is_one_token(text)), "")

    def plain(self, value: Any) -> Any:
        """Cut every text in a message, or any plain data, in each control token that it spells."""
        if isinstance(value, str):
            text = _encodable(value).replace(_CUT, "")
            # Cutting one may leave a shorter one inside.
            while self._spelled.search(text):
                text = self._spelled.sub(lambda found: found[0][0] + _CUT + found[0][1:], text)
            return text
        if isinstance(value, Mapping):
            return {self.plain(key): self.plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(one) for one in value]
        return value

    def encode(self, text: str, *, after: str = "", begins: bool = False) -> tuple[int, ...]:
        """Encode rendered text.

        `after` is the control token before the text, if any: some vocabularies put a space before
        the first word of a sequence, and some control tokens take the space behind them. `begins`
        adds a begin-of-text token if the vocabulary has one; templates write their own.
        """
        first, *others = text.split(_CUT)
        anchored = [self._anchor + piece for piece in others]
        (encoded,) = self._codec.encode_all([after + first], begins=begins)
        skipped = 1 if self._anchor else 0
        behind = encoded[1 if after else 0 :]
        pieces = self._codec.encode_all(anchored, begins=False)
        return behind + tuple(token for piece in pieces for token in piece[skipped:])

    def first(self, text: str) -> re.Match[str] | None:
        """The first control token in rendered text."""
        return self._control.search(text)

    def all(self, text: str) -> tuple[str, ...]:
        """All control tokens in rendered text, in order."""
        return tuple(self._control.findall(text))

    @property
    def anchor(self) -> str:
        """A control token behind which text can be encoded; empty without one."""
        return self._anchor

    def _is_one_token(self, text: str) -> bool:
        return self._codec.encode_all([text], begins=False)[0] == (self._codec.token(text),)


@lru_cache(maxsize=16)
def control_text(codec: TextCodec, template: str = "") -> ControlText:
    """The `ControlText` of a vocabulary and a template, created once."""
    return ControlText(codec, template)


def _encodable(text: str) -> str:
    """Join or replace halves of surrogate pairs, which JSON may contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _one_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Match any of the texts, longer ones first."""
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")
