"""Values as text: what crosses, what does not, and what a hostile writer can do."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.rewards.verdicts.literals import MOST_BYTES, Unreadable, read, write

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.dates()
    | st.times()
    | st.datetimes()
    | st.timedeltas()
)
HASHED = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
VALUES = st.recursive(
    HASHED,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHED, inner, max_size=3)
        | st.sets(HASHED, max_size=3)
    ),
    max_leaves=10,
)


def no_reference(value: object) -> int:
    raise AssertionError(f"{value!r} is a literal")


def crossed(value: object) -> Any:
    text = write(value, no_reference)
    assert text.isascii()
    assert "\n" not in text
    return read(text, lambda number: pytest.fail(f"no reference {number}"))


def types(value: Any) -> Any:
    """The value with the types of all its parts."""
    if isinstance(value, dict):
        return dict, [(types(key), types(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types(one) for one in value]
    return type(value)


@given(VALUES)
def test_a_literal_crosses_unchanged(value: object) -> None:
    found = crossed(value)
    assert found == value
    assert types(found) == types(value)


UNUSUAL = (
    *(int, ValueError, len),
    *(math.inf, -math.inf, -0.0, -(2**80), 10**4000, ..., NotImplemented, range(3, 0, -1)),
    *((), (1,), [[]] * 3, set(), frozenset(), deque([1, 2], maxlen=3)),
    *(bytearray(b"\0x"), "\ud800\n'\"\\", ""),
)


@pytest.mark.parametrize("value", UNUSUAL, ids=lambda value: repr(value)[:20])
def test_unusual_literals_cross(value: object) -> None:
    found = crossed(value)
    assert type(found) is type(value)
    assert str(found) == str(value) if isinstance(value, float) else found == value


def test_integers_of_any_length_cross() -> None:
    assert crossed(-(10**50_000)) == -(10**50_000)


def test_not_a_number_crosses() -> None:
    assert math.isnan(crossed(math.nan))
    assert math.isnan(crossed(complex(0, math.nan)).imag)


class _Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __index__(self) -> int:
        return 42

    __hash__ = int.__hash__


Point = namedtuple("Point", "x y")


class Color(IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (Point(1, 2), (1, 2)),
        (Color.RED, 3),
        (_Liar(7), 7),
    ],
)
def test_subclasses_arrive_as_the_plain_type(value: object, plain: object) -> None:
    found = crossed(value)
    assert type(found) is type(plain)
    assert found == plain


def test_other_objects_are_references() -> None:
    seen: list[object] = []

    def refer(value: object) -> int:
        seen.append(value)
        return len(seen) - 1

    aware = datetime(2020, 1, 1, tzinfo=UTC)
    value = [1, print, {"key": aware}, (open,)]
    text = write(value, refer)
    assert seen == [print, aware, open]
    assert read(text, seen.__getitem__) == value


def test_what_contains_itself_ends_in_a_reference() -> None:
    loop: list[object] = []
    loop.append(loop)
    text = write(loop, lambda _: 0)
    assert text == "[" * 100 + "Ref(0)" + "]" * 100
    assert read(text, lambda _: "inner")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "print(1)",
        "Ref('a')",
        "Ref(True)",
        "Ref(1, 2)",
        "range(stop=3)",
        "[x for x in (1, 2)]",
        "f'{1}'",
        "(lambda: 1)()",
        "a.b",
        "1 if 2 else 3",
        "{**{}}",
        "[*range(3)]",
        "9 ** 9 ** 9",
        "bytearray(1).__class__",
        "-'a'",
        "not True",
        "{[]: 1}",
        "{[]}",
        "Decimal('x')",
        "Fraction(1, 0)",
        "datetime(1, 2, 99)",
        "[" * 1000 + "]" * 1000,
        "-" * 10_000 + "1",
        "1" * 5000 + "x",
        "'\0'",
        "",
        "1\n2",
        "ok = 1",
    ],
    ids=lambda text: text[:20],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        read(text, lambda _: None)


def test_a_long_text_is_refused_unread() -> None:
    with pytest.raises(Unreadable, match="at most 4194304 are read"):
        read("'" + "x" * MOST_BYTES + "'", no_reference)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(text, lambda number: number)
    except Unreadable:
        pass  # the only error


def test_times_keep_their_parts() -> None:
    for value in (date(2020, 2, 29), time(1, 2, 3, 4), timedelta(-1, 5), Decimal("1.10")):
        assert repr(crossed(value)) == repr(value)
    assert crossed(Fraction(1, 3)) == Fraction(1, 3)
