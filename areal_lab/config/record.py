"""A record of settings: each field states its type, bounds, choices, unit and default.

    class OvenConfig(Record):
        degrees: Annotated[float, Ge(0), Le(300), About(unit="Celsius")] = 200.0
        ...                                   and a string that describes it

    OvenConfig(degrees=400)    ConfigError: degrees is 400, but must be a number from 0 to 300 ...
    oven.degrees = 400         the same

The annotation is the single source: pydantic validates with it, and `allowed` turns it into words
for errors, `--help` and the reference pages (`areal_lab.config.dump`, which also reads the
string below the field).
"""

from __future__ import annotations

import copy
import json
import os
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
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    ConfigDict,
    ValidationError,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_core.core_schema import ValidationInfo

from areal_lab.config.problem import ConfigError, Kind, Problem, below
from areal_lab.config.unknown import nearest, of_value


@dataclass(frozen=True, slots=True)
class About:
    """Parts of an annotation that are only shown to users."""

    unit: str = ""
    """Unit, if the name does not end in it (`_s`, `_h`, `_tokens`)."""
    hint: str = ""
    """Reason of a bound, or meaning of special values; the end of the error message."""
    noun: str = ""
    """Noun for the value, instead of the noun of its type."""
    metavar: str = ""
    """Placeholder of the value of a command's option, instead of its type."""


Count = Annotated[int, Ge(1)]
"""Integer of at least 1."""
Whole = Annotated[int, Ge(0)]
"""Integer of at least 0."""
Positive = Annotated[float, Gt(0), AllowInfNan(False)]
NonNegative = Annotated[float, Ge(0), AllowInfNan(False)]
Share = Annotated[float, Ge(0), Le(1)]

_LONGEST_NAME_BYTES = 150
"""Length of a folder name given by a setting: file systems allow 255, and times are added to it."""
_LONGEST_PATH_BYTES = 2000
_LONGEST_PART_BYTES = 255
_FOLDER_NAME = re.compile(r"[^\W][^/\\\x00-\x1f\x7f]*")


def _folder_name(name: str) -> str:
    fits = 0 < len(_encoded(name)) <= _LONGEST_NAME_BYTES and name[-1] not in " ."
    if not (fits and _FOLDER_NAME.fullmatch(name)):
        raise ValueError("not a folder name")
    return name


def _folder_path(path: str) -> str:
    encoded = _encoded(path)
    longest = max(map(len, encoded.split(b"/")))
    if b"\0" in encoded or longest > _LONGEST_PART_BYTES or len(encoded) > _LONGEST_PATH_BYTES:
        raise ValueError("not a path")
    return path


def _encoded(text: str) -> bytes:
    return text.encode()  # raises a ValueError for half of a surrogate pair


_NAME = (
    f"a folder name of at most {_LONGEST_NAME_BYTES} bytes that begins with a letter, a digit or "
    "_, has no / or \\, and does not end with a dot or a space"
)
FolderName = Annotated[str, AfterValidator(_folder_name), About(noun=_NAME)]
"""Text that becomes part of the name of a folder."""
FolderNameOrEmpty = Annotated[
    str, AfterValidator(lambda name: name and _folder_name(name)), About(noun=f"{_NAME}, or empty")
]
"""Same as `FolderName`, for a setting that has a default."""
FolderPath = Annotated[
    str,
    AfterValidator(_folder_path),
    About(noun=f"a path with names of at most {_LONGEST_PART_BYTES} bytes each"),
]
"""Path of a folder to write into."""

