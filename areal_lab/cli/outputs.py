"""Output paths, checked before anything is computed, and errors: one line and an exit code."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, ParamSpec

import typer

from areal_lab.host.owned_folders import nearest_existing
from areal_lab.host.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


WIDTH: Final = 100
PICTURES: Final = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps")
"""Picture formats by suffix; a name without a suffix gets the first."""


def file_to_write(option: str, path: Path) -> Path:
    """Check that a file can be written; missing folders above it are created later."""
    if path.is_dir():
        raise ValueError(f"{option} is {path}, which is a folder; name a file in it")
    if path.exists() and not path.is_file():  # it would be replaced
        raise ValueError(f"{option} is {path}, which is a device or a pipe; name a file")
    _check_writable(option, path)
    return path


def picture_to_write(option: str, path: Path) -> Path:
    """Check that a picture can be written, in the format of its suffix."""
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
    """Check that a folder exists or can be created."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} is {path}, which is a file; name a folder")
    _check_writable(option, path)
    return path


def console_on(file: IO[str], width: int = WIDTH) -> Console:
    """Create a console as wide as its terminal; without a terminal, `width` columns.

    Strings, also those in tables, are plain text: brackets are not markup unless a call says so,
    and escape sequences are written out.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    console = PlainConsole(file=file, markup=False)
    if console.is_terminal:
        return console
    return PlainConsole(file=file, width=width, soft_wrap=False, markup=False)


def _check_writable(option: str, path: Path) -> None:
    """Refuse a path if it, or the nearest existing folder above it, cannot be written."""
    found = nearest_existing(path)
    if not path.exists() and not found.is_dir():
        raise ValueError(f"{option} is {path}, but {found} is a file; name another folder")
    if not os.access(found, os.W_OK):
        raise ValueError(f"{option} is {path}, but {found} is not writable; name another folder")


FAILED: Final = 1
WRONG_SETTINGS: Final = 2

P = ParamSpec("P")


def exit_on_error(command: Callable[P, None]) -> Callable[P, None]:
    """Exit with 2 (wrong settings) on a ValueError and with 1 (failure) on an OSError."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:  # one line per problem
            raise error_exit("\nerror: ".join(str(error).splitlines()), WRONG_SETTINGS) from error
        except OSError as error:
            raise error_exit(error_text(error), FAILED) from error

    return run


@contextmanager
def failures_reported() -> Iterator[None]:
    """Exit with 1 on any error except a `ConfigError`, which describes wrong settings."""
    from areal_lab.config.problem import ConfigError

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # reported here, because no caller does
        raise error_exit(error_text(error), FAILED) from error


def error_exit(message: str, code: int) -> typer.Exit:
    """Print the message in red on stderr and return the exit to raise."""
    typer.secho(printable(f"error: {message}"), err=True, fg="red")
    return typer.Exit(code)


def error_text(error: BaseException) -> str:
    """The message if the user can act on it, else the traceback."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, RuntimeError | OSError | ValueError) and str(error):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
