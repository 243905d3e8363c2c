"""Fields of a batch as numpy arrays: a value per row, or rows of unequal length in one array.

dense     reward    [0.5, 1.0]                   shape (rows, ...)
jagged    tokens    [7 8 9 | 7 8 9 4 2]          values, shape (total, ...)
          lengths   [3, 5]                       rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


class Jagged(NamedTuple):
    """Rows of unequal length."""

    values: Array
    """Of all rows, one after the other."""
    lengths: NDArray[np.int64]
    """Values of each row."""

    @staticmethod
    def of_rows(rows: Sequence[Sequence[Any]], dtype: str) -> Jagged:
        """From the values of each row.

        Raises:
            OverflowError: an integer does not fit into the type.
        """
        lengths = np.array([len(row) for row in rows], np.int64)
        values = np.array([value for row in rows for value in row], dtype)
        return Jagged(values, lengths)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each row begins, and the end: one more than there are rows."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    def split(self) -> list[Array]:
        """The values of each row, as views."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1])

    def rows(self, start: int, stop: int) -> Jagged:
        """Rows `[start, stop)`, as views."""
        first, end = self.offsets[[start, stop]]
        return Jagged(self.values[first:end], self.lengths[start:stop])


Field: TypeAlias = "Array | Jagged"
Fields: TypeAlias = Mapping[str, Field]


def field_bytes(field: Field) -> int:
    """Bytes of the values of a field, without the lengths of its rows."""
    return int((field.values if isinstance(field, Jagged) else field).nbytes)


def row_count(fields: Fields) -> int:
    """Rows of all fields.

    Raises:
        ValueError: there is no field or no row, the fields differ in rows, or one is malformed.
    """
    rows: dict[str, int] = {}
    for name, one in fields.items():
        if isinstance(one, Jagged):
            if one.lengths.ndim != 1 or (len(one.lengths) and one.lengths.min() < 0):
                raise ValueError(f"field {name!r} has lengths {one.lengths}, but they must be >= 0")
            if one.values.ndim < 1 or one.lengths.sum() != len(one.values):
                raise ValueError(
                    f"field {name!r} has values of shape {one.values.shape}, but lengths that add "
                    f"up to {one.lengths.sum()}"
                )
            rows[name] = len(one.lengths)
        elif one.ndim < 1:
            raise ValueError(f"field {name!r} is a scalar, but the first axis must be the rows")
        else:
            rows[name] = len(one)
    if not rows or not all(rows.values()) or len(set(rows.values())) > 1:
        raise ValueError(
            f"fields must have the same number of rows, at least one, but have {rows or 'none'}"
        )
    return next(iter(rows.values()))


def slice_rows(fields: Fields, start: int, stop: int) -> dict[str, Field]:
    """Rows `[start, stop)` of all fields, as views."""
    return {
        name: one.rows(start, stop) if isinstance(one, Jagged) else one[start:stop]
        for name, one in fields.items()
    }


def concat_rows(parts: Sequence[Fields]) -> dict[str, Field]:
    """The rows of several batches with the same fields, one after the other.

    Raises:
        ValueError: there is no batch, or a field is dense in one and jagged in another.
        KeyError: one lacks a field.
    """
    if not parts:
        raise ValueError("there are no rows to concatenate")
    if len(parts) == 1:
        return dict(parts[0])
    return {name: _concat(name, [part[name] for part in parts]) for name in parts[0]}


def _concat(name: str, parts: Sequence[Field]) -> Field:
    jagged = [part for part in parts if isinstance(part, Jagged)]
    if len(jagged) == len(parts):
        return Jagged(
            np.concatenate([part.values for part in jagged]),
            np.concatenate([part.lengths for part in jagged]),
        )
    dense = [part for part in parts if not isinstance(part, Jagged)]
    if len(dense) != len(parts):
        raise ValueError(f"field {name!r} has rows of unequal length in some batches only")
    return np.concatenate(dense)
