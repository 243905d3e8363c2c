"""The folder of a study: settings, status and results of each cell.

    FOLDER/study.json                 axes, picture, and the folder of each cell of the grid
    FOLDER/cells/eta-4-seed-1-3f2a91/ cell.json config.yaml stdout.log stderr.log, and its run
    FOLDER/cells.csv steps.csv figure.png

A cell is found by its settings, not by its name: after an edit of the study, the cells that still
fit are kept, whatever their folder is called.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field
from typing_extensions import TypedDict

from areal_lab.config.record import settings
from areal_lab.host.durable import replace_text
from areal_lab.host.foreign import Parsed, read_json, unreadable
from areal_lab.runlog.records import finite_json
from areal_lab.sweep.command import Command
from areal_lab.sweep.grid import Cell
from areal_lab.sweep.study import Study, Value, shown

CELLS: Final = "cells"
_CELL: Final = "cell.json"
_STUDY: Final = "study.json"
_LOCK: Final = ".sweep"
_DIGEST: Final = "sha256"

Status: TypeAlias = Literal["waiting", "running", "complete", "failed", "stopped"]
"""`waiting` has no folder yet; `running` in a folder whose sweep has ended was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCell:
    """Content of a cell's folder."""

    folder: Path
    command: str
    settings: Mapping[str, Any]
    """All settings of the run that can change its result, by dotted name."""
    status: Status
    error: str = ""
    """Reason of its failure: the last lines of its output."""
    wall_s: float = 0.0
    run: str = ""
    """The run folder, relative to the cell's; empty for a command without one."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers of its summary by dotted name."""
    areal_lab: str = ""
    """Version of the package."""

    @property
    def run_folder(self) -> Path | None:
        """The run folder; None for a command without one."""
        return self.folder / self.run if self.run else None

    def write(self) -> None:
        """Write cell.json atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = asdict(self)
        del values["folder"]
        _write_json(self.folder / _CELL, values)


class _Choice(TypedDict):
    choice: dict[str, Value]
    grouped: dict[str, Any]
    folder: Annotated[str, Field(pattern=r"^cells/[^/]+$")]


class _Figure(TypedDict):
    metric: str
    x: str
    over: str
    baseline: str


class _StudyFile(TypedDict):
    """The content of study.json."""

    name: str
    command: str
    config: Any
    settings: Any
    axes: dict[str, list[Value]]
    figure: _Figure
    metric: str
    cells: list[_Choice]


_OBJECT: Final = Parsed[dict[str, Any]](dict[str, Any])
_CELL_FILE: Final = Parsed[StoredCell](StoredCell)
_STUDY_FILE: Final = Parsed[dict[str, Any]](_StudyFile)


def stored_cells(folder: Path) -> list[StoredCell]:
    """All cells of a study's folder, from any edition of the study."""
    found = sorted(folder.glob(f"{CELLS}/*/{_CELL}"))
    return [_read_cell(path.parent) for path in found if path.is_file()]


def fits(stored: StoredCell, cell: Cell, command: Command) -> bool:
    """Return whether a stored cell has the settings of this one.

    A setting that is newer than the stored cell fits if it has its default.
    """
    if stored.command != command.name or not stored.settings.keys() <= cell.settings.keys():
        return False
    defaults = {one.name: one.default for one in settings(command.settings)}
    return all(
        stored.settings[name] == value
        if name in stored.settings
        else finite_json(defaults[name]) == value
        for name, value in cell.settings.items()
    )


def placed_cells(study: Study, command: Command, cells: Sequence[Cell]) -> list[StoredCell]:
    """Stored state of each cell of the grid; `waiting` if it has none."""
    known = sorted(stored_cells(study.folder), key=lambda one: one.status != "complete")
    return [
        next((one for one in known if fits(one, cell, command)), None)
        or StoredCell(
            folder=study.folder / CELLS / _folder_name(cell),
            command=command.name,
            settings=cell.settings,
            status="waiting",
            areal_lab=package_version(),
        )
        for cell in cells
    ]


