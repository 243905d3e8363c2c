"""What all programs share: they read tasks, do them one after another, and write what they heard.

Runs in the environment of a client: the standard library only.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A session at a gateway, and what to ask there."""

    url: str
    """Without `/v1`."""
    key: str
    question: str
    again: str
    """The question of the second turn."""


def do(**programs: Callable[[Task], Any]) -> None:
    """Do the tasks that standard input names, and write what each returns as one line of JSON."""
    given = json.load(sys.stdin)
    said = {}
    for name, key in given["keys"].items():
        task = Task(given["url"], key, given["question"], given["again"])
        found = programs[name](task)
        said[name] = asyncio.run(found) if inspect.iscoroutine(found) else found
    # Clients may have written to standard output, without a line break at the end.
    print(f"\n{json.dumps(said)}")
