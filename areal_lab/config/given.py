"""Arguments of public functions that accept a record, a name, a path or settings.

    train("tiny")   train({"total_train_steps": 3})   read_run(run)   load_config(config, {...})

An argument of another type is refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import IOBase
from os import PathLike
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias, TypeVar

from areal_lab.config.problem import refusal
from areal_lab.config.record import Record
from areal_lab.config.shipped import settings_file
from areal_lab.host.durable import expanded

Source: TypeAlias = str | Path | Mapping[str, Any] | Record
"""A YAML file, the name of a shipped one, settings by name, or a config to start from."""
Overrides: TypeAlias = str | Iterable[str] | Mapping[str, Any]
"""Changes of settings: `a.b=c`, or several, the value in YAML, as on the command line; or values by
name."""
Sources: TypeAlias = Source | Iterable[Source] | None
"""One of these or several, each merged over those before it; None takes the defaults."""
_Record = TypeVar("_Record", bound=Record)
_SOURCES = (str, PathLike, Mapping, Record)


def given_config(value: object, kind: type[_Record], load: Callable[[Any], _Record]) -> _Record:
    """Return a caller's record, or load one from any other value that `load` accepts."""
    if isinstance(value, kind):
        return value
    if isinstance(value, type):
        raise refusal("config", f"config is the class {value.__name__}; write {value.__name__}()")
    if isinstance(value, Record) or not isinstance(value, _SOURCES):
        raise refusal(
            "config",
            f"config is {type(value).__name__}, but must be a {kind.__name__}, the name or path of "
            'a YAML file, or settings by name: {"seed": 2}',
        )
    return load(value)


def given_sources(value: object) -> list[Any]:
    """Return the sources of an argument (one or several) as a list, or None for none."""
    if value is None:
        return []
    sources: list[Any] = [value]
    if isinstance(value, Iterable) and not isinstance(value, (*_SOURCES, bytes, IOBase)):
        sources = list(value)
    for one in sources:
        if not isinstance(one, _SOURCES):
            raise refusal(
                "config",
                f"a config is {type(one).__name__} ({one!r:.60}), but must be the name or path of "
                'a YAML file, or settings by name: {"seed": 2}',
            )
    return sources


def source_files(value: object, known: Mapping[str, Path], kind: str) -> list[Any]:
    """Return the sources of a config, with the names of shipped files replaced by their paths."""
    return [
        one if isinstance(one, Mapping | Record) else settings_file(one, known, kind)
        for one in given_sources(value)
    ]


def given_overrides(value: object) -> Mapping[str, Any] | list[str]:
    """Return overrides as values by name, or as texts `a.b=c`; None gives none."""
    if isinstance(value, Mapping):
        return value
    texts: list[Any] = [] if value is None else [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        texts = list(value)
    for one in texts:
        if not isinstance(one, str):
            raise refusal(
                "overrides",
                f"an override is {type(one).__name__} ({one!r:.60}), but must be text such as "
                '"seed=2"; or give values by name: {"seed": 2}',
            )
    return texts


def given_path(value: object, name: str) -> Path:
    """Return a path; accepts a path, or an object with a folder, such as a run."""
    folder = getattr(value, "folder", value)
    if not isinstance(folder, str | PathLike):
        raise ValueError(
            f"{name} is {type(value).__name__} ({value!r:.60}), but must be a path, such as "
            '"runs/tiny", or a run'
        )
    return expanded(Path(folder), name)


def given_text(value: object, what: str) -> str:
    """Return a name, or a path as text."""
    if not isinstance(value, str | PathLike):
        raise ValueError(f"{what} is {type(value).__name__} ({value!r:.60}), but must be a name")
    return str(expanded(value, what))


def given_number(value: object, name: str) -> float:
    """Return a number of Python or of NumPy."""
    if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
        raise ValueError(f"{name} is {value!r:.60}, but must be a number")
    return float(value)


def given_texts(values: object, name: str) -> list[str]:
    """Return one name or several as a list."""
    texts = [values] if isinstance(values, str) else values
    if not isinstance(texts, Iterable) or not all(isinstance(one, str) for one in texts):
        raise ValueError(f"{name} is {values!r:.60}, but must be names, such as ['gspo', 'dapo']")
    return list(texts)
