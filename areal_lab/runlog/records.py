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
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, get_args

from pydantic import BeforeValidator, ConfigDict, Field

from areal_lab.control.drift import NOT_MEASURED, Measured
from areal_lab.control.events import Action, EngineId, Event, Train, TrainStepDone, Version
from areal_lab.host.foreign import Parsed, parse_json

SCHEMA: Final = 1
"""Incremented when older readers would misread a line."""

TRAINER: Final = "trainer"
REWARDS: Final = "rewards"
PIPELINE: Final = "pipeline"

Mode: TypeAlias = Literal["train", "cosim", "simulate", "imported"]
IMPORTED: Final = "imported"
"""Mode of a log of another framework: spans and metrics, and no events or actions."""
Scalar: TypeAlias = bool | int | float | str | None
Segments: TypeAlias = tuple[tuple[Version, int], ...]
"""(version, tokens) of each segment of one sample, in order."""

_NOT_FINITE: Final = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
MOST: Final = 2**53
"""Largest group, version, engine or count in a log."""


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _scalars(values: Any) -> Any:
    return {k: _number(v) for k, v in values.items()} if isinstance(values, dict) else values


Number: TypeAlias = Annotated[float, BeforeValidator(_number), Field(strict=True)]
"""A float in a line, which may be "inf", "-inf" or "nan"."""
Seconds: TypeAlias = Annotated[
    float, BeforeValidator(_number), Field(strict=True, ge=0, le=1e11, allow_inf_nan=False)
]
"""A time in a line; the largest ones are seconds since the epoch."""
Count: TypeAlias = Annotated[int, Field(strict=True, ge=-1, le=MOST)]
"""A group, version, engine or count in a line; -1 has a meaning for versions."""
_Scalars: TypeAlias = Annotated[Mapping[str, Scalar], BeforeValidator(_scalars)]
_NO_OTHERS: Final = ConfigDict(extra="forbid")


