"""A study file: which command to run, with which grid of settings, and what to draw.

command: train                    and everything else in StudyConfig
config: tiny
settings: {total_train_steps: 20}           of every cell
grid:                                       every combination is a cell
  eta: [0, 4]                               values of one setting
  objective:                                named groups of settings
    naive: {actor.use_decoupled_loss: false}
    decoupled: {actor.use_decoupled_loss: true}
  seed: [1, 2, 3]

areal-lab sweep study.yaml workers=2 grid.eta=[0,16] settings.total_train_steps=8
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import Field

from areal_lab.config.load import Overrides, dotted, load_record, read_yaml, wrong_names
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import Record, Whole
from areal_lab.config.shipped import settings_file, studies

Value: TypeAlias = str | int | float | bool | None
"""What a cell has on an axis: the value of a setting, or the name of a group of settings."""
_FREE: Final = ("settings", "grid")
"""Parts of a study file whose names are those of the command's settings."""


class FigureConfig(Record):
    """The picture, and the intervals that are printed."""

    metric: str = ""
    """Column of the table to draw, such as `reward_after` or `lag.token.mean`; empty takes the
    command's own."""
    x: str = ""
    """Axis of the grid along the horizontal; empty takes the first one. Each combination of the
    others is a line."""
    over: str = "seed"
    """Axis of the repetitions, over which means and 95 % intervals are taken."""
    baseline: str = ""
    """Cell to subtract, repetition by repetition, as `eta=0 objective=naive`; an axis that is not
    named keeps the cell's own value."""


