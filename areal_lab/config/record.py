"""A record of settings: each field states its type, bounds, choices, unit and default.

    class OvenConfig(Record):
        degrees: Annotated[float, Ge(0), Le(300), About(unit="Celsius")] = 200.0
        ...                                   and a string that describes it

    OvenConfig(degrees=400)    ConfigError: degrees is 400, but must be a number from 0 to 300 ...
    oven.degrees = 400         the same

The annotation is the single source: pydantic validates with it, and `allowed` turns it into words
for errors, `--help` and the reference pages (`areal_lab.config.reference`, which also reads the
string below the field).
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_core.core_schema import ValidationInfo

from areal_lab.config.problem import ConfigError, Kind, Problem, below
from areal_lab.config.seams import of_value
from areal_lab.config.suggest import nearest


@dataclass(frozen=True, slots=True)
class About:
    """Parts of an annotation that are only shown to users."""

    unit: str = ""
    """Unit, if the name does not end in it (`_s`, `_h`, `_tokens`)."""
    hint: str = ""
    """Reason of a bound, or meaning of special values; the end of the error message."""


Count = Annotated[int, Ge(1)]
"""At least one of something."""
Whole = Annotated[int, Ge(0)]
"""0 or more of something."""
Positive = Annotated[float, Gt(0), AllowInfNan(False)]
NonNegative = Annotated[float, Ge(0), AllowInfNan(False)]
Share = Annotated[float, Ge(0), Le(1)]

_UNITS = {"_s": "seconds", "_h": "hours", "_tokens": "tokens", "_dollars": "dollars"}
"""Units by the suffix of a name."""
_NOUNS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_FINITE = {"a number": "a finite number", "numbers": "finite numbers"}
_SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
_NUMBER_AND_UNIT = re.compile(r"\s*([-+]?\d[\d.]*(?:e[-+]?\d+)?)\s*\D")
_T = TypeVar("_T")
_R = TypeVar("_R", bound="Record")


class Record(BaseModel):
    """Settings, validated at construction and at assignment.

    Raises:
        ConfigError: one line per value that is not allowed.
    """

    model_config = ConfigDict(
        validate_assignment=True,
        extra="forbid",
        coerce_numbers_to_str=True,  # `name: 2024` in a YAML file
        protected_namespaces=(),  # a setting may be called model_something
        defer_build=True,  # `--help` needs the fields but no validators
    )

    def __init__(self, /, **values: Any) -> None:
        """See the fields."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(*_problems(type(self), error, values)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Validate and assign a value."""
        if found := _assigned(self, name, value):
            raise ConfigError(*found)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: _T, info: ValidationInfo) -> _T:
        hint = cls.model_fields[str(info.field_name)].annotation
        takes_bool = bool in (hint, *get_args(hint))
        if isinstance(value, bool) and not takes_bool:
            raise ValueError("true and false are not numbers")
        return value

    def with_settings(self, values: Mapping[str, Any]) -> Self:
        """An independent copy with these settings: `{"workload.steps": 5, "seeds": 1}`.

        Raises:
            ConfigError: one line per unknown name and per value that is not allowed.
        """
        changed = _copied(self)
        found: list[Problem] = []
        for name, value in values.items():
            group, _, leaf = name.rpartition(".")
            try:
                record = value_of(changed, group) if group else changed
                if not isinstance(record, Record) or leaf not in type(record).model_fields:
                    raise AttributeError
            except AttributeError:
                found.append(_unknown(name, [one.name for one in settings(type(self))]))
                continue
            known = record.__dict__[leaf]
            # Equal values need no validation, which takes most of the time; True equals 1.
            if known != value or type(known) is not type(value):
                found += _assigned(record, leaf, value, f"{group}." if group else "")
        if found:
            raise ConfigError(*found)
        return changed


