"""What is wrong with settings, as records: code reads `kind` and `setting`, people the message."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a problem is about."""

    SETTINGS = "settings"
    """A value or a name, whatever the hardware."""
    MEMORY = "memory"
    """Something does not fit."""
    DIVISIBILITY = "divisibility"
    """Numbers that must be multiples of each other."""
    PLACEMENT = "placement and schedule"
    """What runs on which GPUs, and when."""
    MACHINE = "machine"
    """This machine lacks something: an engine, a port, a folder, room on the disk."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: Kind
    setting: str
    """Dotted name of the setting to change."""
    message: str
    """One line: the value, the bound and the fix. Nothing in it is for code."""
    command: str = ""
    """Shell command that fixes it, if one does."""

    def __str__(self) -> str:
        """The message, with the command."""
        return f"{self.message}; run: {self.command}" if self.command else self.message


class ConfigError(ValueError):
    """Settings that cannot work: one line per problem."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)  # as they are, so that the error can be pickled

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All of them."""
        return self.args

    def __str__(self) -> str:
        """A line for each."""
        return "\n".join(map(str, self.args))


def refusal(
    setting: str, message: str, kind: Kind = Kind.SETTINGS, *, command: str = ""
) -> ConfigError:
    """The error of one problem."""
    return ConfigError(Problem(kind, setting, message, command))


def problems_of(error: ValueError, setting: str, *, named: bool = False) -> tuple[Problem, ...]:
    """The problems that an error carries; the text of any other error, as one about `setting`.

    Args:
        error: any.
        setting: what to change.
        named: the text says of itself what it is about.
    """
    if isinstance(error, ConfigError):
        return error.problems
    text = str(error) if named else f"{setting}: {error}"
    return (Problem(Kind.SETTINGS, setting, text),)


def below(group: str, problem: Problem) -> Problem:
    """A problem of a record as one of the record that has it as `group`.

    What a record says of its own fields begins with their names.
    """
    return dataclasses.replace(
        problem, setting=f"{group}.{problem.setting}", message=f"{group}.{problem.message}"
    )
