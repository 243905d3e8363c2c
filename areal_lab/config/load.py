"""From YAML and `a.b=c` overrides to a configuration record, with errors that name the mistake.

    defaults (the record's) <- YAML file <- overrides, the last one wins

`load_config` fills a `TrainConfig`; `load_record` any record of records, as the simulator's. Paths
in a YAML file are relative to the current folder, not to the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import settings_file, training_configs

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
"""Other spellings of a setting: short ones, AReaL's, and those of texts about it."""
_NUMBER_AND_UNIT = re.compile(r"\s*([-+]?\d[\d.]*(?:e[-+]?\d+)?)\s*\D")
_NO_ALIASES: Mapping[str, str] = MappingProxyType({})
_SINGLE = (str, int, float, bool)
_Record = TypeVar("_Record")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting as a reader of `--help` sees it."""

    name: str
    """Dotted path, as in `actor.optimizer.lr`."""
    type: Any
    default: Any
    record: type
    """The configuration record it is a field of."""

    @property
    def element(self) -> Any:
        """Type of what a list holds; None if this is no list."""
        return typing.get_args(self.type)[0] if typing.get_origin(self.type) is list else None

    @property
    def type_name(self) -> str:
        """Type in words, as in `list[str]`."""
        if isinstance(self.type, type) and not typing.get_args(self.type):
            return self.type.__name__
        return re.sub(r"\b[a-z_]\w*\.(?=\w)", "", str(self.type))  # without names of modules


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Merge a YAML file and overrides onto the defaults of a training run.

    Args:
        path: YAML file, or the name of a shipped one (`arithmetic`); None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `gconfig.stop=["\\n"]`, `eta=inf`.

    Raises:
        ValueError: as `load_record` does.
    """
    file = None if path is None else settings_file(path, training_configs(), "config")
    return load_record(TrainConfig, file, overrides, ALIASES)


def load_record(
    record: type[_Record],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    aliases: Mapping[str, str] = _NO_ALIASES,
    *,
    may_be_empty: bool = True,
) -> _Record:
    """Merge a YAML file and overrides onto the defaults of a configuration record.

    Args:
        record: a dataclass whose fields are settings, or dataclasses of settings.
        path: YAML file; None takes the defaults.
        overrides: `a.b=c` each, the value in YAML.
        aliases: other spellings of settings, by dotted path.
        may_be_empty: a file without any setting stands for the defaults; False refuses it.

    Raises:
        ValueError: in one line: missing or broken file, unknown key (with the nearest name), wrong
            type.
    """
    # Loaded here and not above: a command line that only prints its help need not wait for it.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    schema = _Schema(record, aliases)
    values: dict[str, Any] = {}
    if path is not None:
        tree = _read_yaml(Path(path))
        if not tree and not may_be_empty:
            raise ValueError(f"{path} is empty, but must hold settings (`a: b`), one at least")
        schema.take(values, _flat(tree), str(path))
    for override in overrides:
        schema.take(values, dict([schema.read_override(override)]), "the overrides")
    config = OmegaConf.structured(record)
    for name, value in values.items():
        schema.refuse_nested(name, value)
        schema.check_entries(name, value)
        try:
            OmegaConf.update(config, name, value)
        except OmegaConfBaseException as error:
            raise ValueError(schema.wrong_type(name, value)) from error
    try:
        loaded = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ValueError(schema.unresolved(values, error)) from error
    assert isinstance(loaded, record)
    return loaded


