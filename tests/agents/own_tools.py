"""Tools of a user's, good and bad."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Coroutine, Mapping
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


def capital(country: str) -> str:
    """The capital of a country."""
    return {"France": "Paris"}[country]


def times_out() -> None:
    """Has a time limit of its own, of something else."""
    raise TimeoutError("the server did not answer")


async def leaves_later() -> None:
    """Wants to end the process, from its event loop."""
    sys.exit(3)


async def cancels() -> None:
    """Awaits a task that was canceled."""
    task = asyncio.create_task(asyncio.sleep(0))
    task.cancel()
    await task


def wrapped(city: str) -> Coroutine[Any, Any, int]:
    """Not async itself, as a decorated function may be."""
    return distance(city, city)


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


class Wrapped(Adder):
    """Has a call that is not async itself, and a time limit of its own."""

    limits_itself = True

    def call(self, arguments: Mapping[str, Any]) -> Coroutine[Any, Any, str]:  # type: ignore[override]
        return Later().call(arguments)


class Bounded:
    """Takes the workflow's limits, and says them."""

    name, description = "bounded", ""
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
    }

    def __init__(self, *, sandbox: str, timeout_s: float = 1.0) -> None:
        self._limits = f"{sandbox}, {timeout_s:g} s"

    def call(self, arguments: Mapping[str, Any]) -> str:
        return f"{arguments['a']}: {self._limits}"


class NoTool:
    """Has no call."""

    name, description, parameters = "none", "", {}
