"""The source of the functions behind a notebook, for the section "The code"."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any


def code_of(*functions: Any) -> dict[str, str]:
    """Source code of functions, classes or modules of the library as Markdown, for `mo.accordion`.

    Returns Markdown by title. A title has the name and the module: `` `advance` in `a.b.c` ``.
    """
    if not functions:
        raise ValueError("code_of() got nothing to show; give it at least one function or class")
    shown: dict[str, str] = {}
    for one in functions:
        target = inspect.unwrap(one) if callable(one) else one
        try:
            source = textwrap.dedent(inspect.getsource(target)).rstrip()
        except (OSError, TypeError) as error:
            raise TypeError(
                f"{one!r} has no Python source; give code_of() functions, classes or modules that "
                "are defined in a file"
            ) from error
        title = _title(target)
        if title in shown:
            raise ValueError(f"{title} was given to code_of() twice")
        # A docstring may contain a fence.
        longest = max(map(len, re.findall(r"`{3,}", source)), default=2)
        fence = "`" * (longest + 1)
        shown[title] = f"{fence}python\n{source}\n{fence}"
    return shown


def _title(target: Any) -> str:
    if inspect.ismodule(target):
        return f"`{target.__name__}`"
    # A zero-width space lets a narrow page break the line there.
    module = target.__module__.replace(".", ".\N{ZERO WIDTH SPACE}")
    return f"`{target.__qualname__}` in `{module}`"