def settings(record: type = TrainConfig, prefix: str = "") -> Iterator[Setting]:
    """Every setting below a configuration record, in the order of its definition."""
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from settings(typing.cast(type, hint), f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Setting(prefix + field.name, hint, default, record)


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?`, or nothing if no known name is near. For error messages."""
    by_name = {full.lower(): full for full in known}
    by_leaf = {full.rsplit(".", 1)[-1].lower(): full for full in reversed(known)}
    leaf = name.rsplit(".", 1)[-1].lower()
    if leaf in by_leaf:  # below another group, or below none: `lr`, `rollout.n_samples`
        found = [by_leaf[leaf]]
    else:
        found = [by_name[near] for near in difflib.get_close_matches(name.lower(), by_name, n=1)]
        found = found or [by_leaf[near] for near in difflib.get_close_matches(leaf, by_leaf, n=1)]
    return f"; did you mean {found[0]!r}?" if found else ""


class _Schema:
    """The settings of a record and their spellings."""

    def __init__(self, record: type, aliases: Mapping[str, str]) -> None:
        self._settings = {setting.name: setting for setting in settings(record)}
        self._aliases = aliases
        lists = "`areal-lab config` lists" if record is TrainConfig else "--help lists"
        self._all = f"; {lists} all of them"
        self._sources: dict[str, str] = {}
        self._groups = {
            name.rsplit(".", depth)[0]
            for name in self._settings
            for depth in range(1, name.count(".") + 1)
        }

    def take(self, values: dict[str, Any], new: Mapping[str, Any], source: str) -> None:
        """Check names, translate aliases, and overwrite what was there."""
        spelled: dict[str, str] = {}
        for name, value in new.items():
            target = self._aliases.get(name, name)
            if target in self._groups:
                below = next(f for f in sorted(self._settings) if f.startswith(f"{target}."))
                raise ValueError(
                    f"{target!r} in {source} is a group of settings, such as {below!r}"
                )
            if target not in self._settings:
                hint = nearest(name, [*sorted(self._settings), *self._aliases])
                raise ValueError(f"unknown setting {name!r} in {source}{hint or self._all}")
            if target in spelled:
                raise ValueError(
                    f"{source} sets {target!r} twice: as {spelled[target]!r} and {name!r}"
                )
            spelled[target] = name
            values[target] = value
            self._sources[target] = source

    def read_override(self, override: str) -> tuple[str, Any]:
        """`a.b=c` as name and value; a text is taken as it stands unless it is quoted."""
        yaml: Any = importlib.import_module("yaml")  # by name: it ships no types
        from omegaconf import OmegaConf

        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"override {override!r} is not of the form a.b=c")
        setting = self._settings.get(self._aliases.get(key, key))
        if setting is not None and setting.type is str and not text.startswith(("'", '"')):
            return key, text
        try:
            parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
        except yaml.YAMLError as error:
            raise ValueError(f"the value in override {override!r} is not YAML") from error
        assert isinstance(parsed, dict)
        return key, parsed["value"]

    def refuse_nested(self, name: str, value: Any) -> None:
        """Refuse lists in a list of single values, which OmegaConf lets pass."""
        single = self._settings[name].element in _SINGLE
        if single and isinstance(value, list) and any(isinstance(v, list | dict) for v in value):
            raise ValueError(self.wrong_type(name, value))

    def wrong_type(self, name: str, value: Any) -> str:
        """What to say of a value that does not fit."""
        setting = self._settings[name]
        if setting.element in _SINGLE:
            wrong = f"{name} is {value!r}, but must be of type {setting.type_name}"
            example = setting.default or ([value] if isinstance(value, setting.element) else [])
            return f"{wrong}; as in {shlex.quote(f'{name}={json.dumps(example)}')}"
        number, kind = _leading_number(value), setting.type_name.removesuffix(" | None")
        or_null = ", or null" if kind != setting.type_name else ""
        if number and kind in {"int", "float"}:
            return f"{name} is {value!r}, but must be a number without a unit, as {number}{or_null}"
        return f"{name} is {value!r}, but must be of type {kind}{or_null}"

    def unresolved(self, values: Mapping[str, Any], error: Exception) -> str:
        """What to say of a value that stands for another: `${a.b}`, or `???` for one to come."""
        name = str(getattr(error, "full_key", None) or "").split("[", 1)[0]
        if name not in values:
            return str(error).split("\n", 1)[0]
        said = f"{name} in {self._sources[name]} is {values[name]!r}, which"
        if values[name] == "???":
            return f"{said} stands for a value that is still missing; give one"
        return f"{said} refers to no setting that there is; write the value itself"

    def check_entries(self, name: str, value: Any) -> None:
        """Refuse a list of records where a record has other fields than it should.

        Raises:
            ValueError: in one line, with the fields that there are.
        """
        setting = self._settings.get(name)
        record = next(iter(typing.get_args(setting.type)), None) if setting else None
        if not isinstance(record, type) or not dataclasses.is_dataclass(record):
            return
        if not isinstance(value, list):
            fields = ", ".join(field.name for field in dataclasses.fields(record))
            raise ValueError(f"{name} is {value!r}, but must be a list of {{{fields}}}")
        for index, entry in enumerate(value):
            _check_entry(f"{name}[{index}]", entry, record)


def _check_entry(name: str, entry: Any, record: type) -> None:
    """Names and numbers of one record of a list."""
    known = [field.name for field in dataclasses.fields(record)]
    if not isinstance(entry, Mapping):
        raise ValueError(f"{name} is {entry!r}, but must be {{{', '.join(known)}}}")
    for key in entry:
        if key not in known:
            hint = nearest(str(key), known) or f"; known are {', '.join(known)}"
            raise ValueError(f"unknown setting {str(key)!r} in {name}{hint}")
    for setting in settings(record):
        value = entry.get(setting.name)
        needed = setting.default is dataclasses.MISSING
        if value is None and needed:
            raise ValueError(f"{name} is {dict(entry)}, but needs {setting.name!r} as well")
        if value is not None and not _fits(value, setting.type):
            raise ValueError(
                f"{name}.{setting.name} is {value!r}, but must be "
                + ("a text" if setting.type is str else "a number without a unit")
            )


def _fits(value: Any, kind: Any) -> bool:
    return isinstance(value, str) if kind is str else type(value) in {int, float}


def _leading_number(value: Any) -> str:
    """Of a text that begins with one, as `150 s`; else nothing."""
    found = _NUMBER_AND_UNIT.match(value) if isinstance(value, str) else None
    return found.group(1) if found else ""


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; a key may also be written with dots."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    yaml: Any = importlib.import_module("yaml")  # by name: it ships no types
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
        raise ValueError(f"{path} holds a {type(tree).__name__}, but must hold settings (`a: b`)")
    return tree
