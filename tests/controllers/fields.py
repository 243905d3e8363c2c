"""Random fields for tests, and their comparison."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from areal_lab.data.arrays import Field, Fields, Jagged

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)


@st.composite
def some_fields(draw: st.DrawFn) -> dict[str, Field]:
    """Dense and jagged fields of all types with the same number of rows."""
    rows = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    fields: dict[str, Field] = {}
    letters = st.characters(exclude_characters="._", exclude_categories=["Cs"])
    names = st.text(letters, min_size=1)  # no NAME.lengths, no __metadata__
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        inner = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        if draw(st.booleans()):
            lengths = random.integers(0, 5, rows)
            fields[name] = Jagged(numbers(random, (int(lengths.sum()), *inner), dtype), lengths)
        else:
            fields[name] = numbers(random, (rows, *inner), dtype)
    return fields


def numbers(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return random.integers(0, 100, shape).astype(dtype)


def assert_equal(found: Fields, expected: Fields) -> None:
    """Same fields, types, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        other = found[name]
        assert isinstance(one, Jagged) == isinstance(other, Jagged)
        pairs = zip(one, other, strict=True) if isinstance(one, Jagged) else [(one, other)]
        for left, right in pairs:
            assert left.dtype == right.dtype
            assert left.shape == right.shape
            assert left.tobytes() == right.tobytes()
