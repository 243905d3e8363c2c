"""Read response lengths from a table: CSV text with one length per row. Tokens.

    tokens   `tokens`, `output_tokens`, `length`, ... or the only column, or the one asked for
    weight   `weight`, optional: how often this length occurred
    prompt   `prompt_id`, `group`, ... optional: rows with the same value answer the same prompt

A table may also be a histogram, with the columns of `Histogram`. Cells are separated by commas,
semicolons or tabs; lines that begin with # are comments.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from areal_lab.config.unknown import did_you_mean, plain
from simulator.workload.histogram import COLUMNS, Histogram

LENGTH: Final = (
    *("tokens", "output_tokens", "answer_tokens", "response_tokens", "completion_tokens"),
    *("length", "output_length", "response_length", "GeneratedTokens", "num_decode_tokens"),
)
"""Names of columns of lengths, in any case and punctuation; the first that exists is read."""
WEIGHT: Final = "weight"
PROMPT: Final = ("prompt_id", "group_id", "group", "problem_id", "problem", "question_id")
"""Names of columns that say which rows answer the same prompt."""
_SEPARATORS: Final = ",;\t"
_LARGEST_CELL: Final = 2**31 - 1
"""Characters of one cell: a table may have the completions as well."""

Row: TypeAlias = tuple[int, list[str]]
"""Line of the file, from 1, and cells."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthTable:
    """Lengths of a table."""

    histogram: Histogram
    groups: tuple[tuple[float, ...], ...] = ()
    """Lengths of the responses to each prompt; empty if the table does not name prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sheet:
    """A table as text: its name for messages, its rows, its comments."""

    name: str
    rows: list[Row]
    source: str

    @property
    def header(self) -> list[str]:
        return self.rows[0][1]

    @property
    def below(self) -> list[Row]:
        return self.rows[1:]


def read_table(
    text: str, *, name: str = "the table", column: str = "", prompt_column: str = ""
) -> LengthTable:
    """Read CSV text.

    Args:
        text: see the module docstring.
        name: for messages, such as the path of the file.
        column: which column has the lengths; empty takes the first known name, or the only column.
        prompt_column: which column names the prompt; empty takes the first known name, if any.
    """
    sheet = _sheet(text, name)
    try:
        if sheet.header == list(COLUMNS) and not column:
            numbers = _numbers(name, sheet.below, range(len(COLUMNS)))
            columns = dict(zip(COLUMNS, np.array(numbers).T, strict=True))
            return LengthTable(histogram=Histogram(**columns, source=sheet.source))
        return _one_per_row(sheet, column, prompt_column)
    except ValueError as error:
        known = str(error)
        raise ValueError(known if known.startswith(name) else f"{name}: {known}") from error


def _one_per_row(sheet: _Sheet, column: str, prompt_column: str) -> LengthTable:
    if _has_names(sheet.header):
        length, weight = _places(sheet, column)
        prompt = _prompt_place(sheet, prompt_column)
        rows = sheet.below
    else:
        length, weight = _places_without_names(sheet, column or prompt_column)
        prompt, rows = None, sheet.rows
    if weight is not None and prompt_column:
        raise ValueError(
            f"{sheet.name} has weights, so that its rows are not single responses; leave out "
            "the column of weights or that of prompts"
        )
    numbers = _numbers(sheet.name, rows, (length,) if weight is None else (length, weight))
    tokens = [row[0] for row in numbers]
    weights = None if weight is None else [row[1] for row in numbers]
    groups: dict[str, list[float]] = {}
    if prompt is not None and weight is None:
        for (_, cells), one in zip(rows, tokens, strict=True):
            groups.setdefault(cells[prompt] if prompt < len(cells) else "", []).append(one)
    return LengthTable(
        histogram=Histogram.of_lengths(tokens, weights, source=sheet.source),
        groups=tuple(map(tuple, groups.values())),
    )


def _sheet(text: str, name: str) -> _Sheet:
    text = text.removeprefix("\ufeff")
    lines = text.splitlines()
    first = next((line for line in lines if line.strip() and line[0] != "#"), "")
    separator = max(_SEPARATORS, key=first.count)
    try:
        with _large_cells():
            rows = list(_rows(text, separator))
    except csv.Error as error:
        raise ValueError(f"{name} cannot be read as a table: {error}") from error
    if not rows:
        raise ValueError(f"{name} is empty; it needs one length per row")
    line, cells = rows[0]
    rows[0] = line, [cell.strip() for cell in cells]
    comments = "\n".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    return _Sheet(name=name, rows=rows, source=comments)


def _rows(text: str, separator: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    for cells in reader:
        if any(cell.strip() for cell in cells) and not cells[0].startswith("#"):
            yield reader.line_num, cells


def _has_names(header: Sequence[str]) -> bool:
    """Return whether a first row has names: not all of its cells are numbers."""
    try:
        [float(cell) for cell in header]
    except ValueError:
        return True
    return False


def _places_without_names(sheet: _Sheet, column: str) -> tuple[int, int | None]:
    header = sheet.header
    if column:
        raise ValueError(
            f"{sheet.name} has no column {column!r}: its first row has numbers and no names; "
            "add a row of names, or do not name a column"
        )
    if len(header) > 2:
        raise ValueError(
            f"{sheet.name} has {len(header)} columns and no header; name the column of "
            f"lengths {LENGTH[0]!r} in a first row"
        )
    return 0, (1 if len(header) == 2 else None)


def _places(sheet: _Sheet, column: str) -> tuple[int, int | None]:
    named = _named(sheet)
    wanted = (_known(sheet, column),) if column else LENGTH
    found = [named[plain(one)] for one in wanted if plain(one) in named]
    if not found and len(sheet.header) > 1:
        raise ValueError(
            f"{sheet.name} has the columns {', '.join(sheet.header)}; name the one with the "
            f"lengths {LENGTH[0]!r}, or say which it is"
        )
    return (found or [0])[0], named.get(WEIGHT)


def _prompt_place(sheet: _Sheet, column: str) -> int | None:
    named = _named(sheet)
    wanted = (_known(sheet, column),) if column else PROMPT
    return next((named[plain(one)] for one in wanted if plain(one) in named), None)


def _named(sheet: _Sheet) -> dict[str, int]:
    """The place of each column by its plain name; of two of the same name, the first."""
    return {plain(cell): place for place, cell in reversed(list(enumerate(sheet.header)))}


def _known(sheet: _Sheet, column: str) -> str:
    if plain(column) in _named(sheet):
        return column
    raise ValueError(f"{sheet.name} has no column {column!r}; {did_you_mean(column, sheet.header)}")


def _numbers(name: str, rows: Sequence[Row], places: Sequence[int]) -> list[list[float]]:
    if not rows:
        raise ValueError(f"{name} has a header but no lengths; it needs one length per row")
    found, wrong = [], []
    for line, cells in rows:
        try:
            numbers = [float(cells[place]) for place in places]
        except (ValueError, IndexError):
            expected = f"{len(places)} number{'s' * (len(places) > 1)}"
            wrong.append(f"line {line}: expected {expected}, got {_shown(cells)}")
            continue
        if all(map(math.isfinite, numbers)) and numbers[-1] >= 0 and numbers[0] >= 1:
            found.append(numbers)
        else:
            wrong.append(
                f"line {line}: {_shown(cells)}, but lengths must be >= 1 and weights >= 0, both "
                "finite; leave such rows out"
            )
    if wrong:
        others = f" ({len(wrong):,} of {len(rows):,} rows are wrong)" if len(wrong) > 1 else ""
        raise ValueError(f"{name}, {wrong[0]}{others}")
    return found


def _shown(cells: Sequence[str]) -> str:
    text = ",".join(cells)
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


@contextmanager
def _large_cells() -> Iterator[None]:
    before = csv.field_size_limit(_LARGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)
