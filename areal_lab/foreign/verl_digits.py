"""Digits of verl's numbers: those of a last number that a paste cut, and the three of old versions.

    timing_s/reward:5.07     may be cut of 5.0749629735946655e-05: dropped
    actor/pg_clipfrac:0.000  of three decimals: unknown, not 0

Up to 0.4, verl prints three decimals; from 0.5 on, floats in full, with a point or an exponent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.foreign.record import ImportedRun
from areal_lab.foreign.scan import Row


def drop_cut_ends(rows: Sequence[Row], run: ImportedRun) -> None:
    """Drop the last number of a record that stops where two others go on: it may lack digits."""
    behind: Counter[str] = Counter()
    last: Counter[str] = Counter()
    for row in rows:
        keys = list(row.values)
        behind.update(keys[:-1])
        last.update(keys[-1:])
    for row in rows:
        key = next(reversed(row.values), "")
        if not _written(row.values.get(key)):
            continue
        if last[key] > 1:
            cut = row is rows[-1] and _shorter_than(rows[:-1], row, key)
        else:
            goes_on = behind[key] >= (1 if row is rows[-1] else 2)
            cut = goes_on or _lacks_digits(row.values, key)
        if cut or _lacks_point(key, str(row.values[key])):
            row.values[key], row.cut = "nan", True
            run.unread["values that are cut or unreadable"] += 1


_LONG: Final = 14
"""Significant digits of most floats, which verl prints in full from 0.5 on."""


def _lacks_digits(values: Mapping[str, Any], key: str) -> bool:
    """True if the number may go on: `5.07` may be cut of `5.0749629735946655e-05`."""
    text = str(values[key])
    if re.search(r"e[-+]\d$", text) or key == "perf/total_num_tokens":  # two others follow it
        return True
    full = sum(_digits(one) >= _LONG for name, one in values.items() if name != key)
    if full < 3 or "e" in text or _digits(text) >= _LONG:
        return False
    return float(text) * 1024 % 1 != 0


def _lacks_point(key: str, text: str) -> bool:
    """True for `7` where verl prints a float, such as `71.5`."""
    floats = ("timing", "actor/", "critic/", "fully_async/rollouter/", "response_length/")
    return "." not in text and "e" not in text and key.startswith((*floats, "perf/throughput"))


def _shorter_than(others: Sequence[Row], row: Row, key: str) -> bool:
    """True if others have the number in full and this one has not."""
    told = [one.values[key] for one in others if key in one.values]
    return _digits(row.values[key]) < _LONG and any(_digits(one) >= _LONG for one in told)


def _digits(value: Any) -> int:
    mantissa = str(value).lower().partition("e")[0]
    return sum(one.isdigit() for one in mantissa.lstrip("-0."))


def three_decimals(rows: Sequence[Row], run: ImportedRun) -> bool:
    """True if a log has numbers of three decimals only, as verl printed up to 0.4.

    The last number of a record may have fewer, where a paste was cut: it is dropped.
    """
    texts = [list(row.values.values()) for row in rows[:50]]
    inner = [one for record in texts for one in record[:-1] if _written(one)]
    ends = [record[-1] for record in texts if record and _written(record[-1])]
    full = all(re.fullmatch(r"-?\d+\.\d{3}", one) for one in inner)
    if len(inner) + len(ends) < 5 or not full or not inner:
        return False
    if not all(re.fullmatch(r"-?\d+(?:\.\d{0,3})?", one) for one in ends):
        return False
    for row in rows:
        key = next(reversed(row.values), "")
        value = row.values.get(key)
        if _written(value) and len(str(value).partition(".")[2]) < 3:
            row.values[key], row.cut = "nan", True
            run.unread["values that are cut or unreadable"] += 1
    return True


def _written(value: Any) -> bool:
    return isinstance(value, str) and value[-1:].isdigit()
