"""Find settings that were given but have no effect: one table for each kind of config.

    Condition(names, read, why)    settings, when they are read, and why not otherwise, with a fix

A table names every setting of its record: those that are always read, and those with conditions. A
setting with several conditions is read if all of them are true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import Record, Setting, given_settings, settings, value_of


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition under which some settings are read."""

    names: tuple[str, ...]
    """Settings, or groups of them that end in a dot."""
    read: Callable[[Any], object]
    """True for a config under which they are read."""
    why: str | Callable[[Any], str]
    """End of the sentence `... has no effect`: the reason, and the setting to change."""
    refused: bool = False
    """True if ignoring the settings would change the data, the model, the reward or the loss."""

    def of(self, setting: Setting) -> bool:
        """Return whether the condition is about a setting."""
        return is_among(setting.name, self.names)


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Table of the conditions under which each setting of a record is read."""

    record: type[Record]
    always: tuple[str, ...]
    """Settings, and groups that end in a dot, that are always read."""
    conditions: tuple[Condition, ...]

    def unnamed(self) -> list[str]:
        """Return settings that the table does not name; a test asserts that the list is empty."""
        known = (*self.always, *(name for one in self.conditions for name in one.names))
        return [one.name for one in settings(self.record) if not is_among(one.name, known)]

    def refusals(self, config: Record) -> Iterator[Problem]:
        """Return a problem for each unread setting that the run must not ignore."""
        for condition, unread in self._unread(config, refused=True):
            for name in unread:
                message = f"{name} is {value_of(config, name)!r}, but has no effect"
                yield Problem(Kind.SETTINGS, name, f"{message} {_why(condition, config)}")

    def notes(self, config: Record) -> Iterator[str]:
        """Return notes on unread settings that change no result, one line per reason."""
        for condition, unread in self._unread(config, refused=False):
            yield f"{', '.join(unread)} has no effect {_why(condition, config)}"

    def check(self, config: Record) -> list[str]:
        """Refuse unread settings that must not be ignored; return the notes on the others.

        Raises:
            ConfigError: one line for each setting that is refused.
        """
        if found := list(self.refusals(config)):
            raise ConfigError(*found)
        return list(self.notes(config))

    def _unread(self, config: Record, *, refused: bool) -> Iterator[tuple[Condition, list[str]]]:
        """First false condition of each given setting."""
        found: dict[Condition, list[str]] = {}
        for one in given_settings(config):
            failed = (each for each in self.conditions if each.of(one) and not each.read(config))
            if (condition := next(failed, None)) is not None:
                found.setdefault(condition, []).append(one.name)
        return ((one, names) for one, names in found.items() if one.refused is refused)


def is_among(name: str, names: Iterable[str]) -> bool:
    """Return whether a setting is one of these settings, or in one of these groups."""
    return any(name.startswith(one) if one.endswith(".") else name == one for one in names)


def _why(condition: Condition, config: Record) -> str:
    return condition.why if isinstance(condition.why, str) else condition.why(config)
