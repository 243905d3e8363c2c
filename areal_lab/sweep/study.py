"""A study file: the command to run, the grid of settings, and the figure to draw.

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

from areal_lab.config.given import Overrides
from areal_lab.config.load import dotted, load_record, read_yaml, wrong_names
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import FolderNameOrEmpty, FolderPath, Record, Whole
from areal_lab.config.shipped import settings_file, studies

Value: TypeAlias = str | int | float | bool | None
"""Value of a cell on an axis: that of a setting, or the name of a group of settings."""
_FREE: Final = ("settings", "grid")
"""Parts of a study file whose names are those of the command's settings."""


class FigureConfig(Record):
    """The picture, and the intervals that are printed."""

    metric: str = ""
    """Column of the table to draw, such as `reward_after` or `lag.token.mean`; empty takes the
    default of the command."""
    x: str = ""
    """Horizontal axis of the picture, an axis of the grid; empty takes the first one. Each
    combination of the others is a line."""
    over: str = "seed"
    """Axis of the repetitions, for means and 95 % intervals."""
    baseline: str = ""
    """Cell to subtract for each repetition, such as `eta=0 objective=naive`; on an axis that is
    not named, each cell is compared with its own value."""


class StudyConfig(Record):
    """A study: `settings` of every cell, a `grid` of lists or named groups of settings, and these.

    Each combination of the grid is a cell, and each cell is one run.
    """

    name: FolderNameOrEmpty = ""
    """Name of the study; empty takes that of the file."""
    command: str = "train"
    """Command of each cell: `train`, `simulate` or `cosim`."""
    config: str = ""
    """Base config of the cells: a file, a shipped config or a preset; empty takes the defaults."""
    folder: FolderPath = ""
    """Folder of the cells and results; empty takes `sweeps/NAME`. Complete cells there are not
    run again."""
    workers: Whole = 0
    """Number of concurrent runs. 0 is one run for `train`, which uses all cores, and one per
    core for `simulate`."""
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
        """Settings of a cell with this value."""
        return {self.name: value} if self.groups is None else self.groups[str(value)]

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of all its settings, as they are written."""
        if self.groups is None:
            return (self.name,)
        return tuple(dict.fromkeys(name for one in self.groups.values() for name in one))

    def find(self, text: str) -> Value:
        """Value that is shown as `text`."""
        return {shown(one): one for one in self.values}[text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Content of a study file; `areal_lab.sweep.grid` expands the cells."""

    config: StudyConfig
    settings: Mapping[str, Any]
    axes: tuple[Axis, ...]
    problems: tuple[Problem, ...] = ()
    """Problems of the file; `expand` reports them together with those of the cells."""

    @property
    def folder(self) -> Path:
        """Folder of cells and results."""
        return Path(self.config.folder or f"sweeps/{self.config.name}").expanduser()


def load_study(source: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study file, or a shipped study by name.

    Overrides `a.b=c` are settings of `StudyConfig`, or parts of `grid.` and `settings.`.
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
    """`eta=0 objective=naive` as values of axes."""
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
    """An optional part of the file."""
    return {} if value is None else value


def _wrong(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)


def _overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], Overrides]:
    """Overrides of `grid.` and `settings.` with their values, and the others."""
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
