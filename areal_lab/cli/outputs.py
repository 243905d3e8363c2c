"""Output paths, checked before anything is simulated, and the console.

Each check takes the name of the option for its messages, and returns the path to write.
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
"""Picture formats by suffix; a name without a suffix gets the first."""


def file_to_write(option: str, path: Path) -> Path:
    """Check that a file can be written; missing folders above it are made later.

    Raises:
        ValueError: in one line, if the path is a folder or cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{option} is {path}, which is a folder; name a file in it")
    _check_writable(option, path)
    return path


def picture_to_write(option: str, path: Path) -> Path:
    """Check that a picture can be written, in the format of its suffix.

    Raises:
        ValueError: in one line, if the format is unknown, or as `file_to_write`.
    """
    if path.is_dir():
        raise ValueError(
            f"{option} is {path}, which is a folder; name a file in it, such as picture.png"
        )
    if not path.suffix:
        path = path.with_name(f"{path.name}{PICTURES[0]}")
    if path.suffix.lower() not in PICTURES:
        raise ValueError(
            f"{option} is {path}, but a picture must end with one of {', '.join(PICTURES)}; "
            f"for example {path.with_suffix(PICTURES[0])}"
        )
    return file_to_write(option, path)


def folder_to_write(option: str, path: Path) -> Path:
    """Check that a folder exists or can be made.

    Raises:
        ValueError: in one line, if the path is a file or cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} is {path}, which is a file; name a folder")
    _check_writable(option, path)
    return path


def console_on(file: IO[str], width: int = WIDTH) -> Console:
    """A console as wide as its terminal; without a terminal, `width` columns."""
    from rich.console import Console

    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=width, soft_wrap=False)


def _check_writable(option: str, path: Path) -> None:
    """Refuse a path if it, or the nearest existing folder above it, cannot be written."""
    found = nearest_existing(path)
    if not path.exists() and not found.is_dir():
        raise ValueError(f"{option} is {path}, but {found} is a file; name another folder")
    if not os.access(found, os.W_OK):
        raise ValueError(f"{option} is {path}, but {found} is not writable; name another folder")
