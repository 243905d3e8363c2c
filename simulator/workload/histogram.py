"""Histograms of response lengths, shipped with the package or from your own CSV file. Tokens.

Your own file has one length per row, in the first column or in a column named as below, and
optionally a column `weight`. The shipped ones (`simulator/workload/data`) have one row per bin, and
a header with their source and license.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.suggest import did_you_mean, plain

_DATA: Final = Path(__file__).parent / "data"
_BIN: Final = ("from_tokens", "to_tokens", "mean_tokens", "weight")
_LENGTH: Final = (
    *("tokens", "output_tokens", "answer_tokens", "length", "output_length"),
    *("GeneratedTokens", "num_decode_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """Bins of lengths with weights, in ascending order; a bin may hold a single length.

    Lengths are spread evenly around the mean of their bin, as widely as its bounds allow, so that
    both the bounds and the mean of each bin are right.
    """

    from_tokens: NDArray[np.float64]
    to_tokens: NDArray[np.float64]
    """Inclusive."""
    mean_tokens: NDArray[np.float64]
    """Mean of the lengths in the bin."""
    weight: NDArray[np.float64]
    """In any unit: numbers of requests, or shares."""
    source: str = ""
    """The comments of the file: where its lengths come from."""

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in _BIN]
        if len({len(column) for column in columns}) != 1:
            raise ValueError(f"columns of different lengths: {[len(one) for one in columns]}")
        if not len(self.weight):
            raise ValueError("there are no lengths")
        for name, column in zip(_BIN, columns, strict=True):
            if not np.isfinite(column).all():
                bad = column[~np.isfinite(column)][0]
                raise ValueError(f"{name} is {bad} somewhere, but must be finite")
        if (self.weight < 0).any() or self.weight.sum() <= 0:
            raise ValueError("weights must be >= 0, and not all 0")
        if self.from_tokens[0] < 1:
            raise ValueError(
                f"a length is {self.from_tokens.min():g}, but must be at least 1 token; "
                "leave such rows out"
            )
        middle = (self.from_tokens <= self.mean_tokens) & (self.mean_tokens <= self.to_tokens)
        if not middle.all() or (np.diff(self.from_tokens) < 0).any():
            raise ValueError("bins must ascend, each with from_tokens <= mean_tokens <= to_tokens")

    @property
    def mean(self) -> float:
        """Mean length."""
        return float(self.mean_tokens @ self.weight / self.weight.sum())

    @property
    def half_width_tokens(self) -> NDArray[np.float64]:
        """Spread of lengths to either side of the mean of their bin."""
        return np.minimum(self.mean_tokens - self.from_tokens, self.to_tokens - self.mean_tokens)


def shipped_histograms() -> list[str]:
    """Names that `load_histogram` accepts."""
    return sorted(
        path.stem
        for path in _DATA.glob("*.csv")
        if next(_rows(path), ([], 0))[0] == list(_BIN)  # other data have other columns
    )


def load_histogram(name: str) -> Histogram:
    """A shipped histogram, or one from the user's CSV file.

    Args:
        name: a name of `shipped_histograms`, in any case and punctuation, or a CSV file.

    Raises:
        ValueError: one line: no such name (with the nearest one), or a broken file, with its line.
    """
    if not name:
        raise ValueError(f"no trace is given; known names are {', '.join(shipped_histograms())}")
    if name.lower().endswith(".csv"):
        return read_histogram(Path(name))
    known = {plain(one): one for one in shipped_histograms()}
    if plain(name) not in known:
        raise ValueError(
            f"unknown trace {name!r}; {did_you_mean(name, known.values())} "
            "(the path of your own CSV file also works)"
        )
    return read_histogram(_DATA / f"{known[plain(name)]}.csv")


def read_histogram(path: Path) -> Histogram:
    """The histogram in a CSV file; see the module docstring for its format."""
    if not path.is_file():
        raise ValueError(f"trace {path} does not exist (looked in {Path.cwd()})")
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"trace {path} is empty; it needs one length per row")
    header = [cell.strip() for cell in first[0]]
    if header == list(_BIN):
        columns = np.array([_numbers(path, line, row, range(4)) for row, line in rows])
    else:
        length, weight, is_header = _columns(path, header)
        places = (length,) if weight is None else (length, weight)
        lines = rows if is_header else _again(first, rows)
        columns = np.array([_numbers(path, line, row, places) for row, line in lines])
        if columns.size:
            columns = _gather(columns[:, 0], None if weight is None else columns[:, 1])
    if not columns.size:
        raise ValueError(f"trace {path} has a header but no lengths; it needs one length per row")
    source = " ".join(_comments(path))
    try:
        return Histogram(**dict(zip(_BIN, columns.T, strict=True)), source=source)
    except ValueError as error:
        raise ValueError(f"trace {path}: {error}") from error


def _rows(path: Path) -> Iterator[tuple[list[str], int]]:
    """Rows with their line numbers, without comments and empty lines."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and not line.startswith("#"):
                    yield next(csv.reader([line])), number
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from error


def _comments(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return [line.lstrip("# ") for line in lines if line.startswith("#")]


def _again(
    first: tuple[list[str], int], rows: Iterator[tuple[list[str], int]]
) -> Iterator[tuple[list[str], int]]:
    yield first
    yield from rows


def _columns(path: Path, header: list[str]) -> tuple[int, int | None, bool]:
    """Columns of the lengths and the weights, and whether the row is a header."""
    try:
        [float(cell) for cell in header]
    except ValueError:
        pass
    else:
        if len(header) > 2:
            raise ValueError(
                f"trace {path} has {len(header)} columns and no header; name the column of "
                f"lengths {_LENGTH[0]!r} in a first row"
            )
        return 0, (1 if len(header) == 2 else None), False
    named = {plain(cell): place for place, cell in reversed(list(enumerate(header)))}
    found = [named[plain(name)] for name in _LENGTH if plain(name) in named]
    if not found and len(header) > 1:
        raise ValueError(
            f"trace {path} has the columns {', '.join(header)}; name the one with the lengths "
            f"{_LENGTH[0]!r}"
        )
    return (found or [0])[0], named.get("weight"), True


def _numbers(path: Path, line: int, row: Sequence[str], places: Sequence[int]) -> list[float]:
    try:
        numbers = [float(row[place]) for place in places]
    except (ValueError, IndexError) as error:
        wanted = f"{len(places)} number{'s' * (len(places) > 1)}"
        raise ValueError(
            f"trace {path}, line {line}: expected {wanted}, got {','.join(row)!r}"
        ) from error
    if not all(map(math.isfinite, numbers)) or numbers[-1] < 0 or numbers[0] < 1:
        raise ValueError(
            f"trace {path}, line {line}: {','.join(row)!r}, but lengths must be >= 1 and weights "
            ">= 0, both finite; leave such rows out"
        )
    return numbers


def _gather(
    lengths: NDArray[np.float64], weights: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """One row for each distinct length."""
    distinct, place = np.unique(lengths, return_inverse=True)
    weight = np.bincount(place, weights=weights, minlength=len(distinct)).astype(np.float64)
    return np.stack([distinct, distinct, distinct, weight], axis=1)
