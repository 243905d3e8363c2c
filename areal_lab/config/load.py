"""Load settings from YAML and `a.b=c` overrides into a record, with precise errors.

    defaults (the record's) <- bases of the file <- YAML file <- overrides, the last one wins

`load_config` fills a `TrainConfig`; `load_record` any record of records, such as the simulator's.
Paths in a YAML file are relative to the current folder, except those of `base`, which are relative
to the file.

OmegaConf reads the YAML (its loader reads 1e-5 as a number and refuses duplicate keys) and resolves
`${other.setting}`; the record does the rest.

Settings files with bases: `base: tiny`, or a list, at the top of a file.

    base: [gsm8k, dapo]        shipped names, or paths relative to this file
    dataset.path: mine.jsonl   settings of this file override the bases

Later bases override earlier ones. The result is one list of mappings, the lowest priority first.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from areal_lab.config.given import (
    Overrides,
    Sources,
    given_config,
    given_overrides,
    given_sources,
    source_files,
)
from areal_lab.config.mappings import entered, laid_over, named, texts
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import Record, forget_given, settings, short, value_of
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import is_shipped, named_file, recipes, training_configs
from areal_lab.config.unknown import nearest, of_unknown
from areal_lab.host.foreign import check_yaml, read_text, unreadable

ALIASES = {
    "eta": "rollout.max_head_offpolicyness",
    "max_staleness": "rollout.max_head_offpolicyness",
    "staleness_limit": "rollout.max_head_offpolicyness",
    "rollout.eta": "rollout.max_head_offpolicyness",
    "rollout.max_staleness": "rollout.max_head_offpolicyness",
    "rollout.staleness_limit": "rollout.max_head_offpolicyness",
    "environment": "environment.name",
    "rollout.drop_late": "rollout.on_late",
    "train_dataset.path": "dataset.path",
    "train_dataset.type": "dataset.type",
    "train_dataset.batch_size": "dataset.batch_size",
    "valid_dataset.path": "dataset.eval_path",
}
"""Other names of a setting: short forms, names in AReaL and its documentation, and older ones."""
_CALL: Final = re.compile(r"(?<!\\)\$\{[^}]*:")
"""OmegaConf's call of a function, such as `${oc.env:HOME}`."""
_SHOWN: Final = 200
"""Characters of an override that an error repeats."""
_NO_ALIASES: Mapping[str, str] = MappingProxyType({})
_Record = TypeVar("_Record", bound=Record)


def load_config(
    path: Sources = None, overrides: Overrides | None = (), *, files_are_given: bool = True
) -> TrainConfig:
    """Merge a YAML file and overrides onto the defaults of a training run.

    Args:
        path: YAML file, or the name of a shipped one (`arithmetic`) or of a recipe (`dapo`);
            settings by name, or a config to start from; of several, each wins over those before it;
            None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `gconfig.stop=["\\n"]`, `eta=inf`; or values by
            name: `{"eta": 4, "gconfig.stop": ["\\n"]}`.
        files_are_given: as of `load_record`.

    Raises:
        ConfigError: as `load_record` does.
    """
    known = {**training_configs(), **recipes()}
    files = source_files(path, known, "config")
    return load_record(
        TrainConfig(), files, overrides, ALIASES, bases=known, files_are_given=files_are_given
    )


