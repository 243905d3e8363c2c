"""Read a recorded or running run: its log, metrics, settings and samples.

    RUN/events.jsonl                      --> log --> steps, groups, spans
    RUN/metrics.jsonl, summary.json, config.yaml  --> those that exist
    RUN/trajectories/                     --> samples, tokens, at their first use

    run = read_run(folder)
    run.steps                             a pandas frame; also groups, spans, samples
    run.tokens["versions"]                a numpy array, one value per response token
    run = run.refresh()                   reads only appended lines

Only the log is needed. Files of lines may be compressed (.gz), as recorded runs keep them. Seconds
are since the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict
from typing_extensions import TypedDict

from areal_lab.config.given import given_path
from areal_lab.control.events import RunStarted
from areal_lab.extras import require
from areal_lab.host.foreign import Parsed, parse_json, parse_yaml, read_json, read_text, unreadable
from areal_lab.runlog.appended import Appended, read_appended
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.lags import TrainedBatch, trained_batches
from areal_lab.runlog.records import IMPORTED, MOST, Count, Log, Number, Scalar, read_log
from areal_lab.runlog.summary import run_status

if TYPE_CHECKING:
    import pandas as pd

    from areal_lab.runlog.token_columns import Tokens
    from areal_lab.runlog.token_files import Samples

EVENTS: Final = ("events.jsonl", "events.jsonl.gz")
METRICS: Final = "metrics.jsonl"
_CONFIG_BYTES: Final = 1024**2
"""Maximum size of config.yaml: a parser of YAML takes seconds per megabyte."""


@dataclass(frozen=True, slots=True)
class ReadTo:
    """Bytes read so far from the growing files."""

    events: int = 0
    metrics: int = 0
    inode: int = 0
    """Inode of the log: a continued run has replaced the file."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Content of a recorded run."""

    source: Path
    """The run folder, or the file of its log."""
    log: Log
    metrics: tuple[dict[str, Any], ...] = ()
    """One object per step, in order."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty if the run was killed before it wrote one."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of config.yaml, from any version; empty without one."""
    read_to: ReadTo = field(default_factory=ReadTo, compare=False)
    """Start of the next reading."""
    _made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cached frames and samples."""

    def __repr__(self) -> str:
        """Two lines: the title, and where to look."""
        return (
            f"{self.title}\n"
            f"{self.source}: .steps, .groups, .samples, .spans (frames); .tokens (columns)"
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of config.yaml by dotted name."""
        return dict(_flat(self.config))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return _folder(self.source).resolve()

    @property
    def batches(self) -> list[TrainedBatch]:
        """Finished training steps, in order."""
        return list(trained_batches(self.log))

    @property
    def began_s(self) -> float:
        """Start of training, possibly after a held-out evaluation."""
        return next((r.t_s for r in self.log.events if isinstance(r.event, RunStarted)), 0.0)

    @property
    def engines(self) -> int:
        """Engines at the start of the run."""
        return next(
            (len(r.event.engines) for r in self.log.events if isinstance(r.event, RunStarted)), 0
        )

    @property
    def title(self) -> str:
        """Title of the run in one line."""
        limits = self.log.header.limits
        if self.log.header.mode == IMPORTED:
            return self._imported_title(limits)
        eta = limits.get("eta")
        eta_text = f"{eta:g}" if isinstance(eta, int | float) else str(eta)
        if "max_eta" in limits:  # the schedule sets it by itself
            eta_text += f" to {limits['max_eta']:g}"
        parts = [
            self.folder.name,
            f"{limits.get('schedule')}, eta {eta_text}",
            f"{len(self.batches)} steps of {limits.get('batch_groups')} groups",
        ]
        if "backend" in self.summary:
            parts.append(str(self.summary["backend"]))
        parts.append(f"{self.log.end_s:.0f} s")
        if (status := run_status(self.log)) != "complete":
            parts.append(status)
        return "  |  ".join(parts)

    def _imported_title(self, limits: Mapping[str, Scalar]) -> str:
        made_by = " ".join(str(limits[name]) for name in ("framework", "version") if limits[name])
        parts = [
            self.folder.name,
            f"imported from {made_by}",
            str(limits["schedule"]),
            f"{len(self.metrics)} steps",
            f"{self.log.end_s:.0f} s",
        ]
        return "  |  ".join(parts)

    def refresh(self) -> RecordedRun:
        """Return the run as it is now: reads only appended lines; this object stays unchanged.

        If the run was continued from a checkpoint meanwhile, all of it is read again.

        Returns:
            This object if nothing was appended.
        """
        events = events_file(self.source)
        if events.stat().st_ino != self.read_to.inode:
            return read_run(self.source)
        log, events_end = _log(events, self.log, self.read_to.events)
        metrics, metrics_end = _metrics(self.folder / METRICS, self.metrics, self.read_to.metrics)
        summary = read_summary(self.folder)
        samples = self._made.get("samples")
        made = {} if samples is None else {"samples": _read_samples(self.folder, samples)}
        read_to = ReadTo(events_end, metrics_end, self.read_to.inode)
        unchanged = read_to == self.read_to and summary == self.summary
        if unchanged and made.get("samples") is samples:
            return self
        return replace(self, log=log, metrics=metrics, summary=summary, read_to=read_to, _made=made)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per training step, from 1 (the index and the column `step`): lags from the log,
        and its metrics.

        `begun_s` and `done_s` are seconds since the start of the run; `time_s`, a metric, since the
        start of training.
        """
        return self._frame("steps")

    @property
    def groups(self) -> pd.DataFrame:
        """One row per started group (index `group`).

        `outcome` is trained, training, dropped or filtered, the latter two with their `reason`; or
        finished or running, for groups that wait or run at the end of the log.
        """
        return self._frame("groups")

    @property
    def spans(self) -> pd.DataFrame:
        """One row per activity of a process, with a column per argument."""
        return self._frame("spans")

    @property
    def samples(self) -> pd.DataFrame:
        """One row per sample of every step that began, in the order of `tokens`.

        Without trajectories the rows come from the log, without texts and tokens.
        """
        return self._frame("samples")

    @property
    def tokens(self) -> Tokens:
        """Every response token, as columns; empty for a run without trajectories."""
        return self._samples().tokens

    def _samples(self) -> Samples:
        if "samples" not in self._made:
            self._made["samples"] = _read_samples(self.folder)
        samples: Samples = self._made["samples"]
        return samples

    def _frame(self, name: str) -> pd.DataFrame:
        require(f"RecordedRun.{name}", "notebooks", "pandas")
        from areal_lab.runlog import frames

        key = f"frame of {name}"
        if key not in self._made:
            match name:
                case "steps":
                    self._made[key] = frames.steps_frame(self.log, self.metrics)
                case "groups":
                    self._made[key] = frames.groups_frame(self.log)
                case "spans":
                    self._made[key] = frames.spans_frame(self.log)
                case _:
                    self._made[key] = frames.samples_frame(self.log, self._samples())
        return self._made[key]


def read_run(path: Path | str) -> RecordedRun:
    """Read a run folder, or its events.jsonl; an incomplete last line is skipped.

    Raises:
        ValueError: in one line: there is no log, or a file cannot be read.
    """
    path = given_path(path, "path")
    folder = _folder(path)
    events = events_file(path)
    inode = events.stat().st_ino  # before the reading, to detect a cut meanwhile
    log, events_end = _log(events)
    metrics, metrics_end = _metrics(folder / METRICS)
    return RecordedRun(
        path,
        log,
        metrics,
        read_summary(folder),
        _config(folder / "config.yaml"),
        ReadTo(events_end, metrics_end, inode),
    )


def find_runs(folder: Path | str) -> list[Path]:
    """Return the run folders in a folder, the most recently written first; empty if it has none.

    A run folder has an event log; other folders are skipped.
    """
    found = {
        log.parent: log.stat().st_mtime for name in EVENTS for log in Path(folder).glob(f"*/{name}")
    }
    return sorted(found, key=lambda run: (-found[run], run.name))


def read_events(path: Path) -> Log:
    """The log of a run folder, or of a file."""
    file = events_file(path)
    try:
        return read_log_file(file)
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def events_file(path: Path) -> Path:
    """File of a run folder's log; a file is returned unchanged."""
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    found = [path / name for name in EVENTS if (path / name).is_file()]
    if not found:
        raise ValueError(f"{path} is not a run folder: it has no events.jsonl")
    return found[0]


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _log(path: Path, before: Log | None = None, start: int = 0) -> tuple[Log, int]:
    """The log, continued from `before`, and the start of the next reading."""
    try:
        found = read_appended(path, start)
        if before is not None and found == Appended((), start, before.cut):
            return before, start
        log = read_log(found.lines, after=before, last_is_whole=True)
        return replace(log, cut=found.cut), found.end
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _metrics(
    path: Path, before: tuple[dict[str, Any], ...] = (), start: int = 0
) -> tuple[tuple[dict[str, Any], ...], int]:
    if not path.is_file():
        path = path.with_name(f"{path.name}.gz")
        if not path.is_file():
            return before, start
    try:
        found = read_appended(path, start)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    values = metrics_of(found.lines, path, first=1 + len(before))
    return (*before, *values), found.end