_UNITS = {"_s": "seconds", "_h": "hours", "_tokens": "tokens", "_dollars": "dollars"}
"""Units by the suffix of a name."""
_NOUNS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings", bool: "true or false"}
_FINITE = {"a number": "a finite number", "numbers": "finite numbers"}
_SIGNS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
_MOST_INTEGER = 2**63 - 1
_SHOWN = 300
"""Characters of a value that an error repeats."""
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
        if found := _assigned(self, name, value):
            raise ConfigError(*found)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: _T, info: ValidationInfo) -> _T:
        hint = cls.model_fields[str(info.field_name)].annotation
        takes_bool = bool in (hint, *get_args(hint))
        if isinstance(value, bool) and not takes_bool:
            raise ValueError("true and false are not numbers")
        if isinstance(value, int) and abs(value) > _MOST_INTEGER:
            raise ValueError("larger than any integer of a file, a seed or a tensor")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _paths_are_text(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value

    def with_settings(self, values: Mapping[str, Any]) -> Self:
        """Return an independent copy with these settings: `{"workload.steps": 5, "seeds": 1}`."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                Problem(
                    Kind.SETTINGS,
                    "settings",
                    f"the settings are {values!r:.60}, but must be values by name, such as "
                    f"{{{next(iter(type(self).model_fields))!r}: ...}}",
                )
            )
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
            else:  # given all the same: no default follows others any more
                record.model_fields_set.add(leaf)
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
    """Type of the setting, with annotations."""
    default: Any
    """`PydanticUndefined` if the field has no default."""
    record: type[Record]
    """Record with this field."""

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
        """True if the value is text, including a choice of names."""
        bare = _bare(self.hint)
        return bare is str or (
            get_origin(bare) is Literal and all(isinstance(one, str) for one in get_args(bare))
        )

    @property
    def is_mapping(self) -> bool:
        """True if the value is a mapping of free names, whose entries may be set by dotted name."""
        return get_origin(_bare(self.hint)) is dict

    @property
    def choices(self) -> tuple[Any, ...]:
        """Names that the setting allows, or allows in its list; empty if it is not a choice."""
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
        """Unit from the annotation or the suffix of the name; empty without one."""
        for one in _annotations(self.hint):
            if isinstance(one, About) and one.unit:
                return one.unit
        return next((unit for end, unit in _UNITS.items() if self.leaf.endswith(end)), "")

    @property
    def bare(self) -> Any:
        """Its type, without annotations and None."""
        return _bare(self.hint)

    @property
    def metavar(self) -> str:
        """Placeholder of its value in `--help`; empty for that of its type."""
        found = (one.metavar for one in _annotations(self.hint) if isinstance(one, About))
        return next(filter(None, found), "")

    def wrong(self, value: Any) -> Problem:
        """Return the problem of a value that is not allowed."""
        if isinstance(value, int) and abs(value) > _MOST_INTEGER:
            shown = f"an integer of {value.bit_length()} bits"
            message = f"{self.name} is {shown}, but must be {self.allowed}, of at most 63 bits"
            return Problem(Kind.SETTINGS, self.name, message)
        message = f"{self.name} is {short(value)}, but must be {self.allowed}{self._fix(value)}"
        return Problem(Kind.SETTINGS, self.name, message)

    def _fix(self, value: Any) -> str:  # noqa: PLR0911 - a line for each kind of setting
        bare = _bare(self.hint)
        number = _NUMBER_AND_UNIT.match(value) if isinstance(value, str) else None
        if number and not self.is_text:
            if value.strip().endswith("%"):
                return f"; write {float(number.group(1)) / 100:g}, a share instead of percent"
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


@cache
def settings(record: type[Record], prefix: str = "") -> tuple[Setting, ...]:
    """All settings of a record in the order of definition, then those of nested records."""
    own: list[Setting] = []
    nested: list[Setting] = []
    for name, field in record.model_fields.items():
        kind: Any = field.annotation
        if is_record(kind):
            nested += settings(kind, f"{prefix}{name}.")
        else:
            own.append(_setting(record, name, field, prefix))
    return (*own, *nested)


def find_setting(record: type[Record], name: str) -> Setting:
    """Return the setting with this dotted name: its default, bounds, choices and unit.

    find_setting(TrainConfig, "actor.eps_clip").bounds    Bounds(least=0, most=None, above=True)
    """
    known = {one.name: one for one in settings(record)}
    if name not in known:
        raise ConfigError(_unknown(name, known))
    return known[name]


def given_settings(record: Record, *, defaults: bool = False) -> Iterator[Setting]:
    """List the settings that were given, in the order of definition.

    A shipped file gives none (`areal_lab.config.load`).

    Args:
        defaults: include those that were given their default value.
    """
    for one in settings(type(record)):
        holder = value_of(record, one.group.removesuffix(".")) if one.group else record
        if one.leaf in holder.model_fields_set and (
            defaults or getattr(holder, one.leaf) != one.default
        ):
            yield one


def forget_given(record: _R, names: Iterable[str]) -> _R:
    """Mark these settings of a record as not given by the user."""
    for name in names:
        group, _, leaf = name.rpartition(".")
        holder = value_of(record, group) if group else record
        holder.model_fields_set.discard(leaf)
    return record


def value_of(record: Any, name: str) -> Any:
    """Return the value of a setting or a group of settings, by dotted name."""
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
    message = f"unknown setting {short(name)}{nearest(name, list(known))}"
    return Problem(Kind.SETTINGS, name, message)


def _setting(record: type[Record], name: str, field: FieldInfo, prefix: str = "") -> Setting:
    hint = field.annotation
    if field.metadata:
        hint = Annotated[(hint, *field.metadata)]  # type: ignore[assignment]  # made at run time
    return Setting(
        prefix + name, hint, field.get_default(call_default_factory=True, validated_data={}), record
    )


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
    """One problem per field, in this project's words instead of pydantic's."""
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
    """Return whether the type of a field is a record of settings."""
    return isinstance(hint, type) and issubclass(hint, Record)


def _without_none(hint: Any) -> Any:
    rest = [one for one in get_args(hint) if one is not NoneType]
    return rest[0] if get_origin(hint) in (Union, UnionType) and len(rest) == 1 else hint


def _bare(hint: Any) -> Any:
    """A type without annotations and None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    inner = _without_none(hint)
    return hint if inner is hint else _bare(inner)


def _annotations(hint: Any) -> tuple[Any, ...]:
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


def short(value: Any) -> str:
    """A value for a message of one line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text):,} characters)"


def _with_bounds(noun: str, bounds: tuple[Any, ...]) -> str:
    noun = next((one.noun for one in bounds if isinstance(one, About) and one.noun), noun)
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