class Bounds(NamedTuple):
    """Range of the numbers that a setting allows; None where there is no bound."""

    least: float | None = None
    most: float | None = None
    above: bool = False
    """A number must be above `least`, which itself is not allowed."""
    below: bool = False
    """A number must be below `most`, which itself is not allowed."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a record or of a nested record."""

    name: str
    """Dotted name, such as `actor.optimizer.lr`."""
    hint: Any
    """Its type, with annotations."""
    default: Any
    """`PydanticUndefined` if the field has no default."""
    record: type[Record]
    """The record with this field."""

    @property
    def leaf(self) -> str:
        """Name of the field in its record."""
        return self.name.rpartition(".")[2]

    @property
    def group(self) -> str:
        """Name without the leaf, such as `actor.optimizer.`; empty at the top level."""
        return self.name.removesuffix(self.leaf)

    @property
    def is_text(self) -> bool:
        """Whether it holds text, including a choice of names."""
        bare = _bare(self.hint)
        return bare is str or (
            get_origin(bare) is Literal and all(isinstance(one, str) for one in get_args(bare))
        )

    @property
    def is_mapping(self) -> bool:
        """Whether it holds a mapping of free names, whose entries may be set by dotted name."""
        return get_origin(_bare(self.hint)) is dict

    @property
    def choices(self) -> tuple[Any, ...]:
        """The names that it allows, or allows in its list; empty if it is not a choice."""
        bare = _bare(self.hint)
        if get_origin(bare) is list:
            bare = _bare(get_args(bare)[0])
        return get_args(bare) if get_origin(bare) is Literal else ()

    @property
    def bounds(self) -> Bounds:
        """Range of its number, or of the numbers in its list."""
        found = {
            type(one): getattr(one, type(one).__name__.lower())
            for one in _annotations(self.hint)
            if type(one) in _SIGNS
        }
        return Bounds(
            found.get(Ge, found.get(Gt)), found.get(Le, found.get(Lt)), Gt in found, Lt in found
        )

    @property
    def allowed(self) -> str:
        """Allowed values in words, with the unit: `a finite number > 0, in seconds, or null`."""
        value, unit = _without_none(self.hint), self.unit
        null = value is not self.hint
        return _allowed(value) + f", in {unit}" * bool(unit) + ", or null" * null

    @property
    def unit(self) -> str:
        """Unit from the annotation or the suffix of the name; empty if there is none."""
        for one in _annotations(self.hint):
            if isinstance(one, About) and one.unit:
                return one.unit
        return next((unit for end, unit in _UNITS.items() if self.leaf.endswith(end)), "")

    def wrong(self, value: Any) -> Problem:
        """The problem of a value that is not allowed."""
        message = f"{self.name} is {value!r}, but must be {self.allowed}{self._fix(value)}"
        return Problem(Kind.SETTINGS, self.name, message)

    def _fix(self, value: Any) -> str:
        bare = _bare(self.hint)
        number = _NUMBER_AND_UNIT.match(value) if isinstance(value, str) else None
        if number and not self.is_text:
            return f"; write {number.group(1)}, without a unit"
        if get_origin(bare) is Literal:
            known = [str(one) for one in get_args(bare)]
            return of_value(self.name, value) or nearest(str(value), known)
        if get_origin(bare) is list:
            fits = isinstance(value, str) and get_args(bare)[0] is str
            if example := self.default or ([value] if fits else []):
                return f"; for example {shlex.quote(f'{self.name}={json.dumps(example)}')}"
        hints = [one.hint for one in _annotations(self.hint) if isinstance(one, About) and one.hint]
        if hints:
            return f"; {hints[0]}"
        if self.default in (None, "", [], PydanticUndefined):
            return ""
        return f"; the default is {shown_default(self.default)}"


def settings(record: type[Record], prefix: str = "") -> Iterator[Setting]:
    """All settings of a record in the order of definition, then those of nested records."""
    groups: list[tuple[str, type[Record]]] = []
    for name, field in record.model_fields.items():
        kind: Any = field.annotation
        if is_record(kind):
            groups.append((f"{prefix}{name}.", kind))
        else:
            yield _setting(record, name, field, prefix)
    for below_it, group in groups:
        yield from settings(group, below_it)


def find_setting(record: type[Record], name: str) -> Setting:
    """The setting with this dotted name: its default, bounds, choices and unit.

        find_setting(TrainConfig, "actor.eps_clip").bounds    Bounds(least=0, most=None, above=True)

    Raises:
        ConfigError: in one line, with the nearest name, if there is none.
    """
    known = {one.name: one for one in settings(record)}
    if name not in known:
        raise ConfigError(_unknown(name, known))
    return known[name]


def value_of(record: Any, name: str) -> Any:
    """The value of a setting or a group of settings, by dotted name."""
    for part in name.split("."):
        record = getattr(record, part)
    return record


def shown_default(default: Any) -> str:
    """A default as written in YAML."""
    if isinstance(default, bool):
        return str(default).lower()
    if default is None:
        return "null"
    return '""' if default == "" else str(default)


def _unknown(name: str, known: Iterable[str]) -> Problem:
    message = f"unknown setting {name!r}{nearest(name, list(known))}"
    return Problem(Kind.SETTINGS, name, message)


def _setting(record: type[Record], name: str, field: FieldInfo, prefix: str = "") -> Setting:
    hint = field.annotation
    if field.metadata:
        hint = Annotated[(hint, *field.metadata)]  # type: ignore[assignment]  # made at run time
    return Setting(prefix + name, hint, field.get_default(call_default_factory=True), record)


def _assigned(record: Record, name: str, value: Any, prefix: str = "") -> list[Problem]:
    """Assign a value; return the problems if it is not allowed."""
    try:
        BaseModel.__setattr__(record, name, value)
    except ValidationError as error:
        return list(_problems(type(record), error, {name: value}, prefix))
    return []


