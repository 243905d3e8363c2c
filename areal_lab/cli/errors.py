"""Report errors of a command: one line on stderr and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

import typer

from areal_lab.host.terminal import printable

FAILED: Final = 1
WRONG_SETTINGS: Final = 2
INTERRUPTED: Final = 130

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
