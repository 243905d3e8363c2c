"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Given = ParamSpec("Given")


def in_loop(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run
