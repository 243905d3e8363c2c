"""Where results are written: checks of paths before anything is simulated, and the console.

Each check takes the option that the path is from, for messages, and returns what is written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from areal_lab.host.owned_folders import nearest_existing

if TYPE_CHECKING:
    from rich.console import Console

WIDTH: Final = 100
PICTURES: Final = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")
"""Kinds of pictures; without an ending it is the first."""


def file_to_write(option: str, path: Path) -> Path:
    """A file that can be written; folders above it are made later.

    Raises:
        ValueError: in one line: a folder has this name, or nothing can be written there.
    """
    if path.is_dir():
        raise ValueError(f"{option} is {path}, which is a folder; name a file in it")
    _check_place(option, path)
    return path


def picture_to_write(option: str, path: Path) -> Path:
    """The same of a picture; its kind is that of its ending.

    Raises:
        ValueError: in one line: no such kind of picture, or as of `file_to_write`.
    """
    if path.is_dir():
        raise ValueError(
            f"{option} is {path}, which is a folder; name a file in it, as picture.png"
        )
    if not path.suffix:
        path = path.with_name(f"{path.name}{PICTURES[0]}")
    if path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{option} is {path}, but a picture ends with one of {', '.join(PICTURES)}; "
            f"name {path.with_suffix(PICTURES[0])}"
        )
    return file_to_write(option, path)


def folder_to_write(option: str, path: Path) -> Path:
    """A folder that is there, or can be made.

    Raises:
        ValueError: in one line: a file has this name, or nothing can be written there.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} is {path}, which is a file; name a folder")
    _check_place(option, path)
    return path


def console_on(file: IO[str], width: int = WIDTH) -> Console:
    """A console as wide as its terminal, or as wide as tables want to be where there is none."""
    from rich.console import Console

    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=width, soft_wrap=False)


def _check_place(option: str, path: Path) -> None:
    """What is there already, or the nearest folder above it, has to take it."""
    place = nearest_existing(path)
    if not path.exists() and not place.is_dir():
        raise ValueError(f"{option} is {path}, but {place} is a file; name another folder")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{option} is {path}, but {place} cannot be written; name another place")
