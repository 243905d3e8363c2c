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
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from areal_lab.config import TrainConfig

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
        return self.type.__name__ if isinstance(self.type, type) else str(self.type)


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Merge a YAML file and overrides onto the defaults of a training run.

    Args:
        path: YAML file; None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `gconfig.stop=["\\n"]`, `eta=inf`.

    Raises:
        ValueError: as `load_record` does.
    """
    return load_record(TrainConfig, path, overrides, ALIASES)


def load_record(
    record: type[_Record],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    aliases: Mapping[str, str] = _NO_ALIASES,
) -> _Record:
    """Merge a YAML file and overrides onto the defaults of a configuration record.

    Args:
        record: a dataclass whose fields are settings, or dataclasses of settings.
        path: YAML file; None takes the defaults.
        overrides: `a.b=c` each, the value in YAML.
        aliases: other spellings of settings, by dotted path.

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
        schema.take(values, _flat(_read_yaml(Path(path))), str(path))
    for override in overrides:
        schema.take(values, dict([schema.read_override(override)]), "the overrides")
    config = OmegaConf.structured(record)
    for name, value in values.items():
        schema.refuse_nested(name, value)
        try:
            OmegaConf.update(config, name, value)
        except OmegaConfBaseException as error:
            raise ValueError(schema.wrong_type(name, value)) from error
    try:
        loaded = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # a ${reference} that leads nowhere
        raise ValueError(str(error).split("\n", 1)[0]) from error
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
                raise ValueError(f"unknown setting {name!r} in {source}{hint}")
            if target in spelled:
                raise ValueError(
                    f"{source} sets {target!r} twice: as {spelled[target]!r} and {name!r}"
                )
            spelled[target] = name
            values[target] = value

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
        wrong = f"{name} is {value!r}, but must be of type {setting.type_name}"
        if setting.element not in _SINGLE:
            return wrong
        example = setting.default or ([value] if isinstance(value, setting.element) else [])
        return f"{wrong}; as in {shlex.quote(f'{name}={json.dumps(example)}')}"


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
