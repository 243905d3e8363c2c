"""Text of others on a terminal and on a page: it may be of a model, a data set, a run or a log.

A terminal obeys escape sequences: they can rewrite what is on the screen, its title, the clipboard.
A page obeys HTML, and Markdown becomes HTML.
"""

from __future__ import annotations

import re
from typing import Final

INTERRUPTED: Final = 130
"""Exit code of a command that Ctrl-C or SIGTERM ended."""
_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Control characters but tabs and line ends, those that end a line or reverse the direction of
text, and those that no file can have: halves of pairs, and two that XML forbids."""
_NOT_PLAIN: Final = re.compile(r"[^A-Za-z0-9 ,]")


def printable(text: str) -> str:
    r"""The text with control characters written out.

    >>> printable("\x1b[2Jgone")
    '\\x1b[2Jgone'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def page_text(text: object) -> str:
    """A text of others for `mo.md` and other places that take Markdown or HTML: shown as it is.

    Everything but letters, digits, spaces and commas is written as a number, so that nothing in it
    is a tag, an emphasis, a link, a formula, a list or the end of a table's cell. Not for use in
    backticks, where these numbers would be shown.

    >>> page_text("<b>*x*")
    '&#60;b&#62;&#42;x&#42;'
    """
    words = " ".join(printable(str(text)).split())
    return _NOT_PLAIN.sub(lambda found: f"&#{ord(found[0])};", words)
