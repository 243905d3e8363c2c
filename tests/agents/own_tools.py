"""Tools of a user's, good and bad."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from typing import Any

NEVER = threading.Event()


def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return " ".join([f"{city}: rain"] * days)


async def distance(start: str, end: str) -> int:
    """Kilometers."""
    return len(start) + len(end)


def hangs(seconds: float = 0) -> None:
    """Never returns."""
    del seconds
    NEVER.wait()


def leaves() -> None:
    """Wants to end the process."""
    sys.exit(3)


def unclear(thing: Unclear) -> str:
    """Has a parameter that JSON cannot have."""
    return str(thing)


def nameless(*numbers: int) -> int:
    """Has parameters without names."""
    return sum(numbers)


class Unclear:
    """No type of JSON."""


class Adder:
    """A tool that is made with keywords."""

    name, description = "add", "Adds."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "number"}},
        "required": ["a"],
    }

    def __init__(self, amount: int = 1) -> None:
        self._amount = amount

    def call(self, arguments: Mapping[str, Any]) -> str:
        return str(arguments["a"] + self._amount)


class Later(Adder):
    """The same, async."""

    name = "later"

    async def call(self, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().call(arguments)


class NoTool:
    """Has no call."""

    name, description, parameters = "none", "", {}
