"""Numbers as logs print them: NaN in all spellings, numpy scalars, durations, printed precision.

number("np.float64(0.5)")  0.5      number("nan")  None      number("1.03e")  UNREAD
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, Final

UNREAD: Final = object()
"""Result of `number` for text that is neither a number nor a spelling of "missing"."""

_NUMBER: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WRAPPED: Final = re.compile(
    r"(?:np\.|numpy\.)?(?:float|int|uint|bfloat)\d*\(([^()]{1,60})\)"
    r"|(?:tensor|array)\(([^(),\[\]]{1,60})(?:,[^()]{0,80})?\)"
)
_MISSING: Final = frozenset(
    (
        "nan",
        "+nan",
        "-nan",
        "none",
        "null",
        "",
        "inf",
        "+inf",
        "-inf",
        "infinity",
        "-infinity",
        "+infinity",
        "no log",
        "n/a",
        "<na>",
    )
)
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s?(ms|d|h|m|s)")
_DURATIONS: Final = re.compile(r"(?:\d+(?:\.\d+)?\s?(?:ms|d|h|m|s)\s*)+")
_SECONDS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST: Final = 64
"""Most characters of a number."""


def number(raw: Any) -> Any:
    """Parse a value: a finite float, None for NaN, infinity and "missing", else `UNREAD`."""
    if isinstance(raw, str):
        short = raw if len(raw) <= 2 * _LONGEST else raw.strip()
        return _parsed(short) if len(short) <= 2 * _LONGEST else UNREAD
    if raw is None:
        return None
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return UNREAD
    try:
        value = float(raw)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


@lru_cache(maxsize=16_384)
def _parsed(text: str) -> Any:
    text = text.strip()
    if len(text) <= _LONGEST and _NUMBER.fullmatch(text) is not None:
        value = float(text)
        return value if math.isfinite(value) else None
    if (found := _WRAPPED.fullmatch(text)) is not None:
        text = (found[1] or found[2]).strip()
    text = text.strip("'\"_")
    if text.lower() in _MISSING:
        return None
    if len(text) > _LONGEST or _NUMBER.fullmatch(text) is None:
        return UNREAD
    value = float(text)
    return value if math.isfinite(value) else None


def known(raw: Any) -> float | None:
    """A number, or None if it is missing or unreadable."""
    value = number(raw)
    return None if value is UNREAD else value


def whole(raw: Any) -> int | None:
    """A whole number of moderate size, or None."""
    value = known(raw)
    return int(value) if value is not None and value == int(value) and abs(value) < 2**53 else None


def tidy(value: float) -> float | int:
    """A whole number as an int, so that counts print without a point."""
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def resolution(raw: Any) -> float:
    """Half a unit of the last digit that was printed; of a float, of its shortest form."""
    text = (raw if isinstance(raw, str) else repr(raw)).strip().strip("'\"").lower()
    digits, _, exponent = text.partition("e")
    decimals = len(digits.partition(".")[2])
    try:
        return float(0.5 * 10.0 ** (int(exponent or 0) - decimals))
    except (ValueError, OverflowError):
        return 0.0


def whole_ratio(above: Any, below: Any, *, spread: float = 0.0) -> int | None:
    """Return the only whole number that the quotient of two printed numbers may be, else None.

    `spread` is a relative error besides that of the digits.
    """
    top, bottom = known(above), known(below)
    if top is None or bottom is None or top <= 0 or bottom <= 0:
        return None
    wide = resolution(above) + (spread + 1e-9) * top
    narrow = resolution(below) + (spread + 1e-9) * bottom
    if bottom <= narrow:
        return None
    low = math.ceil((top - wide) / (bottom + narrow))
    high = math.floor((top + wide) / (bottom - narrow))
    return low if low == high and low >= 1 else None


def seconds(text: str) -> tuple[float, float] | None:
    """Parse a duration such as `850ms`, `58.4s`, `1m 12s`: seconds, and unit of the last digit."""
    text = text.strip()
    if len(text) > _LONGEST or _DURATIONS.fullmatch(text) is None:
        return None
    parts = _DURATION.findall(text)
    amount, unit = parts[-1]
    decimals = len(amount.partition(".")[2])
    total = sum(float(one) * _SECONDS[kind] for one, kind in parts)
    return total, _SECONDS[unit] * 10.0**-decimals


def clock(text: str) -> float | None:
    """Seconds of a bar's time, `MM:SS` or `H:MM:SS`; None if it is not one."""
    parts = text.strip().split(":")
    if not 2 <= len(parts) <= 4 or not all(one.isdigit() and len(one) < 8 for one in parts):
        return None
    total = 0.0
    for one in parts:
        total = total * 60 + int(one)
    return total