class StudyConfig(Record):
    """A study: `settings` of every cell, a `grid` of lists or named groups of settings, and these.

    Each combination of the grid is a cell, and each cell is one run.
    """

    name: str = ""
    """Name of the study; empty takes the file's."""
    command: str = "train"
    """Command that makes a cell: `train`, `simulate` or `cosim`."""
    config: str = ""
    """Config file, or shipped config or preset, to start from; empty takes the defaults."""
    folder: str = ""
    """Folder of the cells and results; empty takes `sweeps/NAME`. Cells that are complete there are
    not run again."""
    workers: Whole = 0
    """Runs at the same time. 0 takes what the cores allow: one at a time for `train`, which uses
    them all, one per core for `simulate`."""
    steps_table: bool = False
    """Also write steps.csv: the metrics of each step of each run."""
    figure: FigureConfig = Field(default_factory=FigureConfig)


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a grid."""

    name: str
    values: tuple[Value, ...]
    groups: Mapping[str, Mapping[str, Any]] | None = None
    """Settings of each value, if the values are names of groups."""

    def settings(self, value: Value) -> Mapping[str, Any]:
        """The settings that a cell with this value has."""
        return {self.name: value} if self.groups is None else self.groups[str(value)]

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of all settings that it sets, as they are written."""
        if self.groups is None:
            return (self.name,)
        return tuple(dict.fromkeys(name for one in self.groups.values() for name in one))

    def find(self, text: str) -> Value:
        """The value that is shown as `text`.

        Raises:
            KeyError: if there is none.
        """
        return {shown(one): one for one in self.values}[text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study as it was read; `areal_lab.sweep.grid` makes the cells."""

    config: StudyConfig
    settings: Mapping[str, Any]
    axes: tuple[Axis, ...]
    problems: tuple[Problem, ...] = ()
    """What is wrong with the file; `expand` refuses it, with what is wrong with the cells."""

    @property
    def folder(self) -> Path:
        """Where cells and results are."""
        return Path(self.config.folder or f"sweeps/{self.config.name}").expanduser()


def load_study(source: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file, or a shipped study by name.

    Args:
        source: YAML file, or the name of a shipped study.
        overrides: `a.b=c` each: settings of `StudyConfig`, and parts of `grid.` and `settings.`.

    Raises:
        ValueError: in one line, if the file is missing or is no YAML. Other problems are in
            `Study.problems`.
    """
    path = settings_file(source, studies(), "study")
    tree = dict(read_yaml(path))
    free, others = _overrides(overrides)
    parts, found = {name: _part(tree.pop(name, None)) for name in _FREE}, list[Problem]()
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            found.append(_wrong(name, f"{name} is {part!r}, but must be settings by name"))
            parts[name] = {}
    for full, value in free.items():
        part, _, name = full.partition(".")
        parts[part] = {**parts[part], name: value}
    axes = []
    for name, values in parts["grid"].items():
        try:
            axes.append(_axis(str(name), values))
        except ConfigError as error:
            found += error.problems
    flat = dotted(tree)
    unknown = wrong_names(StudyConfig, {}, flat, str(path))
    found += unknown
    for problem in unknown:
        flat.pop(problem.setting, None)
    config = StudyConfig()
    given: Overrides
    for given in (flat, others):
        try:
            config = load_record(config, None, given)
        except ConfigError as error:
            found += error.problems
    config.name = config.name or path.stem.removeprefix("study_")
    study = Study(config=config, settings=dotted(parts["settings"]), axes=tuple(axes))
    if len(axes) == len(parts["grid"]):
        found += _figure_problems(study)
    return replace(study, problems=tuple(found))


def shown(value: Value) -> str:
    """A value of an axis as text, as in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value)


def parsed_baseline(study: Study) -> dict[str, Value]:
    """`eta=0 objective=naive` as values of axes.

    Raises:
        ConfigError: one line for each axis or value that does not exist.
    """
    axes = {axis.name: axis for axis in study.axes}
    found: dict[str, Value] = {}
    problems = []
    for part in study.config.figure.baseline.split():
        name, _, text = part.partition("=")
        if name not in axes or name == study.config.figure.over:
            message = f"{name!r} in figure.baseline is {_no_axis(study)}"
            problems.append(_wrong("figure.baseline", message))
            continue
        try:
            found[name] = axes[name].find(text)
        except KeyError:
            known = ", ".join(map(shown, axes[name].values))
            message = f"figure.baseline has {part}, but {name} has the values {known}"
            problems.append(_wrong("figure.baseline", message))
    if problems:
        raise ConfigError(*problems)
    return found


def _figure_problems(study: Study) -> Iterator[Problem]:
    figure = study.config.figure
    names = [axis.name for axis in study.axes]
    if figure.x and (figure.x not in names or figure.x == figure.over):
        yield _wrong("figure.x", f"figure.x is {figure.x!r}, {_no_axis(study)}")
    if figure.over != StudyConfig().figure.over and figure.over not in names:
        known = ", ".join(names) or "none"
        message = f"figure.over is {figure.over!r}, no axis of the grid; those are {known}"
        yield _wrong("figure.over", message)
    try:
        parsed_baseline(study)
    except ConfigError as error:
        yield from error.problems


def _no_axis(study: Study) -> str:
    others = [axis.name for axis in study.axes if axis.name != study.config.figure.over]
    return f"no axis to compare along; those are {', '.join(others) or 'none'}"


def _axis(name: str, values: Any) -> Axis:
    if isinstance(values, Mapping) and values:
        groups = {}
        for group, own in values.items():
            if not isinstance(own, Mapping):
                raise ConfigError(
                    _wrong(
                        f"grid.{name}",
                        f"grid.{name}.{group} is {own!r}, but must be settings by name, as "
                        f"{{eta: 4}}; an axis of one setting has its dotted name and a list: "
                        f"{name}.{group}: [1, 2]",
                    )
                )
            groups[str(group)] = dotted(own)
        return Axis(name, tuple(groups), groups)
    if not isinstance(values, list) or not values:
        raise ConfigError(
            _wrong(
                f"grid.{name}",
                f"grid.{name} is {values!r}, but must be a list of values, as [1, 2], or named "
                "groups of settings",
            )
        )
    known = [math.inf if one == "inf" else one for one in values]
    repeated = [one for place, one in enumerate(known) if one in known[:place]]
    nested = [one for one in known if isinstance(one, list | Mapping)]
    if repeated or nested:
        why = f"twice {repeated[0]!r}" if repeated else f"{nested[0]!r}, which needs a name"
        example = "; write groups: {first: {SETTING: [...]}, second: {SETTING: [...]}}"
        raise ConfigError(
            _wrong(f"grid.{name}", f"grid.{name} has {why}{example if nested else ''}")
        )
    return Axis(name, tuple(known))


def _part(value: Any) -> Any:
    """A part of the file that may be left out."""
    return {} if value is None else value


def _wrong(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)


def _overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], Overrides]:
    """Those of `grid.` and `settings.` with their values, and the others."""
    free = dict(_free(one) for one in overrides if one.split(".", 1)[0] in _FREE and "=" in one)
    return free, [one for one in overrides if one.split(".", 1)[0] not in _FREE or "=" not in one]


def _free(override: str) -> tuple[str, Any]:
    yaml: Any = importlib.import_module("yaml")  # by name: it has no types
    from omegaconf import OmegaConf

    name, _, text = override.partition("=")
    try:
        tree = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except yaml.YAMLError:
        return name.strip(), text
    assert isinstance(tree, dict)
    return name.strip(), tree["value"]


def every_choice(axes: Sequence[Axis]) -> Iterator[dict[str, Value]]:
    """Every combination of values by axis, the last axis changing first."""
    if not axes:
        yield {}
        return
    for value in axes[0].values:
        for rest in every_choice(axes[1:]):
            yield {axes[0].name: value, **rest}
