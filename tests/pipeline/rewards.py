"""The reward of tiny runs, in its own file so that a reward worker imports no torch."""

from __future__ import annotations

from typing import Any


def even_digits(completion: str, example: dict[str, Any]) -> float:
    """A reward that any model meets often, so that every group has differences to learn from."""
    del example
    return float(sum(character in "02468" for character in completion))
