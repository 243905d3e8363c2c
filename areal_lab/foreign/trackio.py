"""Trackio's database: a row a log call, with its metrics as JSON; mlflow's is told apart.

Opened read-only; a damaged file is an error. Source: trackio/sqlite_storage.py.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from areal_lab.foreign import mlflow
from areal_lab.foreign.documents import keyed_row
from areal_lab.foreign.literal import flat
from areal_lab.foreign.scan import Rows
from areal_lab.foreign.text import stamp
from areal_lab.host.foreign import parse_json

MAGIC: Final = b"SQLite format 3\0"
_JSON_CHARACTERS: Final = 1_000_000


def read_database(path: Path, into: Rows) -> None:
    """Add a row for each log call of the only run; one for each step if the database is mlflow's.

    Raises:
        ValueError: the file is no database of Trackio or mlflow, or has several runs.
    """
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            if mlflow.is_database(connection):
                mlflow.read_database(connection, path, into)
            else:
                _read(connection, path, into)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ValueError(
            f"{path} is not a readable database of Trackio or mlflow: {error}"
        ) from error


def _read(connection: sqlite3.Connection, path: Path, into: Rows) -> None:
    runs = [one for (one,) in connection.execute("select distinct run_name from metrics limit 9")]
    if len(runs) > 1:
        raise ValueError(
            f"{path} has {len(runs)} runs or more; export one with trackio's interface as CSV"
        )
    found = connection.execute(
        "select step, timestamp, metrics from metrics where length(metrics) < ? order by id",
        (_JSON_CHARACTERS,),
    )
    for number, (step, time, text) in enumerate(found, 1):
        try:
            values = parse_json(text) if isinstance(text, str | bytes) else None
        except ValueError:
            values = None
        if not isinstance(values, dict):
            into.unread["rows that are no JSON object"] += 1
            continue
        row = keyed_row(flat({"_step": step, **values}), number)
        if row is not None:
            row.time_s = stamp(str(time))
            into.add(row)