def metrics_of(lines: Iterable[str], path: Path, *, first: int = 1) -> list[dict[str, Any]]:
    """Parse lines of metrics.jsonl."""
    values = []
    for number, line in enumerate(lines, start=first):
        try:
            value = _NUMBERS(parse_json(line))
            if not 0 <= value.get("step", 0) <= MOST:
                raise ValueError(f"step is {value['step']}")
        except ValueError as error:
            what = "is not JSON" if isinstance(error, JSONDecodeError) else "cannot be read"
            raise ValueError(f"line {number} of {path} {what}: {error}") from error
        values.append(value)
    return values


def _read_samples(folder: Path, before: Samples | None = None) -> Samples:
    from areal_lab.runlog.token_files import read_samples  # imports numpy

    return read_samples(folder, before)


class _Interval(TypedDict):
    mean: Number
    ci95: Number | None
    n: Count


class _Best(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # as below
    version: Count


class _Evaluations(TypedDict, total=False):
    missed: list[Count]


class _Summary(TypedDict, total=False):
    """Fields of summary.json that are used here; it has more."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]  # as pydantic asks for it
    status: str
    error: str | None
    reward_before: _Interval | None
    reward_after: _Interval | None
    best: _Best | None
    evaluations: _Evaluations | None


_SUMMARY: Final = Parsed[dict[str, Any]](_Summary)
_NUMBERS: Final = Parsed[dict[str, Any]](dict[str, int | float])


def read_summary(folder: Path) -> dict[str, Any]:
    """Content of summary.json; empty without one."""
    path = folder / "summary.json"
    try:
        return _SUMMARY(read_json(path))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise unreadable(path, error) from error


def _config(path: Path) -> dict[str, Any]:
    try:
        read = parse_yaml(read_text(path, limit_bytes=_CONFIG_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return read if isinstance(read, dict) else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
