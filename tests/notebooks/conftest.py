"""Fixtures of the tests of notebooks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

Ran = tuple[tuple[Any, ...], Mapping[str, Any]]


@pytest.fixture(scope="module")
def notebook() -> Callable[[str], Ran]:
    """`notebook("03_staleness")`: outputs and names of its cells before any control moves.

    Each notebook runs once per test module. For another state of a control, run the app itself:
    `importlib.import_module("notebooks.03_staleness").app.run(defs={...})`.
    """

    @cache
    def run(name: str) -> Ran:
        ran: Ran = importlib.import_module(f"notebooks.{name}").app.run()
        return ran

    return run
