"""Commands that a sweep runs: settings, checks, output, and their results as numbers.

What a command left behind, as numbers by dotted name: from a run's summary, or from JSON.

{"reward_after": {"mean": 0.6, "ci95": 0.1, "n": 64}}  -->  reward_after, .ci95, .n
{"step_s": {"mean": 3.4, "low": 3.3, "high": 3.5}}     -->  step_s, step_s.ci95 (of the seeds)
{"lag": {"token": {"mean": 1.0, "max": 2}}}            -->  lag.token.mean, lag.token.max
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from areal_lab.config.record import Record
from areal_lab.host.foreign import Parsed, parse_json, read_json

Prints: TypeAlias = Literal["run folder", "json"]
"""End of a command's output: the path of a run folder, or one JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that performs one run: `areal-lab NAME CONFIG.yaml`."""

    name: str
    settings: type[Record]
    aliases: Mapping[str, str]
    """Other names of settings, mapped to their dotted name."""
    load: Callable[[str | None], Record]
    """Settings of a file or shipped config; None takes the defaults. Raises ValueError."""
    check: Callable[[Any], object]
    """Raises `ConfigError` if a run with these settings cannot work."""
    prints: Prints
    options: tuple[str, ...] = ()
    """Arguments after the config."""
    placed: Callable[[Path], Mapping[str, Any]] = lambda _: MappingProxyType({})
    """Settings of a run's name and folder, which change no result."""
    needs: Callable[[Any], int | None] = lambda _: 1
    """Cores that one run keeps busy; None for all of the machine."""
    alone: Callable[[Any], str] = lambda _: ""
    """Setting whose value two concurrent runs cannot share; empty without one."""
    shares_seeds: Callable[[Any], bool] = lambda _: False
    """True if a run has several seeds itself, from its setting `seed` on."""
    metric: str = "reward_after"
    """Default figure of a study."""


_NO_FIGURES: Final = ("config", "histogram")
"""Groups without figures: settings, which a cell has, and shares of each lag."""
_NOT_FINITE: Final = ("inf", "-inf", "nan")


_object: Final = Parsed[dict[str, Any]](dict[str, Any])


class Incomplete(ValueError):
    """The command succeeded, but its run did not complete."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one run."""

    figures: Mapping[str, float]
    run: Path | None = None
    """Run folder, if there is one."""


def result_of(prints: Prints, output: Path) -> Result:
    """Read the result from a command's output; raises Incomplete if the run was stopped or
    printed none.
    """
    text = output.read_text(encoding="utf-8", errors="replace").strip()
    try:
        if prints == "json":
            return Result(dict(figures_of(_object(parse_json(text)))))
        run = Path(text.rsplit("\n", 1)[-1])
        summary = _object(read_json(run / "summary.json"))
    except (OSError, ValueError) as error:
        raise Incomplete(f"{output} does not end with a result: {error}") from error
    if (status := summary.get("status")) != "complete":
        raise Incomplete(f"the run did not come to its end (status {status!r})")
    return Result(dict(figures_of(summary)), run)


def figures_of(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested mappings, without text, lists and values that were not measured."""
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
"""The last is a simulated number: `low` and `high` contain the model's error, which the cells of
a sweep share."""


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
