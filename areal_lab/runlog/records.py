"""The event log of a run, one JSON object per line; train, cosim and simulate share the schema.

    kind    class          content of the line
    run     RunHeader      mode, start, limits, processes: always the first line
    event   EventRecord    an event that the coordinator received
    action  ActionRecord   an action that the coordinator returned; follows its event, in order
    span    SpanRecord     an activity or wait of one process from `t_s` to `end_s`
    group   GroupRecord    a group of samples that ended: times, engine, versions, rewards
    metric  MetricRecord   one measured number, such as the memory of a process

Times are seconds since `RunHeader.started_at`. Lines are in the order of writing, and spans and
groups are written at their end, so `t_s` may decrease from line to line, but not among events and
actions. JSON has no infinity: a float that is not finite is the string "inf", "-inf" or "nan".

    {"kind":"event","t_s":2.25,"type":"GroupFinished","group":7,"head_version":0,"tail_version":1}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from areal_lab.control.events import Action, EngineId, Event, GroupId, Train, Version

SCHEMA: Final = 1
"""Incremented when older readers would misread a line."""

TRAINER: Final = "trainer"
REWARDS: Final = "rewards"
PIPELINE: Final = "pipeline"

Mode: TypeAlias = Literal["train", "cosim", "simulate"]
Scalar: TypeAlias = bool | int | float | str | None
Segments: TypeAlias = tuple[tuple[Version, int], ...]
"""(version, tokens) of each segment of one sample, in order."""

_NOT_FINITE: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def engine_process(engine: EngineId) -> str:
    """Name of an engine's process in `processes` and spans: `"engine 0"`."""
    return f"engine {engine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """The first line: what kind of run the log is of."""

    mode: Mode
    started_at: float
    """Seconds since the epoch (simulate: 0) at `t_s` 0."""
    limits: Mapping[str, Scalar]
    """The coordinator's constants, from `replay.limits_to_fields`; the log replays with them."""
    processes: tuple[str, ...]
    """The processes that spans may name, in the order in which pictures show them."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is {self.mode!r}, but must be one of {get_args(Mode)}")
        for name, value in self.limits.items():
            if isinstance(value, str) and value in _NOT_FINITE:
                raise ValueError(f"limit {name} is the text {value!r}; use a float")


@dataclass(frozen=True, slots=True)
class EventRecord:
    """The coordinator handled `event` at `t_s`."""

    t_s: float
    event: Event


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """An action that the coordinator returned for the event before it."""

    t_s: float
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """An activity of one process. Spans of a process may nest; the innermost one counts."""

    process: str
    name: str
    """`"forward/backward"`, `"decode"`, `"load weights"`, ...; `"wait"` for waiting."""
    t_s: float
    end_s: float
    cause: str = ""
    """Cause of idleness; a span with a cause is idle time, one without is busy time."""
    args: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_order(self.t_s, self.end_s, f"span {self.name!r} of {self.process}")


class TurnTimes(NamedTuple):
    """When and where one turn of a sample was generated."""

    sample: int
    """Index inside the group."""
    engine: EngineId
    start_s: float
    end_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group from its start on an engine until its samples were scored."""

    group: GroupId
    engine: EngineId
    t_s: float
    generated_s: float
    """When the last sample ended on the engine; scoring takes from here to `end_s`."""
    end_s: float
    rewards: tuple[float, ...]
    """One per sample; nan where scoring failed."""
    segments: tuple[Segments, ...]
    """One per sample. Lags follow from these and the version that trains on the group."""
    finish_reasons: tuple[str, ...]
    turns: tuple[TurnTimes, ...] = ()
    """Of samples with several turns, each of which may run on an engine of its own; by their end.
    """
    outcomes: tuple[str, ...] = ()
    """One per sample (`pipeline.rollout.outcomes`); empty in simulations and older logs."""

    def __post_init__(self) -> None:
        _check_order(self.t_s, self.generated_s, f"group {self.group}")
        _check_order(self.generated_s, self.end_s, f"scoring of group {self.group}")
        if not len(self.rewards) == len(self.segments) == len(self.finish_reasons):
            raise ValueError(
                f"group {self.group} has {len(self.rewards)} rewards, {len(self.segments)} samples "
                f"and {len(self.finish_reasons)} finish reasons, but needs one of each per sample"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """One number at one time, such as `peak_rss_bytes` of a process."""

    process: str
    name: str
    t_s: float
    value: float


Record: TypeAlias = RunHeader | EventRecord | ActionRecord | SpanRecord | GroupRecord | MetricRecord


# --- one line ------------------------------------------------------------------------------------


def encode(record: Record) -> str:
    """One line of the log, without the newline; `decode` gives the record back exactly."""
    match record:
        case EventRecord():
            value = _encode_typed("event", record.t_s, record.event)
        case ActionRecord():
            value = _encode_typed("action", record.t_s, record.action)
        case _:
            kind = _KIND_OF[type(record)]
            value = {"kind": kind}
            for name in _FIELDS[type(record)]:
                value[name] = getattr(record, name)
            if kind == "group":
                for name in ("turns", "outcomes"):
                    if not value[name]:
                        del value[name]
    try:
        return _dump(value)
    except ValueError:
        return _dump(finite_json(value))


def decode(line: str) -> Record:
    """The record of one line.

    Raises:
        ValueError: if the line is not a JSON object, its kind or type is unknown, a field is
            missing, unknown or of the wrong type, or it is the header of another schema.
    """
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a line of the log must be one JSON object, but is {line[:60]!r}")
    kind = value.pop("kind", None)
    if kind == "run" and (schema := value.get("schema")) != SCHEMA:
        raise ValueError(
            f"the log has schema {schema!r}, but this version of areal_lab reads schema {SCHEMA}; "
            "read it with the version that wrote it"
        )
    reader = _READERS.get(kind)
    if reader is None:
        raise ValueError(f"unknown kind {kind!r}; known are {', '.join(map(str, _READERS))}")
    try:
        return reader(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed {kind} record: {error}") from error


def finite_json(value: Any) -> Any:
    """`value` for valid JSON: floats that are not finite become "inf", "-inf" or "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: finite_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(inner) for inner in value]
    return value


# --- a whole log ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Log:
    """A log in memory."""

    header: RunHeader
    records: tuple[Record, ...]
    """Everything after the header."""
    cut: bool = False
    """Whether the last line was incomplete and skipped: the writing process was killed."""
    lasts_s: float = 0.0
    """Time that has passed, in seconds since the start, though nothing was written."""

    @property
    def events(self) -> Iterator[EventRecord]:
        """The events, in order."""
        return (record for record in self.records if isinstance(record, EventRecord))

    @property
    def actions(self) -> Iterator[ActionRecord]:
        """The actions, in order."""
        return (record for record in self.records if isinstance(record, ActionRecord))

    @property
    def spans(self) -> Iterator[SpanRecord]:
        """The spans, in the order they ended."""
        return (record for record in self.records if isinstance(record, SpanRecord))

    @property
    def groups(self) -> Iterator[GroupRecord]:
        """The groups, in the order they ended."""
        return (record for record in self.records if isinstance(record, GroupRecord))

    @property
    def end_s(self) -> float:
        """The latest time in the log; 0 for a log with a header only."""
        return max(self.lasts_s, max((end_of(record) for record in self.records), default=0.0))

    def until(self, t_s: float) -> Log:
        """The log as it was at a time, in seconds since the start: what had ended by then."""
        ended = tuple(record for record in self.records if end_of(record) <= t_s)
        return Log(self.header, ended, lasts_s=min(t_s, self.end_s))

    def lasting(self, t_s: float) -> Log:
        """The same log, of a run that has gone on until `t_s` without writing anything."""
        return replace(self, lasts_s=max(t_s, self.lasts_s))


def log_of(records: Sequence[Record]) -> Log:
    """The log of records in memory, of which the first must be the header.

    Raises:
        ValueError: if it is not.
    """
    if not records or not isinstance(records[0], RunHeader):
        raise ValueError("the first record of a log must be its run header")
    return Log(records[0], tuple(records[1:]))


def end_of(record: Record) -> float:
    """The end time of a record, in seconds since the start."""
    match record:
        case RunHeader():
            return 0.0
        case SpanRecord() | GroupRecord():
            return record.end_s
        case EventRecord() | ActionRecord() | MetricRecord():
            return record.t_s


def read_log(lines: Iterable[str], *, after: Log | None = None) -> Log:
    """Read a log; an incomplete last line, as a killed writer leaves it, is skipped and reported.

    Args:
        lines: of the log, from its header on, or those that follow `after`.
        after: the log so far.

    Raises:
        ValueError: naming the line, if it cannot be read, or if the first is not a header.
    """
    header = None if after is None else after.header
    records: list[Record] = [] if after is None else list(after.records)
    first = 1 if after is None else 2 + len(records)
    broken: tuple[int, json.JSONDecodeError] | None = None
    for number, line in enumerate(lines, start=first):
        if broken is not None:
            raise ValueError(f"line {broken[0]} of the log is not JSON: {broken[1]}")
        try:
            record = decode(line)
        except json.JSONDecodeError as error:
            broken = number, error  # the end of the log, if no line follows
            continue
        except ValueError as error:
            raise ValueError(f"line {number} of the log: {error}") from error
        if header is None:
            if not isinstance(record, RunHeader):
                raise ValueError("the first line of a log must be its run header (kind run)")
            header = record
        elif isinstance(record, RunHeader):
            raise ValueError(f"line {number} of the log is a second run header; only one may be")
        else:
            records.append(record)
    if header is None:
        raise ValueError("the log has no complete line: the run ended before it started")
    return Log(header, tuple(records), cut=broken is not None)


# --- how records become JSON and back ------------------------------------------------------------

_dump: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=dict).encode
_TYPES: Final[dict[str, type[Any]]] = {t.__name__: t for t in (*get_args(Event), *get_args(Action))}
_EVENT_NAMES: Final = frozenset(t.__name__ for t in get_args(Event))
_KIND_OF: Final[dict[type[Any], str]] = {
    RunHeader: "run",
    SpanRecord: "span",
    GroupRecord: "group",
    MetricRecord: "metric",
}
_FIELDS: Final = {cls: tuple(f.name for f in fields(cls)) for cls in (*_TYPES.values(), *_KIND_OF)}
_JSON_TYPES: Final[dict[str, type[Any]]] = {"str": str, "bool": bool, "float": float}
_JSON_TYPE: Final = {
    cls: {
        # With `from __future__ import annotations`, types are text. Other types are counts.
        f.name: _JSON_TYPES.get(str(f.type), list if str(f.type).startswith("tuple") else int)
        for f in fields(cls)
    }
    for cls in _TYPES.values()
}
_OPTIONAL_FIELDS: Final = {
    # Fields that older logs do not have.
    cls: {f.name for f in fields(cls) if f.default is not MISSING}
    for cls in _TYPES.values()
}


def _check_order(start_s: float, end_s: float, what: str) -> None:
    if not start_s <= end_s:
        raise ValueError(
            f"{what} starts at {start_s} s and ends at {end_s} s, but must not end first"
        )


def _encode_typed(kind: str, t_s: float, value: Event | Action) -> dict[str, Any]:
    cls = type(value)
    line = {"kind": kind, "t_s": t_s, "type": cls.__name__}
    for name in _FIELDS[cls]:
        line[name] = getattr(value, name)
    if isinstance(value, Train) and not value.rest:
        del line["rest"]  # only of batches in parts
    return line


def _float(value: float | str) -> float:
    if isinstance(value, str):
        return _NOT_FINITE[value]
    return float(value)


def _scalars(values: dict[str, Scalar]) -> dict[str, Scalar]:
    return {k: _NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in values.items()}


def _floats(values: dict[str, float | str]) -> dict[str, float]:
    return {name: _float(value) for name, value in values.items()}


def _rewards(values: list[float | str]) -> tuple[float, ...]:
    return tuple(_float(value) for value in values)


def _segments(samples: list[list[tuple[int, int]]]) -> tuple[Segments, ...]:
    return tuple(tuple((version, tokens) for version, tokens in one) for one in samples)


def _turns(turns: list[tuple[int, int, float, float, int]]) -> tuple[TurnTimes, ...]:
    return tuple(TurnTimes(*turn) for turn in turns)


_CONVERTED: Final[dict[type[Any], dict[str, Callable[[Any], Any]]]] = {
    RunHeader: {"started_at": _float, "limits": _scalars, "processes": tuple},
    SpanRecord: {"t_s": _float, "end_s": _float, "args": _floats},
    GroupRecord: {
        **dict.fromkeys(("t_s", "generated_s", "end_s"), _float),
        **{"rewards": _rewards, "segments": _segments, "finish_reasons": tuple, "turns": _turns},
        "outcomes": tuple,
    },
    MetricRecord: {"t_s": _float, "value": _float},
}
"""The fields that JSON has in another form."""


def _read(cls: type[Any], value: dict[str, Any]) -> Any:
    for name, convert in _CONVERTED[cls].items():
        if name in value:  # a field that older logs do not have, or one that the class misses
            value[name] = convert(value[name])
    return cls(**value)


def _read_typed(value: dict[str, Any], *, event: bool) -> Any:
    name = value.pop("type")
    cls = _TYPES.get(name)
    if cls is None or (name in _EVENT_NAMES) is not event:
        raise ValueError(f"unknown {'event' if event else 'action'} type {name!r}")
    for field_name, json_type in _JSON_TYPE[cls].items():
        if field_name in _OPTIONAL_FIELDS[cls] and field_name not in value:
            continue
        inner = value[field_name]
        if json_type is float and type(inner) in (int, float, str):
            value[field_name] = inner = _float(inner)
        if type(inner) is not json_type:
            raise TypeError(f"{name}.{field_name} is {inner!r}, not a {json_type.__name__}")
        if json_type is list:
            value[field_name] = tuple(value[field_name])
    return cls(**value)


_READERS: Final[dict[str | None, Callable[[dict[str, Any]], Record]]] = {
    "event": lambda value: EventRecord(_float(value.pop("t_s")), _read_typed(value, event=True)),
    "action": lambda value: ActionRecord(_float(value.pop("t_s")), _read_typed(value, event=False)),
    **{kind: partial(_read, cls) for cls, kind in _KIND_OF.items()},
}
