"""Names as people write them: how they are compared, and which known ones are near."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def plain(name: str) -> str:
    """A name without case, blanks and punctuation: `H100 SXM` and `h100-sxm` are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?`, or all known names where none is near. For error messages."""
    by_plain = {plain(one): one for one in known}
    near = [by_plain[one] for one in difflib.get_close_matches(plain(name), by_plain, n=3)]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known are {', '.join(by_plain.values())}"
