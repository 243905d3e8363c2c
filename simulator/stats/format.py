"""Format numbers for people, with only significant digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

_NAMES: Final = {"generate": "decode and prefill"}
_LEAST_HALF: Final = 1e-6
"""Relative half-width below which an interval is a rounding error of a constant number."""


def quantity(value: Mapping[str, Any], unit: str = "") -> str:
    """A mean with its interval over the seeds, such as `213.1 ± 1.2 s`.

    Of a number that also has the model's error, that is `seeds_low` to `seeds_high`.
    """
    mean = value["mean"]
    low, high = (value.get(f"seeds_{end}", value[end]) for end in ("low", "high"))
    half = 0.0 if low is None else (high - low) / 2
    if half <= _LEAST_HALF * abs(mean):
        half = 0.0
    text = number(mean, half)
    if half:
        text += f" ± {number(half, half)}"
    return f"{text} {unit}".rstrip()


def span(value: Mapping[str, Any], unit: str = "") -> str:
    """The interval of a number, such as `150 to 310 s`; empty if it is unknown or a point.

    Each end has two significant digits, or those of the half-width if it is smaller.
    """
    low, high = value["low"], value["high"]
    if low is None or not 0 < (half := (high - low) / 2) < math.inf:
        return ""
    return f"{_end(low, half)} to {_end(high, half)} {unit}".rstrip()


def _end(value: float, half: float) -> str:
    places = 1 - math.floor(math.log10(min(abs(value), half) or half))
    return f"{round(value, places):,.{max(places, 0)}f}"


def number(value: float, half: float = 0.0) -> str:
    """Four digits, or those that are significant for the half-width of an interval."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    places = 3 - math.floor(math.log10(abs(value)))
    if half > 0:
        # Two digits of the half-width; more would be noise.
        places = min(max(1 - math.floor(math.log10(half)), 0), places + 2)
    rounded = round(value, places)
    if places <= 0:
        return f"{rounded:,.0f}"
    text = f"{rounded:,.{min(places, 6)}f}"
    return text if half > 0 else text.rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """A duration in a readable unit."""
    unit, length = _unit_of(seconds)
    return f"{number(seconds / length)} {unit}"


def duration_span(low_s: float, high_s: float) -> str:
    """The interval of a duration in a readable unit, as `span`."""
    unit, length = _unit_of(high_s)
    return span({"low": low_s / length, "high": high_s / length}, unit)


def _unit_of(seconds: float) -> tuple[str, float]:
    for unit, length, most in (("s", 1.0, 180.0), ("min", 60.0, 180.0), ("h", 3600.0, 96.0)):
        if seconds < most * length:
            return unit, length
    return "days", 86400.0


def short_time(seconds: float) -> str:
    """Three digits in s, ms, us or ns: the largest unit that gives at least 1."""
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= length or seconds == 0:
            return f"{_digits(seconds / length)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown_name(activity: str) -> str:
    """The name of an activity in tables and pictures."""
    return _NAMES.get(activity, activity)