def engine_process(engine: EngineId) -> str:
    """Name of an engine's process in `processes` and spans: `"engine 0"`."""
    return f"engine {engine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """First line of a log, with the kind of run."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    mode: Mode
    started_at: Seconds
    """Seconds since the epoch (simulate: 0) at `t_s` 0."""
    limits: _Scalars
    """The coordinator's constants, from `replay.limits_to_fields`; the log replays with them."""
    processes: tuple[str, ...]
    """Processes that spans may name, in the order of pictures."""
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

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    process: str
    name: str
    """`"forward/backward"`, `"decode"`, `"load weights"`, ...; `"wait"` for waiting."""
    t_s: Seconds
    end_s: Seconds
    cause: str = ""
    """Cause of idleness; a span with a cause is idle time, one without is busy time."""
    args: Mapping[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_order(self.t_s, self.end_s, f"span {self.name!r} of {self.process}")


class TurnTimes(NamedTuple):
    """Time and engine of one turn of a sample."""

    sample: Count
    """Index inside the group."""
    engine: Count
    start_s: Seconds
    end_s: Seconds
    tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group from its start on an engine until its samples were scored."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    group: Count
    engine: Count
    t_s: Seconds
    generated_s: Seconds
    """End of the last sample on the engine; scoring takes from here to `end_s`."""
    end_s: Seconds
    rewards: tuple[Number, ...]
    """One per sample; nan where scoring failed."""
    segments: tuple[tuple[tuple[Count, Count], ...], ...]
    """One per sample. Lags follow from these and the version that trains on the group."""
    finish_reasons: tuple[str, ...]
    turns: tuple[TurnTimes, ...] = ()
    """Turns of multi-turn samples, each of which may run on a different engine; by their end."""
    outcomes: tuple[str, ...] = ()
    """One per sample (`pipeline.rollout.scored.OUTCOMES`); empty in simulations and older logs."""

    def __post_init__(self) -> None:
        _check_order(self.t_s, self.generated_s, f"group {self.group}")
        _check_order(self.generated_s, self.end_s, f"scoring of group {self.group}")
        if not len(self.rewards) == len(self.segments) == len(self.finish_reasons):
            raise ValueError(
                f"group {self.group} has {len(self.rewards)} rewards, {len(self.segments)} samples "
                f"and {len(self.finish_reasons)} finish reasons, but needs one of each per sample"
            )
        for turn in self.turns:
            if not 0 <= turn.sample < len(self.rewards):
                raise ValueError(
                    f"group {self.group} has a turn of sample {turn.sample}, but "
                    f"{len(self.rewards)} samples"
                )
            _check_order(turn.start_s, turn.end_s, f"a turn of group {self.group}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """One number at one time, such as `peak_rss_bytes` of a process."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    process: str
    name: str
    t_s: Seconds
    value: Number


Record: TypeAlias = RunHeader | EventRecord | ActionRecord | SpanRecord | GroupRecord | MetricRecord


# --- one line ------------------------------------------------------------------------------------


def encode(record: Record) -> str:
    """Encode a record as one line, without the newline; `decode` restores it exactly."""
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
    """Parse one line."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError(f"a line of the log must be one JSON object, but is {line[:60]!r}")
    kind = value.pop("kind", None)
    if kind == "run" and (schema := value.get("schema")) != SCHEMA:
        raise ValueError(
            f"the log has schema {schema!r}, but this version of areal_lab reads schema {SCHEMA}; "
            "read it with the version that wrote it"
        )
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise ValueError(f"unknown kind {kind!r}; known are {', '.join(map(str, _READERS))}")
    try:
        return reader(value)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"malformed {kind} record: {error}") from error


def whole(value: float) -> int:
    """Value of a metric that is a count; 0 if it is not finite."""
    return int(value) if math.isfinite(value) else 0


def finite_json(value: Any) -> Any:
    """Convert to valid JSON: floats that are not finite become "inf", "-inf" or "nan"."""
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
    """True if the last line was incomplete and skipped: the writing process was killed."""
    lasts_s: float = 0.0
    """Seconds since the start that have passed, even without records."""

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
        """The spans, in order of their ends."""
        return (record for record in self.records if isinstance(record, SpanRecord))

    @property
    def groups(self) -> Iterator[GroupRecord]:
        """The groups, in order of their ends."""
        return (record for record in self.records if isinstance(record, GroupRecord))

    @property
    def end_s(self) -> float:
        """The latest time in the log; 0 for a log with a header only."""
        return max(self.lasts_s, max((end_of(record) for record in self.records), default=0.0))

    def until(self, t_s: float) -> Log:
        """The log as it was at a time, in seconds since the start: records that had ended by
        then.
        """
        ended = tuple(record for record in self.records if end_of(record) <= t_s)
        return Log(self.header, ended, lasts_s=min(t_s, self.end_s))

    def lasting(self, t_s: float) -> Log:
        """The same log of a run that has continued until `t_s` without writing anything."""
        return replace(self, lasts_s=max(t_s, self.lasts_s))


def log_of(records: Sequence[Record]) -> Log:
    """Log of records in memory, of which the first must be the header."""
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


def read_log(lines: Iterable[str], *, after: Log | None = None, last_is_whole: bool = False) -> Log:
    """Parse a log; an incomplete last line of a killed writer is skipped and reported.

    With `last_is_whole` a last line that is not JSON is an error, because an incomplete one was
    left out before.
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
            if last_is_whole:
                raise ValueError(f"line {number} of the log is not JSON: {error}") from error
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
    if isinstance(value, TrainStepDone):
        for name in Measured._fields:
            if line[name] == NOT_MEASURED:
                del line[name]  # only of schedules that read it
    return line


def _read_typed(value: dict[str, Any], *, event: bool) -> Any:
    name = value.pop("type")
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None or (name in _EVENT_NAMES) is not event:
        raise ValueError(f"unknown {'event' if event else 'action'} type {name!r}")
    for field_name, json_type in _JSON_TYPE[cls].items():
        if field_name in _OPTIONAL_FIELDS[cls] and field_name not in value:
            continue
        inner = value[field_name]
        if json_type is float and type(inner) in (int, float, str):
            value[field_name] = inner = _NUMBER(inner)
        if type(inner) is not json_type:
            raise TypeError(f"{name}.{field_name} is {inner!r}, not a {json_type.__name__}")
        if json_type is list:
            value[field_name] = tuple(inner)
        for one in inner if json_type is list else (inner,):  # lists are of ids and counts
            if json_type in (list, int) and not (type(one) is int and -1 <= one <= MOST):
                raise ValueError(f"{name}.{field_name} has {one!r}, not a number up to {MOST:,}")
    return cls(**value)


def _read_timed(cls: type[Any], value: dict[str, Any], *, event: bool) -> Any:
    return cls(_SECONDS(value.pop("t_s")), _read_typed(value, event=event))


_NUMBER: Final = Parsed[float](Number)
_SECONDS: Final = Parsed[float](Seconds)
_READERS: Final[dict[str, Callable[[dict[str, Any]], Record]]] = {
    "event": partial(_read_timed, EventRecord, event=True),
    "action": partial(_read_timed, ActionRecord, event=False),
    **{kind: Parsed[Any](cls) for cls, kind in _KIND_OF.items()},
}