def write_study(
    study: Study, command: Command, cells: Sequence[Cell], placed: Sequence[StoredCell]
) -> None:
    """Write study.json: the data that `read_sweep` needs besides the cells."""
    study.folder.mkdir(parents=True, exist_ok=True)
    named = (name for axis in study.axes if axis.groups is not None for name in axis.sets)
    grouped = list(dict.fromkeys(command.aliases.get(name, name) for name in named))
    values = {
        "name": study.config.name,
        "command": study.config.command,
        "config": study.config.config,
        "settings": study.settings,
        "axes": {axis.name: list(axis.values) for axis in study.axes},
        "figure": study.config.figure.model_dump(),
        "metric": study.config.figure.metric or command.metric,
        "cells": [
            {
                "choice": cell.choice,
                "grouped": {name: _setting_in(cell.settings, name) for name in grouped},
                "folder": one.folder.relative_to(study.folder).as_posix(),
            }
            for cell, one in zip(cells, placed, strict=True)
        ],
    }
    _write_json(study.folder / _STUDY, values)


def _setting_in(values: Mapping[str, Any], name: str) -> Any:
    """Setting by dotted name, including one inside of a mapping, such as `actor.loss.name`; or
    None.
    """
    group, rest = name, list[str]()
    while group not in values and "." in group:
        group, _, leaf = group.rpartition(".")
        rest.insert(0, leaf)
    found = values.get(group)
    for leaf in rest:
        found = found.get(leaf) if isinstance(found, Mapping) else None
    return found


def read_study(folder: Path) -> dict[str, Any]:
    """The content of study.json."""
    path = folder / _STUDY
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of a sweep: it has no {_STUDY}")
    try:
        read = _STUDY_FILE(with_numbers(_read_json(path)))
        for one in read["cells"]:
            if one["choice"].keys() != read["axes"].keys():
                raise ValueError(f"{one['folder']} has not one value for each axis")
        return read
    except ValueError as error:
        raise unreadable(path, error) from error


def stored_cell(folder: Path, command: str) -> StoredCell:
    """The cell in a folder; `waiting` without one."""
    if (folder / _CELL).is_file():
        return _read_cell(folder)
    return StoredCell(folder=folder, command=command, settings={}, status="waiting")


@contextmanager
def only_sweep(folder: Path) -> Iterator[None]:
    """Lock the folder against other sweeps; BlockingIOError if another one has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(folder / _LOCK, flags, 0o666), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"another sweep is running in {folder}; wait for it, or set another folder=..."
            ) from None
        yield


def package_version() -> str:
    """Version of areal_lab."""
    try:
        return version("areal_lab")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"


def with_numbers(value: Any) -> Any:
    """Inverse of `finite_json` for infinities."""
    if isinstance(value, dict):
        return {name: with_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [with_numbers(one) for one in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


def _read_cell(folder: Path) -> StoredCell:
    values = _read_json(folder / _CELL)
    try:
        values = _OBJECT(values)
        figures = with_numbers(values["figures"])
        return _CELL_FILE({**values, "figures": figures, "folder": folder})
    except KeyError as error:
        raise ValueError(f"{folder / _CELL} is not a cell of a sweep: it has no {error}") from error
    except ValueError as error:
        raise ValueError(f"{folder / _CELL} is not a cell of a sweep: {error}") from error


def _read_json(path: Path) -> Any:
    try:
        values = read_json(path)
        # Files of older versions have no digest.
        if isinstance(values, dict) and values.pop(_DIGEST, digest := _digest(values)) != digest:
            raise ValueError("it has other content than when it was saved")
        return values
    except ValueError as error:
        raise ValueError(f"{unreadable(path, error)}; remove or rename its folder") from error


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    told = json.loads(json.dumps(finite_json(values), allow_nan=False))
    text = json.dumps({**told, _DIGEST: _digest(told)}, indent=1)
    replace_text(path, f"{text}\n")


def _digest(values: Mapping[str, Any]) -> str:
    """Digest of a JSON object without its own digest."""
    text = json.dumps({**values, _DIGEST: ""}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _folder_name(cell: Cell) -> str:
    """`eta-4-seed-1-3f2a91`: readable, and different for different settings."""
    written = json.dumps(cell.settings, sort_keys=True)
    mark = hashlib.sha256(written.encode()).hexdigest()[:6]
    parts = (f"{name.rpartition('.')[2]}-{shown(value)}" for name, value in cell.choice.items())
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(parts))[:80]
    return f"{readable or 'cell'}-{mark}"
