"""Text of others on this user's terminal: messages may quote what a model, a data set or a log has.

A terminal obeys escape sequences: they can rewrite what is on the screen, its title, the clipboard.
"""

from __future__ import annotations

import re
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tabs and line ends, and those that reverse the direction of text."""


def printable(text: str) -> str:
    r"""The text with control characters written out.

    >>> printable("\x1b[2Jgone")
    '\\x1b[2Jgone'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
