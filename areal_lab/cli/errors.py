"""How errors of a command reach the user: a line on stderr and an exit code."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

import typer

FAILED: Final = 1
WRONG_SETTINGS: Final = 2
INTERRUPTED: Final = 130

P = ParamSpec("P")


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """The command; a ValueError ends it as wrong settings, an OSError as a failure."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:  # of several mistakes, each has a line
            raise stop("\nerror: ".join(str(error).splitlines()), WRONG_SETTINGS) from error
        except OSError as error:
            raise stop(failure(error), FAILED) from error

    return run


def stop(message: str, code: int) -> typer.Exit:
    """Say why, in red on stderr, and end with this code."""
    typer.secho(f"error: {message}", err=True, fg="red")
    return typer.Exit(code)


def failure(error: BaseException) -> str:
    """The message of an error the user can act on; with the traceback if it is another."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, RuntimeError | OSError | ValueError) and str(error):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
