"""What a command left behind, as numbers by dotted name: from a run's summary, or from JSON.

{"reward_after": {"mean": 0.6, "ci95": 0.1, "n": 64}}  -->  reward_after, .ci95, .n
{"step_s": {"mean": 3.4, "low": 3.3, "high": 3.5}}     -->  step_s, step_s.ci95 (of the seeds)
{"lag": {"token": {"mean": 1.0, "max": 2}}}            -->  lag.token.mean, lag.token.max
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.sweep.command import Prints

_NO_FIGURES: Final = ("config", "histogram")
"""Groups without figures: settings, which a cell has, and shares of each lag."""
_NOT_FINITE: Final = ("inf", "-inf", "nan")


class Incomplete(ValueError):
    """The command ended well, but the run did not come to its end."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one run."""

    figures: Mapping[str, float]
    run: Path | None = None
    """The run folder, if there is one."""


def result_of(prints: Prints, output: Path) -> Result:
    """Read the result from what a command printed.

    Raises:
        Incomplete: in one line: the run was stopped, or there is no result.
    """
    text = output.read_text(encoding="utf-8", errors="replace").strip()
    try:
        if prints == "json":
            return Result(dict(figures_of(json.loads(text))))
        run = Path(text.rsplit("\n", 1)[-1])
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Incomplete(f"{output} does not end with a result: {error}") from error
    if (status := summary.get("status")) != "complete":
        raise Incomplete(f"the run did not come to its end (status {status!r})")
    return Result(dict(figures_of(summary)), run)


def figures_of(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of nested mappings, without text, lists and values that were not measured."""
    for name, one in value.items():
        full = f"{prefix}{name}"
        if name in _NO_FIGURES:
            continue
        if isinstance(one, Mapping) and one.keys() in _ESTIMATES:
            yield from _estimate(full, one)
        elif isinstance(one, Mapping):
            yield from figures_of(one, f"{full}.")
        elif isinstance(one, bool | int | float):
            yield full, one
        elif one in _NOT_FINITE:
            yield full, float(one)


_ESTIMATES: Final = (
    {"mean", "n", "ci95"},
    {"mean", "low", "high"},
    {"mean", "low", "high", "seeds_low", "seeds_high"},
)
"""The last is a simulated number: `low` and `high` contain the model's error, which the cells of a
sweep share."""


def _estimate(name: str, value: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A mean under its name, and half of its 95 % interval."""
    if value["mean"] is None:
        return
    yield name, float(value["mean"])
    if "n" in value:
        yield f"{name}.n", value["n"]
    ci95 = value.get("ci95")
    seeds = "seeds_" if "seeds_low" in value else ""
    if value.get(f"{seeds}low") is not None:
        ci95 = (value[f"{seeds}high"] - value[f"{seeds}low"]) / 2
    if ci95 is not None and math.isfinite(ci95):
        yield f"{name}.ci95", float(ci95)