def _copied(record: _R) -> _R:
    """A copy that shares no records, lists or mappings, without validation."""
    twin = record.model_copy()
    for name in _shareable(type(record)):
        value = record.__dict__[name]
        if isinstance(value, list):
            value = [_copied(one) if isinstance(one, Record) else one for one in value]
        else:
            value = _copied(value) if isinstance(value, Record) else copy.deepcopy(value)
        twin.__dict__[name] = value
    return twin


@cache
def _shareable(record: type[Record]) -> tuple[str, ...]:
    """Fields that hold records, lists or mappings."""
    kinds = {name: field.annotation for name, field in record.model_fields.items()}
    return tuple(
        name for name, kind in kinds.items() if is_record(kind) or get_origin(kind) in (list, dict)
    )


def _problems(
    record: type[Record], error: ValidationError, values: Mapping[str, Any], prefix: str = ""
) -> Iterator[Problem]:
    """One problem per field, in our own words instead of pydantic's."""
    reported: set[object] = set()
    errors = error.errors(include_url=False)
    misspelled = any(one["type"] == "extra_forbidden" for one in errors)
    for one in errors:
        name, *rest = one["loc"]
        inner = one.get("ctx", {}).get("error")
        place = prefix + str(name) + "".join(f"[{part}]" for part in rest)
        if isinstance(inner, ConfigError):
            yield from (below(place, problem) for problem in inner.problems)
        elif one["type"] == "model_type":  # an entry of a list of records
            kind: Any = record.model_fields[str(name)].annotation
            entry = _allowed(get_args(kind)[0] if rest else kind)
            message = f"{place} is {one['input']!r}, but must be {entry}"
            yield Problem(Kind.SETTINGS, place, message)
        elif name not in reported and not (misspelled and one["type"] == "missing"):
            reported.add(name)
            yield _problem(record, str(name), one["type"], values, prefix)


def _problem(
    record: type[Record], name: str, kind: str, values: Mapping[str, Any], prefix: str
) -> Problem:
    known, full = record.model_fields, f"{prefix}{name}"
    if name not in known:
        near = nearest(name, list(known)) or f"; known are {', '.join(known)}"
        return Problem(Kind.SETTINGS, full, f"{full} is not a setting{near}")
    setting = _setting(record, name, known[name], prefix)
    if kind == "missing":
        return Problem(Kind.SETTINGS, full, f"{full} is missing, but must be {setting.allowed}")
    return setting.wrong(values[name])


def is_record(hint: Any) -> bool:
    """Whether the type of a field is a record of settings."""
    return isinstance(hint, type) and issubclass(hint, Record)


def _without_none(hint: Any) -> Any:
    """An optional type without None."""
    rest = [one for one in get_args(hint) if one is not NoneType]
    return rest[0] if get_origin(hint) in (Union, UnionType) and len(rest) == 1 else hint


def _bare(hint: Any) -> Any:
    """A type without annotations and None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    inner = _without_none(hint)
    return hint if inner is hint else _bare(inner)


def _annotations(hint: Any) -> tuple[Any, ...]:
    """All annotations of a type and its parts."""
    if get_origin(hint) is Annotated:
        inner, *own = get_args(hint)
        return (*own, *_annotations(inner))
    if get_origin(hint) in (Union, UnionType, list):
        return tuple(one for part in get_args(hint) for one in _annotations(part))
    return ()


def _allowed(hint: Any, nouns: Mapping[type, str] = _NOUNS) -> str:
    """Allowed values of a type in words: `an integer >= 1`, `one of a, b`."""
    bounds: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        bounds = (*bounds, *more)
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return str(inner[0]) if len(inner) == 1 else f"one of {', '.join(map(str, inner))}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_allowed, inner))
    if get_origin(hint) is list:
        one_of = get_origin(_bare(inner[0])) is Literal
        return f"a list{', each' if one_of else ' of'} {_allowed(inner[0], _PLURALS)}"
    if get_origin(hint) is dict:
        of = "" if inner[1] is Any else f" of names to {_allowed(inner[1], _PLURALS)}"
        return f"a mapping{of}"
    if is_record(hint):
        return f"{{{', '.join(hint.model_fields)}}}"
    return _with_bounds(nouns[hint], bounds)


def _with_bounds(noun: str, bounds: tuple[Any, ...]) -> str:
    limits = {
        type(one): getattr(one, type(one).__name__.lower()) for one in bounds if type(one) in _SIGNS
    }
    if AllowInfNan(False) in bounds and not limits.keys() & {Le, Lt}:
        noun = _FINITE[noun]
    if limits.keys() == {Ge, Le}:
        return f"{noun} from {_shown(limits[Ge])} to {_shown(limits[Le])}"
    text = " and ".join(f"{_SIGNS[kind]} {_shown(limit)}" for kind, limit in limits.items())
    return f"{noun} {text}".rstrip()


def _shown(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
