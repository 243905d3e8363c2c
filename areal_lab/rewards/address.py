"""`reward.fn` may be an address, which is short for a class with keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FUNCTION: Final = "areal_lab.rewards.http:HttpReward"
_SCHEMES: Final = ("http://", "https://")


class Unreachable(ValueError):
    """There is no service at the address; in one line."""


def is_address(fn: str) -> bool:
    """Whether a reward function is a service over HTTP."""
    return fn.startswith(_SCHEMES)


def by_name(fn: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A reward function as `module:function`, and its keyword arguments."""
    return (FUNCTION, {"url": fn, **kwargs}) if is_address(fn) else (fn, dict(kwargs))
