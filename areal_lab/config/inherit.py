"""Settings files that stand on others: `base: tiny`, or a list, at the top of a file.

    base: [gsm8k, dapo]        shipped names, or paths relative to this file
    dataset.path: mine.jsonl   own settings win

Later bases win over earlier ones, and a file over its bases. What comes out is one list of trees,
the weakest first; nothing downstream knows of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from areal_lab.config.shipped import named_file

BASE: Final = "base"
"""Key of a file that names its bases."""
Layer: TypeAlias = tuple[str, Mapping[Any, Any]]
"""Where settings stand, for messages, and the settings."""


def read_layers(
    path: Path,
    shipped: Mapping[str, Path],
    read: Callable[[Path], Mapping[Any, Any]],
    *,
    within: Sequence[Path] = (),
) -> list[Layer]:
    """The settings of a file's bases, and of theirs, and its own last.

    Args:
        path: YAML file.
        shipped: files that a base may name without a path.
        read: gives the mapping in a file.
        within: files whose bases led here.

    Raises:
        ValueError: in one line: a file is missing or broken, a base is no text or unknown, or a
            file is its own base.
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
