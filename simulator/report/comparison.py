"""Compare two simulations on a terminal: both side by side, and the second over the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simulator.report.notes import setting_lines
from simulator.report.tables import empty_table, escaped, show_warnings, time_table
from simulator.stats.format import quantity

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
    console.print(_verdict(ratio), highlight=False)
    show_warnings(console, dict.fromkeys([*first["warnings"], *second["warnings"]]))


def _comparison_table(
    first: Mapping[str, Any], second: Mapping[str, Any], ratio: Mapping[str, Any]
) -> Table:
    table = empty_table("", "A", "B", "B / A")
    unit = {"step_s": "s", "tokens_per_s": "tokens/s", "tokens_per_s_per_gpu": "tokens/s"}
    titles = {
        "step_s": "step time",
        "tokens_per_s": "effective throughput",
        "tokens_per_s_per_gpu": "  per GPU",
    }
    for name, title in titles.items():
        table.add_row(
            title,
            quantity(first[name], unit[name]),
            quantity(second[name], unit[name]),
            quantity(ratio[name]),
        )
    for title, name, path in (
        ("GPU-hours per step", "gpu_hours_per_step", ("cost", "gpu_hours_per_step")),
        ("dollars per step", "dollars_per_step", ("cost", "dollars_per_step", "typical")),
        ("kWh per step", "kwh_per_step", ("energy", "kwh_per_step")),
    ):
        if ratio[name] is not None:
            values = (_at(told, path) for told in (first, second))
            table.add_row(title, *map(quantity, values), quantity(ratio[name]))
    for title, kind, which in (
        ("lag of a trained token", "token", "mean"),
        ("lag of the oldest token", "head", "max"),
    ):
        lags = [told["lag"][kind][which] for told in (first, second)]
        table.add_row(f"{title}, {which}", *(quantity(lag, "versions") for lag in lags), "")
    return table


def _verdict(ratio: Mapping[str, Any]) -> str:
    """Which one trains faster, and which one needs fewer GPU-hours."""
    mean, low, high = (ratio["tokens_per_s"][name] for name in ("mean", "low", "high"))
    if (low is not None and low <= 1 <= high) or mean == 1:
        speed = "With these seeds, there is no significant difference in speed between A and B."
    else:
        better, other, times = ("B", "A", mean) if mean >= 1 else ("A", "B", 1 / mean)
        bounds = ""
        if low is not None:
            least, most = (low, high) if mean >= 1 else (1 / high, 1 / low)
            bounds = f" ({least:.3g} to {most:.3g})"
        speed = (
            f"{better} trains [bold]{times:.3g} times[/] as fast as {other}{bounds}, "
            "in tokens per second."
        )
    per_gpu = ratio["tokens_per_s_per_gpu"]["mean"]
    if abs(per_gpu / mean - 1) < 0.001:  # the same GPUs: nothing to add
        return speed
    return f"{speed} For the same tokens, B takes [bold]{1 / per_gpu:.3g} times[/] the GPU-hours."


def _at(told: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = told
    for name in path:
        value = value[name]
    return value
