"""mlflow's runs: a folder with a file a metric, or a database; both without mlflow.

    mlruns/EXPERIMENT/RUN/metrics/timing_s/step     lines `timestamp value step`, in ms
    mlflow.db        metrics(key, value, timestamp, run_uuid, step, is_nan), params(key, value)

The database has 0 with `is_nan` for NaN, and the largest float for infinity. Parameters are the
settings of the run. Sources: mlflow/store/tracking/{file_store,sqlalchemy_store}.py, 2.0 to 3.17;
verl/utils/tracking.py, which writes `_at_` for `@`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

from areal_lab.foreign.documents import keyed_row
from areal_lab.foreign.quantities import UNREAD, known, number, whole
from areal_lab.foreign.scan import Row, Rows
from areal_lab.host.foreign import read_bytes

_FILES: Final = 20_000
"""Most files of a folder that are read."""
_FILE_BYTES: Final = 64 * 1024**2
_LARGEST: Final = 1.7e308

Point = tuple[str, Any, float | None, int]
"""Key, value, seconds since 1970 and step."""


def run_folder(path: Path) -> Path:
    """Find the only run of a folder: the folder itself, or one below it.

    Raises:
        ValueError: it has no run of mlflow, or several.
    """
    if (path / "metrics").is_dir():
        return path
    runs = [one.parent for one in islice(path.glob("*/*/metrics"), 100) if one.is_dir()]
    runs += [one.parent for one in islice(path.glob("*/metrics"), 100) if one.is_dir()]
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise ValueError(
            f"{path} is not a file, and has no run of mlflow (metrics/); name a log file in it"
        )
    raise ValueError(f"{path} has {len(runs)} runs or more; name the folder of one: {runs[0]}")


def read_folder(path: Path, into: Rows) -> None:
    """Add a row for each step of the run in a folder, and its settings."""
    run = run_folder(path)
    _add(_points_of_files(run / "metrics", into), into)
    settings = {}
    for name, file in _files(run / "params"):
        text = read_bytes(file).decode("utf-8", "replace").strip()
        settings[name] = text
    _add_settings(settings, into)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Regular files below a folder, by their path in it; links are not followed."""
    found = sorted(islice((one for one in folder.rglob("*") if not one.is_symlink()), _FILES))
    for one in found:
        if one.is_file():
            yield one.relative_to(folder).as_posix(), one


def _points_of_files(folder: Path, into: Rows) -> Iterator[Point]:
    for name, file in _files(folder):
        text = read_bytes(file, limit_bytes=_FILE_BYTES).decode("utf-8", "replace")
        for line in text.splitlines():
            parts = line.split()
            step = whole(parts[2]) if len(parts) >= 3 else None
            if step is None or number(parts[1]) is UNREAD:
                into.unread["lines that are no metric of mlflow"] += bool(parts)
                continue
            time_ms = known(parts[0])
            yield name, parts[1], None if time_ms is None else time_ms / 1000, step


def is_database(connection: sqlite3.Connection) -> bool:
    """Return whether an open database is mlflow's."""
    return "run_uuid" in {one[1] for one in connection.execute("pragma table_info(metrics)")}


def read_database(connection: sqlite3.Connection, path: Path, into: Rows) -> None:
    """Add a row for each step of the only run.

    Raises:
        ValueError: the database has several runs.
    """
    runs = [one for (one,) in connection.execute("select distinct run_uuid from metrics limit 9")]
    if len(runs) > 1:
        raise ValueError(
            f"{path} has {len(runs)} runs or more; export one: MlflowClient().get_metric_history"
        )
    found = connection.execute(
        "select key, value, timestamp, step, is_nan from metrics order by timestamp"
    )
    _add(_points_of_database(found), into)
    _add_settings(dict(connection.execute("select key, value from params")), into)


def _points_of_database(found: Iterable[tuple[Any, ...]]) -> Iterator[Point]:
    for key, value, time_ms, step, is_nan in found:
        missing = is_nan or (isinstance(value, float) and abs(value) > _LARGEST)
        time = known(time_ms)
        if isinstance(key, str) and isinstance(step, int):
            yield key, None if missing else value, None if time is None else time / 1000, step


def _add(points: Iterable[Point], into: Rows) -> None:
    """Join the points of a step; of two for one key the later counts."""
    steps: dict[int, dict[str, tuple[float, Any]]] = {}
    for key, value, time_s, step in points:
        values = steps.setdefault(step, {})
        if key not in values or (time_s or 0.0) >= values[key][0]:
            values[key] = (time_s or 0.0, value)
    for order, (step, values) in enumerate(sorted(steps.items()), 1):
        pairs = {key.replace("_at_", "@"): value for key, (_, value) in values.items()}
        row = keyed_row({"_step": step, **pairs}, order)
        if row is not None:
            row.time_s = max(time for time, _ in values.values()) or None
            into.add(row)


def _add_settings(settings: dict[str, Any], into: Rows) -> None:
    if settings:
        into.add(Row(kind="config", step=None, values=settings))
