"""Rows of unequal length are counted, cut and joined as lists would be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.data.arrays import Field, Jagged, concat_rows, row_count, slice_rows

ROWS = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6)


def lists(field: Field) -> list[list[int]]:
    assert isinstance(field, Jagged)
    return [row.tolist() for row in field.split()]


@given(ROWS, st.data())
def test_rows_are_those_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    field = Jagged.of_rows(rows, "int32")
    assert lists(field) == rows
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    assert lists(field.rows(start, stop)) == rows[start:stop]


@given(ROWS, ROWS)
def test_joined_rows_are_those_of_lists(first: list[list[int]], second: list[list[int]]) -> None:
    parts = [{"a": Jagged.of_rows(rows, "int32")} for rows in (first, second)]
    assert lists(concat_rows(parts)["a"]) == first + second
    joined = concat_rows([{"b": np.arange(2)}, {"b": np.arange(3)}])["b"]
    assert np.asarray(joined).tolist() == [0, 1, 0, 1, 2]


def test_malformed_fields_are_refused() -> None:
    good = np.zeros((2, 3))
    assert row_count({"a": good, "b": Jagged.of_rows([[1], []], "int8")}) == 2
    for fields in (
        {},
        {"a": np.zeros((0, 3))},
        {"a": np.array(1)},
        {"a": good, "b": np.zeros(3)},
        {"a": Jagged(np.zeros(3), np.array([1, 1]))},
        {"a": Jagged(np.zeros(3), np.array([4, -1]))},
    ):
        with pytest.raises(ValueError, match="field"):
            row_count(fields)
    with pytest.raises(ValueError, match="'a' has rows of unequal length in some"):
        concat_rows([{"a": good}, {"a": Jagged.of_rows([[1]], "int8")}])
    with pytest.raises(ValueError, match="no rows"):
        concat_rows([])


def test_a_slice_shares_memory() -> None:
    fields = {"a": np.arange(6), "b": Jagged.of_rows([[1, 2], [3], [4], [], [5], [6]], "int32")}
    some = slice_rows(fields, 1, 3)
    assert isinstance(some["b"], Jagged)
    assert np.shares_memory(some["b"].values, fields["b"].values)
    assert np.shares_memory(np.asarray(some["a"]), fields["a"])
