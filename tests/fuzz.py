"""What the fuzzers of all boundaries share: how many mutations, and mutations of bytes and of JSON.

A fuzzer takes valid input, changes it at random (with a seed, so that a failure repeats), and
asserts what its boundary promises: success or one error of the promised type, in one line.
The default suite tries a few mutations, `make test-slow` ten thousand.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

import pytest

mutations = pytest.mark.parametrize(
    "count",
    [pytest.param(200, id="few"), pytest.param(10_000, id="many", marks=pytest.mark.slow)],
)
"""Parametrize a fuzzer by the number of its mutations."""

SCALARS: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-40, 1e308),
    *("", " ", "a", "0", "-1", "1e400", "NaN", "null", "\x00", "\ud800", "../x", "a/b", "x" * 5000),
)
"""Values that readers of JSON have to expect anywhere."""


def one_line(error: BaseException, limit: int = 2000) -> bool:
    """True if an error is readable: one line, not empty, and of bounded length."""
    return 0 < len(str(error)) <= limit and "\n" not in str(error).strip()


def refused(call: Callable[[], object]) -> str:
    """The error of a call in one line; empty if it succeeds. Any other exception is raised."""
    try:
        call()
    except ValueError as error:
        found = error
    else:
        return ""
    assert one_line(found), found
    return str(found)


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    """Change a file: flip a bit, cut, repeat, remove, insert or overwrite a part."""
    if not content:
        return rng.randbytes(rng.randint(1, 8))
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice((1, 2, 8, 64, 4096)))
    part = content[start:end]
    flipped = bytes([content[start] ^ (1 << rng.randrange(8))])
    instead = rng.choice(
        (
            flipped + part[1:],
            part * rng.randint(2, 4),
            b"",
            rng.randbytes(rng.randint(1, 16)) + part,
            rng.randbytes(len(part)),
        )
    )
    cut = rng.randrange(6) == 0
    return content[:start] + (b"" if cut else instead + content[end:])


def damaged_json(rng: random.Random, value: Any) -> Any:
    """Change one place of a JSON value: its type, its value, or the keys or items around it."""
    value = json.loads(json.dumps(value))
    holder: list[Any] = [value]
    parent, key = rng.choice(_places(holder))
    match rng.randrange(5):
        case 0 if parent is not holder:
            del parent[key]
        case 1:
            parent[key] = rng.choice(([], {}, [parent[key]], {"x": parent[key]}, [[]] * 3))
        case 2 if isinstance(parent, dict):
            parent[rng.choice(("", "x", "__class__", "version", key + "x"))] = parent[key]
        case 3:
            parent[key] = nested(rng.choice((3, 50, 500)), parent[key])
        case _:
            parent[key] = rng.choice(SCALARS)
    return holder[0]


def nested(depth: int, value: Any) -> Any:
    """A value inside `depth` lists."""
    for _ in range(depth):
        value = [value]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each (container, key) below a value."""
    found: list[tuple[Any, Any]] = []
    open_: list[Any] = [value]
    while open_:
        container = open_.pop()
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, item in items:
            found.append((container, key))
            if isinstance(item, dict | list):
                open_.append(item)
    return found
