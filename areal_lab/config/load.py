"""Load settings from YAML and `a.b=c` overrides into a record, with precise errors.

    defaults (the record's) <- bases of the file <- YAML file <- overrides, the last one wins

`load_config` fills a `TrainConfig`; `load_record` any record of records, such as the simulator's.
Paths in a YAML file are relative to the current folder, not to the file, but for those of `base`.

OmegaConf reads the YAML (its loader reads 1e-5 as a number and refuses duplicate keys) and
resolves `${other.setting}`; the record does the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from areal_lab.config.inherit import BASE, Layer, read_layers
from areal_lab.config.mappings import entered, laid_over, named, texts
from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import Record, settings, value_of
from areal_lab.config.schema import TrainConfig
from areal_lab.config.seams import of_unknown
from areal_lab.config.shipped import recipes, settings_file, training_configs
from areal_lab.config.suggest import nearest

ALIASES = {
    "eta": "rollout.max_head_offpolicyness",
    "max_staleness": "rollout.max_head_offpolicyness",
    "staleness_limit": "rollout.max_head_offpolicyness",
    "rollout.eta": "rollout.max_head_offpolicyness",
    "rollout.max_staleness": "rollout.max_head_offpolicyness",
    "rollout.staleness_limit": "rollout.max_head_offpolicyness",
    "train_dataset.path": "dataset.path",
    "train_dataset.type": "dataset.type",
    "train_dataset.batch_size": "dataset.batch_size",
    "valid_dataset.path": "dataset.eval_path",
}
"""Other names of a setting: short forms, and names in AReaL and its documentation."""
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""Changes of settings: `a.b=c` each, the value in YAML, as on the command line; or values by
name."""
_NO_ALIASES: Mapping[str, str] = MappingProxyType({})
_Record = TypeVar("_Record", bound=Record)


