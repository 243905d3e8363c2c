"""Parse a mapping of a config, such as `actor.loss`, into calls of named functions, or problems.

    {name: policy_loss, surrogate: {name: cispo}, correct: [{name: truncate, cap: 5}]}
        --read_call--> Call(policy_loss, parts={surrogate: Call, correct: (Call,)})

Without torch. A custom function (`module:function`) is not imported unless `look_up` does: its
keywords are then unchecked, until a separate process checks them
(`areal_lab.training.objective.trial_call`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from areal_lab.config.mappings import NAME, named
from areal_lab.config.problem import Kind, Problem
from areal_lab.config.unknown import did_you_mean
from areal_lab.training.objective.formula_index import find_formula, formulas, known_names
from areal_lab.training.objective.formulas import (
    EXAMPLES,
    FACTS,
    SEGMENTS,
    Formula,
    Keyword,
    Role,
    Value,
)

LookUp: TypeAlias = Callable[[str, Role], Formula]
"""Function from `module:function` and a role to a formula; raises ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function with what a config binds to it."""

    formula: Formula
    values: Mapping[str, Any] = field(default_factory=dict)
    """Keywords with numbers, pairs (tuples), truth values, text or None."""
    parts: Mapping[str, Call | tuple[Call, ...]] = field(default_factory=dict)
    """Keywords with functions; several corrections are chained."""
    segments: Mapping[str, str] = field(default_factory=dict)
    """Keywords with a fact of the batch, by its name."""


def not_looked_up(path: str, role: Role) -> Formula:
    """A custom function of which nothing is known; any keyword may be its own."""
    return Formula(name=path, path=path, role=role, takes_any=True)


def read_call(
    setting: str, given: Any, role: Role, look_up: LookUp = not_looked_up
) -> tuple[Call | None, list[Problem]]:
    """The call that a mapping describes, and everything that is wrong with it."""
    given = named(given)
    if not isinstance(given, Mapping) or NAME not in given:
        what = f"but must name a {role}" if isinstance(given, Mapping) else f"but must be a {role}"
        example = f"{what}, as {{{NAME}: {EXAMPLES[role]}}}"
        return None, [_problem(setting, f"{setting} is {_shown(given)}, {example}")]
    try:
        formula = _find(str(given[NAME]), role, look_up)
    except ValueError as error:
        return None, [
            _problem(f"{setting}.{NAME}", f"{setting}.{NAME} is {given[NAME]!r}, {error}")
        ]
    reader = _Reader(setting, formula, look_up)
    for key, value in given.items():
        if key != NAME:
            reader.read(str(key), value)
    reader.find_missing(given)
    call = Call(formula=formula, values=reader.values, parts=reader.parts, segments=reader.segments)
    return (None if reader.problems else call), reader.problems


class _Reader:
    """Parser of the keywords of one mapping; collects problems."""

    def __init__(self, setting: str, formula: Formula, look_up: LookUp) -> None:
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.parts: dict[str, Call | tuple[Call, ...]] = {}
        self.segments: dict[str, str] = {}
        self._setting, self._formula, self._look_up = setting, formula, look_up

    def read(self, key: str, value: Any) -> None:
        """One keyword with what the config gives it."""
        full, formula = f"{self._setting}.{key}", self._formula
        known = formula.settable
        if key not in known and formula.takes_any:
            self.values[key] = _number(value)
            return
        if key not in known:
            self._refuse(full, self._unknown(full, key))
            return
        keyword = known[key]
        if keyword.part is not None and not (value is None and keyword.optional):
            self._read_part(full, keyword.part, key, value)
            return
        if keyword.value is Value.SEGMENTS and value in SEGMENTS:
            self.segments[key] = value
            return
        taken = _taken(keyword, value)
        if taken is _WRONG:
            self._refuse(full, f"{full} is {_shown(value)}, but must be {keyword.allowed}")
            return
        self.values[key] = taken

    def find_missing(self, given: Mapping[str, Any]) -> None:
        """Refuse missing required keywords; take a default that needs facts of the batch."""
        for key, keyword in self._formula.settable.items():
            full = f"{self._setting}.{key}"
            if key in given:
                continue
            if keyword.default is None:
                self._refuse(
                    full,
                    f"{full} is missing, but {self._formula.short_name} has no default for it; "
                    f"it must be {keyword.allowed}",
                )
            elif keyword.part is not None and keyword.default in formulas(keyword.part):
                default = formulas(keyword.part)[keyword.default]
                if default.facts:
                    self.parts[key] = Call(formula=default)

    def _read_part(self, full: str, role: Role, key: str, value: Any) -> None:
        if role is Role.CORRECTION and isinstance(value, list):
            calls = [self._part(f"{full}[{place}]", role, one) for place, one in enumerate(value)]
            if not value:
                self._refuse(
                    full, f"{full} is [], but must be {self._formula.settable[key].allowed}"
                )
            self.parts[key] = tuple(call for call in calls if call is not None)
            return
        call = self._part(full, role, value)
        if call is not None:
            self.parts[key] = call

    def _part(self, full: str, role: Role, value: Any) -> Call | None:
        call, problems = read_call(full, value, role, self._look_up)
        self.problems += problems
        return call

    def _unknown(self, full: str, key: str) -> str:
        formula = self._formula
        name = formula.short_name
        if key in formula.facts or (key in FACTS and formula.role is not Role.ADVANTAGE):
            return f"{full} is filled by the trainer, with that of the batch; leave it out"
        if any(one.name == key for one in formula.keywords):
            return f"{full} takes a tensor, which YAML cannot hold; leave it out"
        known = formula.settable
        hint = did_you_mean(key, list(known)) if known else "it has none"
        if key in ("ratio", "aggregate", "surrogate") and formula.role is Role.LOSS:
            hint += "; the parts of a loss are keywords of policy_loss"
        return f"{full} is no keyword of {name}; {hint}"

    def _refuse(self, setting: str, message: str) -> None:
        self.problems.append(_problem(setting, message))


def _find(name: str, role: Role, look_up: LookUp) -> Formula:
    if ":" in name:
        return look_up(name, role)
    formula = find_formula(role, name)
    if formula is None:
        others = [one for one in Role if one is not role and find_formula(one, name)]
        near = did_you_mean(name, known_names(role))
        if others:
            near = f"{name} is for {others[0].value}, as in docs/losses.md"
        raise ValueError(f"which is no {role}; {near}")
    if formula.refusal:
        raise ValueError(f"which {formula.refusal}; known are {', '.join(known_names(role))}")
    return formula


_WRONG: Final = object()
_MOST_SHOWN: Final = 80
"""Characters of a value that a message repeats."""


def _taken(keyword: Keyword, value: Any) -> Any:
    """Value as the function takes it; `_WRONG` if it does not fit."""
    if value is None:
        return None if keyword.optional else _WRONG
    number = _number(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    pair = isinstance(number, tuple) and len(number) == 2
    fits = {
        Value.NUMBER: is_number,
        Value.INTEGER: is_number and isinstance(number, int),
        Value.TRUTH: isinstance(value, bool),
        Value.TEXT: isinstance(value, str),
        Value.PAIR: pair,
        Value.NUMBER_OR_PAIR: is_number or pair,
        Value.ANY: isinstance(number, bool | int | float | str | tuple),
    }
    if not fits.get(keyword.value, False):
        return _WRONG
    if keyword.value in (Value.NUMBER, Value.PAIR, Value.NUMBER_OR_PAIR):
        return tuple(map(float, number)) if pair else float(number)
    return value if keyword.value is Value.TEXT else number


def _number(value: Any) -> Any:
    """Parse `inf` as a number, and lists of numbers as tuples."""
    if isinstance(value, str) and value.lstrip("-") in ("inf", ".inf"):
        return float(value.replace(".", ""))
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = tuple(_number(one) for one in value)
        right = all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers)
        return numbers if right else value
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _problem(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)
