"""The cells of a study: every combination of the grid, with all settings of its run.

study, command --names, values, compatibility--> cells, or every problem at once
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from areal_lab.config.load import load_record, wrong_names
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.record import Record, settings, value_of
from areal_lab.runlog.records import finite_json
from areal_lab.sweep.command import Command
from areal_lab.sweep.study import Axis, Study, Value, every_choice, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a study."""

    choice: Mapping[str, Value]
    """Its value on each axis."""
    record: Record
    """Settings in the form of the command."""
    settings: Mapping[str, Any]
    """All settings by dotted name, as in JSON, except those of the run's name and folder."""

    @property
    def label(self) -> str:
        """Short name of the cell."""
        return label_of(self.choice)


def label_of(choice: Mapping[str, Value]) -> str:
    """`eta=4, seed=1`."""
    return ", ".join(f"{name}={shown(value)}" for name, value in choice.items()) or "the only cell"


def expand(study: Study, command: Command) -> list[Cell]:
    """Cells in the order of the grid, the last axis changing first."""
    found = [*study.problems, *_names(study, command), *_overlaps(study, command)]
    unknown = {problem.setting for problem in found}

    def known(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in unknown}

    try:
        base = command.load(study.config.config or None)
    except ValueError as error:
        raise ConfigError(*found, *problems_of(error, "config", named=True)) from error
    try:
        base = load_record(base, None, known(study.settings), command.aliases)
    except ConfigError as error:
        found += error.problems
    wrong = _Wrong(study)
    cells: list[Cell] = []
    labels: dict[str, str] = {}
    for choice in every_choice(study.axes):
        values = {
            name: value
            for axis in study.axes
            for name, value in axis.settings(choice[axis.name]).items()
        }
        with wrong.of(choice):
            record = load_record(base, None, known(values), command.aliases)
            with wrong.of(choice):
                _check_seeds(study, command, record)
            if found:
                continue  # the remaining settings need not be compatible
            cell = Cell(choice=choice, record=record, settings=resolved(record, command))
            cells.append(cell)
            command.check(record.with_settings(command.placed(study.folder)))
            same = labels.setdefault(repr(sorted(cell.settings.items())), cell.label)
            if same != cell.label:
                message = f"{same} has the same settings as {cell.label}; leave one of them out"
                raise ConfigError(Problem(Kind.SETTINGS, "grid", message))
    found += wrong.problems()
    if found:
        raise ConfigError(*found)
    return cells


def resolved(record: Record, command: Command) -> dict[str, Any]:
    """All settings of a run that can change its result, by dotted name, as in JSON."""
    placed = command.placed(Path()).keys()
    return {
        one.name: finite_json(_plain(value_of(record, one.name)))
        for one in settings(command.settings)
        if one.name not in placed
    }


class _Wrong:
    """Problems of cells; a common problem is reported once."""

    def __init__(self, study: Study) -> None:
        self._cells = 1
        for axis in study.axes:
            self._cells *= len(axis.values)
        self._found: dict[Problem, list[str]] = {}
        self._label = ""

    def of(self, choice: Mapping[str, Value]) -> _Wrong:
        """Collect the problems of this cell in a `with` block."""
        self._label = label_of(choice)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        for problem in error.problems:
            self._found.setdefault(problem, []).append(self._label)
        return True

    def problems(self) -> Iterator[Problem]:
        """Each problem once, with the cells that have it."""
        for problem, labels in self._found.items():
            where = f"in {labels[0]}"
            if len(labels) > 1:
                where = f"in {len(labels)} of {self._cells} cells, the first with {labels[0]}"
            told = f"{problem.message} ({where})"
            if len(labels) == self._cells:
                told = problem.message
            yield Problem(problem.kind, problem.setting, told, problem.command)


def _names(study: Study, command: Command) -> Iterator[Problem]:
    """Names in `settings` and `grid` that are not settings of the command."""

    def wrong(names: Sequence[str], source: str) -> Iterator[Problem]:
        yield from wrong_names(command.settings, command.aliases, names, source)
        for name in names:
            full = command.aliases.get(name, name)
            if full in command.placed(Path()):
                message = f"{name!r} in {source} is set by the sweep; leave it out"
                yield Problem(Kind.SETTINGS, full, message)

    yield from wrong(list(study.settings), "settings")
    yield from wrong([axis.name for axis in study.axes if axis.groups is None], "grid")
    for axis in study.axes:
        for group, own in (axis.groups or {}).items():
            yield from wrong(list(own), f"grid.{axis.name}.{group}")


def _overlaps(study: Study, command: Command) -> Iterator[Problem]:
    """Settings that two axes set, or an axis and `settings`."""
    places = {command.aliases.get(name, name): "settings" for name in study.settings}
    for axis in study.axes:
        for full in dict.fromkeys(command.aliases.get(name, name) for name in axis.sets):
            if full in places:
                message = f"{full} is in grid.{axis.name} and in {places[full]}; leave one out"
                yield Problem(Kind.SETTINGS, full, message)
            places[full] = f"grid.{axis.name}"


def _check_seeds(study: Study, command: Command, record: Record) -> None:
    """Reject repetitions that share seeds: such runs would not be independent."""
    over = next((one for one in study.axes if one.name == study.config.figure.over), None)
    if over is not None and _sets_seed(over, command) and command.shares_seeds(record):
        raise ConfigError(
            Problem(
                Kind.SETTINGS,
                "seeds",
                f"each run has several seeds itself, from `seed` on, so that runs along "
                f"grid.{over.name} would share some; set settings.seeds=1, or leave "
                f"grid.{over.name} out",
            )
        )


def _sets_seed(axis: Axis, command: Command) -> bool:
    return "seed" in {command.aliases.get(name, name) for name in axis.sets}


def _plain(value: Any) -> Any:
    """Value without records."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [_plain(one) for one in value] if isinstance(value, list) else value