def load_config(
    path: str | Path | Sequence[str | Path] | None = None, overrides: Overrides = ()
) -> TrainConfig:
    """Merge a YAML file and overrides onto the defaults of a training run.

    Args:
        path: YAML file, or the name of a shipped one (`arithmetic`) or of a recipe (`dapo`); of
            several, each wins over those before it; None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `gconfig.stop=["\\n"]`, `eta=inf`; or values by
            name: `{"eta": 4, "gconfig.stop": ["\\n"]}`.

    Raises:
        ConfigError: as `load_record` does.
    """
    known = {**training_configs(), **recipes()}
    sources = [] if path is None else [path] if isinstance(path, str | Path) else path
    files = [settings_file(one, known, "config") for one in sources]
    return load_record(TrainConfig(), files, overrides, ALIASES, bases=known)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What follows a config on the command line: further configs, and overrides `a.b=c`.

    The name of a setting without a value is an override too, to be refused as such.
    """
    known = {*ALIASES, *(one.name for one in settings(TrainConfig))}
    configs = [one for one in arguments if "=" not in one and one not in known]
    return configs, [one for one in arguments if one not in configs]


def load_record(
    start: _Record,
    path: str | Path | Sequence[str | Path] | None = None,
    overrides: Overrides = (),
    aliases: Mapping[str, str] = _NO_ALIASES,
    *,
    may_be_empty: bool = True,
    bases: Mapping[str, Path] | None = None,
) -> _Record:
    """Merge a YAML file and overrides onto a record of settings, usually its defaults.

    Args:
        start: the record to start from; it is not changed.
        path: YAML file, or several, each over those before it; None applies only the overrides.
        overrides: `a.b=c` each, the value in YAML; or values by name, nested or dotted.
        aliases: other names of settings, mapped to their dotted path.
        may_be_empty: whether a file may have no settings.
        bases: files that `base` at the top of a file may name; None takes `base` for a setting.

    Raises:
        ConfigError: one line for each unknown key (with the nearest name) and each value that is
            not allowed.
        ValueError: in one line, if the file is missing or broken.
    """
    names = _Names(type(start), aliases)
    values: dict[str, Any] = {}
    for source, tree in _layers(path, bases):
        if not tree and not may_be_empty:
            raise ValueError(f"{source} is empty, but must hold at least one setting (`a: b`)")
        values = names.over(start, values, names.translated(dotted(tree), source))
    given: dict[str, Any] = {}
    if isinstance(overrides, Mapping):
        given = names.translated(dotted(overrides), "the overrides")
    else:
        for override in overrides:
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
    return loaded


def _layers(
    path: str | Path | Sequence[str | Path] | None, bases: Mapping[str, Path] | None
) -> Iterator[Layer]:
    """The settings of each file, after those of its bases."""
    paths = [] if path is None else [path] if isinstance(path, str | Path) else path
    for one in paths:
        if bases is None:
            yield str(one), read_yaml(Path(one))
        else:
            yield from read_layers(Path(one), bases, read_yaml)


def read_yaml(path: Path, what: str = "settings (`a: b`)") -> Mapping[Any, Any]:
    """The mapping in a YAML file, with unresolved references.

    Args:
        what: expected content, for messages.

    Raises:
        ValueError: in one line, if the file does not exist, is not YAML (with the line) or holds no
            mapping.
    """
    # Imported here, so that `--help` need not wait for it.
    yaml: Any = importlib.import_module("yaml")  # by name: it has no types
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if path.is_dir():
        raise ValueError(f"{path} is a folder, but must be a YAML file")
    if not path.is_file():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    try:
        # Not yaml.safe_load: that reads 1e-5 as text.
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line} is not YAML: {error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} holds a {type(tree).__name__}, but must hold {what}")
    return tree


def wrong_names(
    record: type[Record], aliases: Mapping[str, str], names: Iterable[str], source: str
) -> tuple[Problem, ...]:
    """The names that are no settings of a record, with the nearest ones, or that mean the same.

    Args:
        source: where the names stand, for messages.
    """
    known = _Names(record, aliases)
    known.translated(dict.fromkeys(names), source)
    return tuple(known.problems)


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; keys with dots are allowed, too."""
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
        """The values, by the settings' own names; those of a mapping in one piece.

        Args:
            given: values by name.
            source: where they stand, for messages.
            before: what the same source gave before, whose mappings are continued.
        """
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
        """The values of a later source over those of earlier ones, or over those of `start`."""
        laid = {**values, **given}
        for name in self._mappings:
            if name in given:
                under = values[name] if name in values else named(value_of(start, name))
                laid[name] = laid_over(under, given[name])
        return laid

    def refuse_base(self) -> None:
        """Refuse `base` as an override."""
        self._refuse(
            BASE,
            f"{BASE!r} in the overrides belongs into a file; on the command line name several "
            "configs, the last one wins: areal-lab train tiny gspo",
        )

    def read_override(self, override: str) -> Iterator[tuple[str, Any]]:
        """`a.b=c` as name and value; text is taken literally unless it is quoted."""
        yaml: Any = importlib.import_module("yaml")  # by name: it has no types
        from omegaconf import OmegaConf

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
        except yaml.YAMLError:
            self._refuse(key, f"the value in override {override!r} is not YAML")
            return
        assert isinstance(parsed, dict)
        yield key, parsed["value"]

    def resolved(self, start: Record, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, with `${a.b}` replaced by the value of that setting."""
        if not any("${" in text or text == "???" for text in texts(values)):
            return dict(values)
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

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
                self._refuse(name, f"{name} in {source} is {value!r}, which {reason}")
        return found

    def _refuse(self, setting: str, message: str) -> None:
        self.problems.append(Problem(Kind.SETTINGS, setting, message))

    def _unknown(self, name: str, target: str, source: str) -> str:
        below = sorted(one for one in self._settings if one.startswith(f"{target}."))
        if below:
            return f"{target!r} in {source} is a group of settings, such as {below[0]!r}"
        hint = of_unknown(target) or nearest(name, [*sorted(self._settings), *self._aliases])
        return f"unknown setting {name!r} in {source}{hint or f'; {self._list} all of them'}"
