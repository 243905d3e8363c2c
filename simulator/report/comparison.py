"""Compare two simulations on a terminal: both side by side, and the second over the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.report.error_lines import PERCENT
from simulator.report.notes import setting_lines
from simulator.report.tables import empty_table, escaped, show_warnings, time_table
from simulator.stats.format import quantity, span

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show_comparison(
    console: Console,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    ratio: Mapping[str, Any],
) -> None:
    """Print two reports side by side, with their ratios."""
    for mark, told in (("A", first), ("B", second)):
        console.print(f"[bold]{mark}  {escaped(told['name'])}[/]")
        for line in setting_lines(told):
            console.print(f"   {line}", highlight=False)
    console.print()
    console.print(_comparison_table(first, second, ratio))
    console.print()
    console.print(time_table([first, second]))
    console.print()
    for line in (verdict(ratio), *ratio["model_error"]["says"]):
        console.print(line, highlight=False)
    show_warnings(console, dict.fromkeys([*first["warnings"], *second["warnings"]]))


def _comparison_table(
    first: Mapping[str, Any], second: Mapping[str, Any], ratio: Mapping[str, Any]
) -> Table:
    table = empty_table("", "A", "B", "B / A", f"B / A, {PERCENT}")
    for title, name, path in (
        ("step time, s", "step_s", ("step_s",)),
        ("throughput, tokens/s", "tokens_per_s", ("tokens_per_s",)),
        ("  per GPU", "tokens_per_s_per_gpu", ("tokens_per_s_per_gpu",)),
        ("GPU-hours per step", "gpu_hours_per_step", ("cost", "gpu_hours_per_step")),
        ("dollars per step", "dollars_per_step", ("cost", "dollars_per_step", "typical")),
        ("kWh per step", "kwh_per_step", ("energy", "kwh_per_step")),
    ):
        if ratio[name] is not None:
            values = (_at(told, path) for told in (first, second))
            # Energy was never compared with a measured run: its interval is that of the seeds.
            around = span(ratio[name]) if "seeds_low" in ratio[name] else ""
            table.add_row(title, *map(quantity, values), quantity(ratio[name]), around)
    for title, kind, which in (
        ("mean lag, versions", "token", "mean"),
        ("largest lag, versions", "head", "max"),
    ):
        lags = [told["lag"][kind][which] for told in (first, second)]
        table.add_row(title, *map(quantity, lags), "", "")
    return table


def verdict(ratio: Mapping[str, Any]) -> str:
    """Which one trains faster, if that is decided, and which one needs fewer GPU-hours."""
    speed, per_gpu = ratio["tokens_per_s"], ratio["tokens_per_s_per_gpu"]
    mean = speed["mean"]
    better, other, times = ("B", "A", mean) if mean >= 1 else ("A", "B", 1 / mean)
    if ratio["undecided_by"] == "seeds":
        said = "With these seeds, there is no significant difference in speed between A and B."
    elif ratio["undecided"]:
        said = (
            f"[bold]Undecided:[/] {better} is simulated {times:.3g} times as fast as {other}, in "
            f"tokens per second, but the {PERCENT} interval{_around(speed, mean < 1)} contains 1."
        )
    else:
        said = (
            f"{better} trains [bold]{times:.3g} times[/] as fast as {other}"
            f"{_around(speed, mean < 1)}, in tokens per second."
        )
    if abs(per_gpu["mean"] / mean - 1) < 0.001:  # the same GPUs: nothing to add
        return said
    hours = 1 / per_gpu["mean"]
    return (
        f"{said} For the same tokens, B takes [bold]{hours:.3g} times[/] the GPU-hours"
        f"{_around(per_gpu, True)}."
    )


def _around(ratio: Mapping[str, Any], inverse: bool) -> str:
    """The interval of a ratio, or of its inverse, in brackets; empty if there is none."""
    low, high = ratio["low"], ratio["high"]
    if low is None or (inverse and low == 0):
        return ""
    around = span({"low": 1 / high, "high": 1 / low} if inverse else ratio)
    return f" ({around})" if around else ""


def _at(told: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = told
    for name in path:
        value = value[name]
    return value
