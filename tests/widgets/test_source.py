"""The source of library functions as Markdown."""

from __future__ import annotations

import functools
import math

import pytest

from areal_lab import capacity
from areal_lab.control.limits import Limits
from areal_lab.control.order import order_named
from areal_lab.widgets.source import code_of


def fenced() -> None:
    """Has a fence itself.

    ```
    x = 1
    ```
    """


def test_functions_classes_and_modules_are_shown_with_their_place() -> None:
    shown = code_of(order_named, Limits, capacity)
    assert list(shown) == [
        "`order_named` in `areal_lab.\u200bcontrol.\u200border`",
        "`Limits` in `areal_lab.\u200bcontrol.\u200blimits`",
        "`areal_lab.capacity`",
    ]
    first = next(iter(shown.values()))
    assert first.startswith("```python\ndef order_named(")
    assert first.endswith("\n```")


def test_a_cached_function_shows_what_it_caches() -> None:
    (text,) = code_of(functools.lru_cache(fenced)).values()
    assert "def fenced" in text


def test_a_fence_in_a_docstring_does_not_end_the_code() -> None:
    (text,) = code_of(fenced).values()
    assert text.startswith("````python\n")
    assert text.endswith("\n````")


def test_what_has_no_source_is_refused() -> None:
    with pytest.raises(TypeError, match=r"<built-in function sqrt> has no Python source; give"):
        code_of(math.sqrt)


def test_nothing_and_twice_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        code_of()
    with pytest.raises(ValueError, match="twice"):
        code_of(fenced, fenced)
