"""Synthetic logs and the values that a correct reader finds; shapes after the sources."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent / "specimens"
SPECIMENS: Final = sorted(
    path
    for path in FOLDER.iterdir()
    if path.suffix in (".txt", ".jsonl", ".json", ".yaml", ".csv")
    and not path.name.endswith(".expected.json")
)
_NOT_VALUES: Final = ("traps", "note", "step_number", "late_line")
_REMARKS: Final[Mapping[str, float]] = {
    "tokens/(throughput*time) = 8": 8,
    "9120/1140 = 8": 8,
    "130/4 = 32.5 from the bar": 32.5,
    "42040 from 4.096e+04 and 8.3e+04: +-50": 42040,
    "44100 from 8.3e+04, 1.271e+05: +-50": 44100,
}
"""Expected values that are written as a remark, and their number."""


def expected_of(path: Path) -> dict[str, Any]:
    """Values beside a specimen."""
    found = json.loads((FOLDER / f"{path.stem}.expected.json").read_text())
    if found.get("framework") == "verl (by keys)":
        found["framework"] = "verl"
    if path.stem == "trl_console_transformers5":  # it prints four digits: '445.2'
        assert found["steps"][2]["response_length_mean"] == 445.25
        found["steps"][2]["response_length_mean"] = 445.2
    assert isinstance(found, dict)
    return found


def compared(
    found: Mapping[str, Any], expected: Mapping[str, Any], *, fewer: bool = False, where: str = ""
) -> list[str]:
    """Differences; `fewer` allows values and steps to be missing."""
    problems = []
    for name, value in expected.items():
        if name in _NOT_VALUES:
            continue
        problems += _difference(found.get(name), value, f"{where}{name}", fewer)
    return problems


def _difference(found: Any, value: Any, where: str, fewer: bool) -> list[str]:
    if fewer and found in (None, [], {}):
        return []
    if isinstance(value, list):
        return _list_difference(found, value, where, fewer)
    if isinstance(value, dict):
        return compared(found, value, fewer=fewer, where=f"{where}.")
    value = _REMARKS.get(value, value) if isinstance(value, str) else value
    numbers = isinstance(value, float | int) and isinstance(found, float | int)
    if numbers and math.isclose(found, value, rel_tol=1e-12, abs_tol=0):
        return []
    return [] if found == value else [f"{where} is {found!r}, not {value!r}"]


def _list_difference(found: Any, value: Sequence[Any], where: str, fewer: bool) -> list[str]:
    if not isinstance(found, list):
        return [f"{where} is {found!r}"]
    by_name = {_name(one): one for one in found}
    problems = []
    for one in value:
        name = _name(one)
        if name in by_name:
            problems += compared(by_name[name], one, fewer=fewer, where=f"{where}[{name}].")
        elif not fewer:
            problems.append(f"{where} has no {name}")
    names = [_name(one) for one in value]
    problems += [
        f"{where} has {name} too many"
        for name in by_name
        if name not in names and not (fewer and name[-1] is None)  # its place is not known
    ]
    return problems


def _name(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return (one.get("role"), one.get("pid"), one.get("step", one.get("version")))