def train_config(given: object) -> TrainConfig:
    """Return the config of an argument: a `TrainConfig`, or a source for `load_config`."""
    return given_config(given, TrainConfig, load_config)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into further configs and overrides `a.b=c`.

    The name of a setting without a value counts as an override, and is refused later.
    """
    known = {*ALIASES, *(one.name for one in settings(TrainConfig))}
    configs = [one for one in arguments if "=" not in one and one not in known]
    return configs, [one for one in arguments if one not in configs]


def load_record(
    start: _Record,
    path: Sources = None,
    overrides: Overrides | None = (),
    aliases: Mapping[str, str] = _NO_ALIASES,
    *,
    may_be_empty: bool = True,
    bases: Mapping[str, Path] | None = None,
    files_are_given: bool = True,
) -> _Record:
    """Merge a YAML file and overrides onto a record of settings, usually its defaults.

    Args:
        start: the record to start from; it is not changed.
        path: YAML file, settings by name, or a record; or several, each over those before it; None
            applies only the overrides.
        overrides: `a.b=c` each, the value in YAML; or values by name, nested or dotted.
        bases: files that `base` at the top of a file may name; None takes `base` for a setting.
        files_are_given: whether the settings of files count as given by the user
            (`given_settings`); those of shipped files never do.
    """
    names = _Names(type(start), aliases)
    values: dict[str, Any] = {}
    not_given: set[str] = set()
    for source, tree in _layers(path, bases):
        if not tree and not may_be_empty:
            raise ValueError(f"{source} is empty, but must hold at least one setting (`a: b`)")
        told = names.translated(dotted(tree), source)
        if files_are_given and not is_shipped(source):
            not_given -= told.keys()
        else:
            not_given |= told.keys()
        values = names.over(start, values, told)
    given: dict[str, Any] = {}
    changes = given_overrides(overrides)
    if isinstance(changes, Mapping):
        given = names.translated(dotted(changes), "the overrides")
    else:
        for override in changes:
            one = dict(names.read_override(override))
            if bases is not None and BASE in one:
                names.refuse_base()
                continue
            given |= names.translated(one, "the overrides", given)
    values = names.over(start, values, given)
    found, values = names.problems, names.resolved(start, values)
    try:
        loaded = start.with_settings(values)
    except ConfigError as error:
        raise ConfigError(*found, *error.problems) from None
    if found:
        raise ConfigError(*found)
    return forget_given(loaded, not_given - given.keys())


def _layers(path: Sources, bases: Mapping[str, Path] | None) -> Iterator[Layer]:
    """Settings of each source in order, those of a file after those of its bases."""
    for one in given_sources(path):
        if isinstance(one, Record):
            yield "the config", one.model_dump()
        elif isinstance(one, Mapping):
            yield from [("the settings", one)] if one else []
        elif bases is None:
            yield str(one), read_yaml(Path(one))
        else:
            yield from read_layers(Path(one), bases, read_yaml)


def read_yaml(path: Path, what: str = "settings (`a: b`)") -> Mapping[Any, Any]:
    """Return the mapping in a YAML file, with unresolved references."""
    # Imported here, so that `--help` need not wait for it.
    yaml: Any = importlib.import_module("yaml")  # by name: it has no types
    from omegaconf import OmegaConf

    if path.is_dir():
        raise ValueError(f"{path} is a folder, but must be a YAML file")
    if not path.is_file():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    try:
        text = read_text(path)
        check_yaml(text)  # before OmegaConf, which copies what aliases stand for
        # Not yaml.safe_load: that reads 1e-5 as text.
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line} is not YAML: {error.problem}") from error
    except RecursionError:
        raise ValueError(f"{path} cannot be read: it is nested too deeply") from None
    except Exception as error:  # constructors of YAML raise many types, such as AttributeError
        if "set_int_max_str_digits" in str(error):
            raise ValueError(f"{path} cannot be read: a number has over 4,300 digits") from error
        raise unreadable(path, error) from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} holds a {type(tree).__name__}, but must hold {what}")
    return tree


def wrong_names(
    record: type[Record], aliases: Mapping[str, str], names: Iterable[str], source: str
) -> tuple[Problem, ...]:
    """Return problems of unknown names, with the nearest known ones, and of names for the same
    setting.
    """
    known = _Names(record, aliases)
    known.translated(dict.fromkeys(names), source)
    return tuple(known.problems)


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`; keys with dots are allowed, too."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class _Names:
    """Names and aliases of a record's settings; collects problems of the given ones."""

    def __init__(self, record: type[Record], aliases: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._settings = {setting.name: setting for setting in settings(record)}
        self._mappings = [one.name for one in self._settings.values() if one.is_mapping]
        self._aliases = aliases
        self._list = "`areal-lab config` lists" if record is TrainConfig else "--help lists"
        self._sources: dict[str, str] = {}

    def translated(
        self,
        given: Mapping[str, Any],
        source: str,
        before: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Values by the settings' own names; a mapping stays in one piece."""
        spelled: dict[str, str] = {}
        gathered: dict[str, Any] = {}
        for name in given:
            target = self._aliases.get(name, name)
            mapping = next(
                (one for one in self._mappings if f"{target}.".startswith(f"{one}.")), ""
            )
            if mapping:
                path = target.removeprefix(mapping).split(".")[1:]
                known = gathered.get(mapping, before.get(mapping, {}))
                gathered[mapping] = entered(known, path, given[name])
                self._sources[mapping] = source
                continue
            if target not in self._settings:
                self._refuse(name, self._unknown(name, target, source))
            elif target in spelled:
                both = f"as {spelled[target]!r} and {name!r}"
                self._refuse(target, f"{source} sets {target!r} twice: {both}")
            else:
                spelled[target] = name
        self._sources |= dict.fromkeys(spelled, source)
        return {**{target: given[name] for target, name in spelled.items()}, **gathered}

    def over(
        self, start: Record, values: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Merge the values of a later source over those of earlier ones, or over those of
        `start`.
        """
        laid = {**values, **given}
        for name in self._mappings:
            if name in given:
                under = values[name] if name in values else named(value_of(start, name))
                laid[name] = laid_over(under, given[name])
        return laid

    def refuse_base(self) -> None:
        self._refuse(
            BASE,
            f"{BASE!r} in the overrides belongs into a file; on the command line name several "
            "configs, the last one wins: areal-lab train tiny gspo",
        )

    def read_override(self, override: str) -> Iterator[tuple[str, Any]]:
        """Split `a.b=c` into name and value; text is taken literally unless it is quoted."""
        yaml: Any = importlib.import_module("yaml")  # by name: it has no types
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            self._refuse(key, f"override {override!r} is not of the form a.b=c")
            return
        setting = self._settings.get(self._aliases.get(key, key))
        if setting is not None and setting.is_text and not text.startswith(("'", '"')):
            yield key, text
            return
        try:
            parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
        except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError):
            shown = override if len(override) <= _SHOWN else f"{override[:_SHOWN]}..."
            self._refuse(key, f"the value in override {shown!r} is not YAML")
            return
        assert isinstance(parsed, dict)
        yield key, parsed["value"]

    def resolved(self, start: Record, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values with each `${a.b}` replaced by the value of that setting."""
        if not any("${" in text or text == "???" for text in texts(values)):
            return dict(values)
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        computed = {name for name, value in values.items() if any(map(_CALL.search, texts(value)))}
        for name in computed:
            self._refuse(
                name,
                f"{name} in {self._sources[name]} is {values[name]!r}, but ${{...}} may only name "
                "another setting: a file reads no environment variables, which config.yaml would "
                f"show; give the value on the command line: {name}=$VARIABLE",
            )
        values = {name: value for name, value in values.items() if name not in computed}
        tree = OmegaConf.create(start.model_dump())
        for name, value in values.items():
            OmegaConf.update(tree, name, value, merge=False)
        found: dict[str, Any] = {}
        for name, value in values.items():
            try:
                one = OmegaConf.select(tree, name, throw_on_missing=True)
                found[name] = OmegaConf.to_object(one) if OmegaConf.is_config(one) else one
            except OmegaConfBaseException:
                reason = "refers to a setting that does not exist; write the value itself"
                if value == "???":
                    reason = "marks a missing value; set one"
                source = self._sources[name]
                self._refuse(name, f"{name} in {source} is {short(value)}, which {reason}")
        return found

    def _refuse(self, setting: str, message: str) -> None:
        self.problems.append(Problem(Kind.SETTINGS, setting, message))

    def _unknown(self, name: str, target: str, source: str) -> str:
        below = sorted(one for one in self._settings if one.startswith(f"{target}."))
        if below:
            return f"{target!r} in {source} is a group of settings, such as {below[0]!r}"
        hint = of_unknown(target) or nearest(name, [*sorted(self._settings), *self._aliases])
        return f"unknown setting {short(name)} in {source}{hint or f'; {self._list} all of them'}"


BASE: Final = "base"
"""Key of a file that names its bases."""
Layer: TypeAlias = tuple[str, Mapping[Any, Any]]
"""Settings, and where they were read, for messages."""


def read_layers(
    path: Path,
    shipped: Mapping[str, Path],
    read: Callable[[Path], Mapping[Any, Any]],
    *,
    within: Sequence[Path] = (),
) -> list[Layer]:
    """Return the settings of a file's bases, of their bases, and of the file itself, in this
    order.
    """
    here = path.resolve()
    if here in within:
        circle = " -> ".join(one.name for one in (*within[within.index(here) :], here))
        raise ValueError(f"{path} is its own base ({circle}); leave one of them out")
    tree = dict(read(path))
    layers: list[Layer] = []
    for name in _names(tree.pop(BASE, []), path):
        try:
            file = _base(name, path, shipped)
        except ValueError as error:
            raise ValueError(f"{BASE} in {path}: {error}") from error
        layers += read_layers(file, shipped, read, within=(*within, here))
    return [*layers, (str(path), tree)]


def _names(given: Any, path: Path) -> list[str]:
    names = given if isinstance(given, list) else [given]
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"{BASE} in {path} is {given!r}, but must be the name of a shipped config, a path "
                "relative to this file, or a list of them"
            )
    return names


def _base(name: str, path: Path, shipped: Mapping[str, Path]) -> Path:
    if not (name.endswith((".yaml", ".yml")) or "/" in name):
        return named_file(name, shipped, "config")
    file = path.parent / Path(name).expanduser()
    if not file.is_file():
        raise ValueError(f"{file} does not exist; paths are relative to {path}")
    return file
