"""Problems of settings as records: code reads `kind` and `setting`, users the message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Made = TypeVar("Made")


class Kind(StrEnum):
    """Category of a problem."""

    SETTINGS = "settings"
    """A wrong value or name, on any hardware."""
    MEMORY = "memory"
    """Something does not fit into memory."""
    DIVISIBILITY = "divisibility"
    """Numbers that must divide each other."""
    PLACEMENT = "placement and schedule"
    """The assignment of GPUs and the schedule."""
    MACHINE = "machine"
    """Something is missing on this machine: an engine, a port, a folder, disk space."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a config."""

    kind: Kind
    setting: str
    """Dotted name of the setting to change."""
    message: str
    """One line with the value, the bound and the fix. Code must not parse it."""
    command: str = ""
    """Shell command that fixes it, if one does."""

    def __str__(self) -> str:
        return f"{self.message}; run: {self.command}" if self.command else self.message


class ConfigError(ValueError):
    """Invalid settings; one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)  # passed on unchanged, so that the error can be pickled

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems."""
        return self.args

    def __str__(self) -> str:
        """One line per problem."""
        return "\n".join(map(str, self.args))


def refusal(
    setting: str, message: str, kind: Kind = Kind.SETTINGS, *, command: str = ""
) -> ConfigError:
    """A `ConfigError` with one problem."""
    return ConfigError(Problem(kind, setting, message, command))


def problems_of(error: ValueError, setting: str, *, named: bool = False) -> tuple[Problem, ...]:
    """Return the problems of a `ConfigError`; any other error becomes one problem of `setting`."""
    if isinstance(error, ConfigError):
        return error.problems
    text = str(error) if named else f"{setting}: {error}"
    return (Problem(Kind.SETTINGS, setting, text),)


def attempt(
    found: list[Problem], make: Callable[[], Made], setting: str, *, named: bool = False
) -> Made | None:
    """What `make` returns; if it raises a ValueError, its problems are added to `found`.

    Args:
        setting: see `problems_of`, as `named`.
    """
    try:
        return make()
    except ValueError as error:
        found += problems_of(error, setting, named=named)
        return None


def below(group: str, problem: Problem) -> Problem:
    """Return a problem of a nested record, with the name of its `group` prepended.

    Messages of a record begin with the names of its fields.
    """
    return dataclasses.replace(
        problem, setting=f"{group}.{problem.setting}", message=f"{group}.{problem.message}"
    )
