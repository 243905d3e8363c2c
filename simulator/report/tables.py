"""Tables of a simulation, and of two compared, for a terminal.

`±` is half of the 95 % interval over the seeds; a 90 % interval contains the model's error, too.

Excerpts of a log with fewer engines, for readable timelines of large clusters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from areal_lab.control.events import (
    EngineId,
    EngineJoined,
    EngineLost,
    EngineRetired,
    RunStarted,
    StartGroup,
)
from areal_lab.runlog.records import (
    REWARDS,
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Record,
    SpanRecord,
    engine_process,
)
from simulator.costs.training_timing import BUBBLE, SLOWEST_RANK
from simulator.report.lags import lag_span
from simulator.report.measured_errors import PERCENT
from simulator.report.notes import lag_note, limit_note, mean_of, setting_lines
from simulator.stats.format import duration, duration_span, number, quantity, shown_name, span

_LEAST_SHARE: Final = 0.0005
"""Share of a pool's time below which a row is left out, because it would show 0.0 %."""
_MOST_LAGS: Final = 9
"""Rows of the table of lags; one more row sums larger lags, without an interval."""
_WAITS_OF_A_STEP: Final = (BUBBLE, SLOWEST_RANK)
"""Waits inside a training step, which counts as busy throughout."""
_LONGEST_BAR: Final = 12
_SHORTEST_BAR: Final = 4
_WITHOUT_BARS: Final = 76
"""Width of the table of two pools without bars."""


def show_report(console: Console, told: Mapping[str, Any]) -> None:
    """Print the object that `report` returns."""
    console.print(f"[bold]{escaped(told['name'])}[/]", markup=True)
    for line in setting_lines(told):
        console.print(line, highlight=False)
    console.print()
    console.print(_step_table(told))
    for line in told["model_error"]["says"]:
        console.print(line, highlight=False)
    for table in (time_table([told], width=console.width), _lag_table(told)):
        console.print()
        console.print(table)
    for note in (lag_note(told), limit_note(told)):
        if note:
            console.print(note, highlight=False, markup=True)
    if (engines := told.get("engines")) is not None:
        console.print()
        console.print(_engines_table(engines))
    for table in (_count_table(told), _sources_table(told["sources"])):
        console.print()
        console.print(table)
    show_warnings(console, told["warnings"])


def show_warnings(console: Console, lines: Iterable[str]) -> None:
    """Print one marked line per warning."""
    for line in lines:
        console.print(f"[yellow]warning:[/] {escaped(line)}", highlight=False, markup=True)


# --- tables --------------------------------------------------------------------------------------


def _step_table(told: Mapping[str, Any]) -> Table:
    table = empty_table("training step", "", f"{PERCENT} interval", "")
    parts, steps, step = told["parts"], told["steps"], told["step_s"]
    table.add_row("step time", quantity(step, "s"), span(step, "s"), "")
    for name, title in (
        ("train_s", "training"),
        ("export_s", "exporting weights, switching"),
        ("outside_s", "data, logs, validation, checkpoints"),
        ("wait_s", "trainer waits"),
    ):
        if mean_of(parts[name]) > _LEAST_SHARE * mean_of(step):
            table.add_row(f"  {title}", quantity(parts[name], "s"), "", "")
    throughput = told["tokens_per_s"]
    table.add_row(
        "effective throughput",
        quantity(throughput, "tokens/s"),
        span(throughput),
        f"{number(mean_of(told['tokens_per_s_per_gpu']))} per GPU; trained tokens",
    )
    if "controller" in told:
        handles = quantity(told["controller"]["controller_s"], "s")
        table.add_row("controller", handles, "", "one process, during the step")
    if mean_of(parts["update_s"]) > 0:
        note = "until all engines have it"
        table.add_row("weight update", quantity(parts["update_s"], "s"), "", note)
    table.add_row(
        f"{steps} steps",
        duration(mean_of(step) * steps),
        duration_span(step["low"] * steps, step["high"] * steps),
        "at the average step time",
    )
    gpu_h = told["cost"]["gpu_hours_per_step"]
    note = f"{number(mean_of(gpu_h) * steps)} for all steps"
    table.add_row("GPU-hours", quantity(gpu_h), span(gpu_h), note)
    table.add_row(*_dollars_row(told["cost"]["dollars_per_step"], steps))
    energy = told["energy"]["kwh_per_step"]
    table.add_row(
        "energy",
        quantity(energy, "kWh"),
        "",
        f"{number(mean_of(energy) * steps)} kWh in total; GPUs only",
    )
    return table


def _dollars_row(dollars: Mapping[str, Any] | None, steps: int) -> tuple[str, str, str, str]:
    if dollars is None:
        return "cost", "unknown price", "", ""
    typical, low, high = (dollars[name] for name in ("typical", "low", "high"))
    note = f"${number(mean_of(typical) * steps)} for all steps"
    if mean_of(low) < mean_of(high):
        note += f"; ${number(mean_of(low))} to ${number(mean_of(high))} per step, by price"
    return "cost", f"${quantity(typical)}", span(typical), note


def time_table(reports: Sequence[Mapping[str, Any]], *, width: int = 0) -> Table:
    """Busy and idle shares of each pool, with bars if there is room; two simulations are shown side
    by side, without bars."""
    bar = -1
    if len(reports) == 1:
        bar = min(max((width - _WITHOUT_BARS) // 2, 0), _LONGEST_BAR)
    columns: list[tuple[str, Mapping[str, Any], str]] = []
    for told, mark in zip(reports, ("A: ", "B: ") if len(reports) > 1 else ("",), strict=True):
        columns += [(f"{mark}{pool}", told, pool) for pool in told["utilisation"]]
    table = empty_table("GPU time", *(title for title, _, _ in columns), text=True)
    for kind, mark in (("busy", ""), ("idle", "idle: ")):
        shares = [told[kind].get(pool, {}) for _, told, pool in columns]
        largest: dict[str, float] = {}
        for column in shares:
            for name, share in column.items():
                largest[name] = max(largest.get(name, 0.0), mean_of(share))
        for name in sorted(largest, key=lambda name: -largest[name]):
            if largest[name] >= _LEAST_SHARE:
                style = "dim" if kind == "idle" else None
                cells = [_share_cell(column.get(name), bar=bar) for column in shares]
                table.add_row(f"{mark}{shown_name(name)}", *cells, style=style)
    table.add_section()
    use = [told["utilisation"][pool] for _, told, pool in columns]
    table.add_row("utilization", *(_share_cell(one, bar=bar) for one in use))
    for name in _WAITS_OF_A_STEP:
        waits = [told["busy"].get(pool, {}).get(name) for _, told, pool in columns]
        if any(wait is not None and mean_of(wait) >= _LEAST_SHARE for wait in waits):
            cells = [_share_cell(wait, bar=bar) for wait in waits]
            table.add_row(f"  including {name}", *cells, style="dim")
    return table


def _lag_table(told: Mapping[str, Any]) -> Table:
    lags = [told["lag"][kind] for kind in ("token", "head", "tail")]
    highest = max((int(lag) for kind in lags for lag in kind["histogram"]), default=0)
    table = empty_table(
        "lag of trained data", "tokens", "samples, first token", "samples, last token"
    )
    for title, which in (
        ("mean (versions)", "mean"),
        ("95th percentile (versions)", "p95"),
        ("max (versions)", "max"),
    ):
        table.add_row(title, *(quantity(kind[which]) for kind in lags))
        if "seeds_low" in (first := told["lag"]["head"][which]):
            table.add_row(f"  {PERCENT} interval", "", lag_span(first["low"], first["high"]), "")
        if which != "max":
            for name, part in (("before the queue", "before_queue"), ("in the queue", "in_queue")):
                table.add_row(f"  {name}", "", quantity(told["lag"][part][which]), "")
        if which == "mean" and (form := told["closed_form"]):
            both = " + ".join(f"{mean_of(form[part]):.2f}" for part in ("before_queue", "in_queue"))
            table.add_row("  closed form", "", both, "", style="dim")
    for lag in range(min(highest, _MOST_LAGS - 1) + 1):
        shares = [kind["histogram"].get(str(lag)) for kind in lags]
        cells = [_share_cell(share, bar=0).strip() for share in shares]
        if any(cells):
            table.add_row(f"  {lag}", *cells)
    if highest >= _MOST_LAGS:
        rest = [_share_from(kind["histogram"], _MOST_LAGS) for kind in lags]
        table.add_row(f"  {_MOST_LAGS} or more", *(_percent(share) for share in rest))
    return table


def _share_from(histogram: Mapping[str, Any], lag: int) -> float:
    """Share of `lag` and larger ones; a sum of shares has no interval."""
    return sum(mean_of(share) for at, share in histogram.items() if int(at) >= lag)


def _count_table(told: Mapping[str, Any]) -> Table:
    table = empty_table("counts", "per run", "")
    counts = told["counts"]
    after = "after warm-up"
    generated = mean_of(counts["generated_tokens"])
    recomputed = mean_of(counts["recomputed_tokens"])
    table.add_row("tokens generated", _million(generated), after)
    if recomputed:
        share = f"{100 * recomputed / generated:.1f} % of the generated tokens" if generated else ""
        table.add_row("tokens prefilled again", _million(recomputed), f"{after}; {share}")
    if thrown := mean_of(told["ledger"]["thrown_away"]):
        tokens = _million(thrown * mean_of(told["ledger"]["generated"]))
        share = f"{100 * thrown:.1f} % of the generated tokens; dropped or generated twice"
        table.add_row("tokens thrown away", tokens, share)
    for name, title, note in (
        ("interruptions", "interruptions", f"{after}; each pauses all engines"),
        (
            "preemptions",
            "preemptions",
            f"{after}; sequences stopped because the cache was full",
        ),
        ("dropped", "prompts dropped", "too stale for training"),
        ("filtered", "prompts filtered", "equal rewards; replaced by others"),
        ("engine_losses", "engines lost", "node failures"),
        ("trainer_restarts", "trainer restarts", "node failures"),
    ):
        if mean_of(counts[name]):
            table.add_row(title, quantity(counts[name]), note)
    for name, title in (
        ("controller_received_bytes", "received by the controller"),
        ("controller_sent_bytes", "sent by the controller"),
        ("fetched_bytes", "fetched from the engines' hosts"),
    ):
        if passed := mean_of(told.get("controller", {}).get(name, {"mean": 0.0})):
            table.add_row(title, f"{number(passed / 1e9)} GB", "per step")
    return table


def _engines_table(told: Mapping[str, Any]) -> Table:
    """Engines over time: the steps in which their number changes, and how many join and leave."""
    table = empty_table("engines", "mean", "")
    shown = None
    for step, value in enumerate(told["by_step"], 1):
        if (engines := round(mean_of(value))) != shown:
            shown = engines
            table.add_row(f"from step {step}", quantity(value), "")
    table.add_row("joined", quantity(told["joined"]), "per run")
    table.add_row("retired", quantity(told["retired"]), "per run; their groups end there")
    return table


def _sources_table(parts: Sequence[Mapping[str, Any]]) -> Table:
    table = empty_table("cost model", "error", "source", wrap_last=True)
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        by_source.setdefault(part["source"], []).append(part)
    from rich.text import Text

    for source, same in by_source.items():
        names = ", ".join(part["name"] for part in same)
        errors = dict.fromkeys(_error(part["error"]) for part in same)
        table.add_row(names, ", ".join(errors), Text(source))
    return table


def _error(error: float | None) -> str:
    if error is None:
        return "?"
    return "given" if error == 0 else f"{100 * error:.0f} %"


def empty_table(*titles: str, text: bool = False, wrap_last: bool = False) -> Table:
    """An empty table; columns without a title hold notes; with `text` all columns hold text."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for place, title in enumerate(titles):
        last = place == len(titles) - 1
        left = text or place == 0 or (last and (wrap_last or title == ""))
        table.add_column(
            title,
            justify="left" if left else "right",
            no_wrap=not (last and (wrap_last or title == "")),
            overflow="fold",
        )
    return table


def _share_cell(value: Mapping[str, Any] | None, *, bar: int) -> str:
    if value is None or value["mean"] < _LEAST_SHARE:
        return ""
    mean, low, high = value["mean"], value["low"], value["high"]
    text = f"{100 * mean:5.1f} %"
    if bar < 0:
        return text
    if low is not None:
        text += f" ± {50 * (high - low):<4.1f}"
    return f"{text} {'█' * round(bar * mean):<{bar}}" if bar >= _SHORTEST_BAR else text


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= _LEAST_SHARE else ""


def _million(count: float) -> str:
    return f"{number(count / 1e6)} million" if count >= 1e6 else number(count)


def escaped(text: str) -> str:
    """Text with its brackets escaped, so that they are not read as markup."""
    from rich.markup import escape

    return escape(text)


def engines_of(log: Log) -> tuple[EngineId, ...]:
    """Engines at the start of the run."""
    for record in log.events:
        if isinstance(record.event, RunStarted):
            return tuple(record.event.engines)
    return ()


def only_engines(log: Log, engines: Iterable[EngineId], *, rewards: bool = True) -> Log:
    """The log without the other engines. It cannot be replayed, because groups are missing.

    Args:
        rewards: keep the process that scores, whose row is empty if scoring takes no time.
    """
    kept = frozenset(engines)
    others = {engine_process(engine) for engine in engines_of(log) if engine not in kept}
    if not rewards:
        others.add(REWARDS)
    processes = tuple(name for name in log.header.processes if name not in others)
    return dataclasses.replace(
        log,
        header=dataclasses.replace(log.header, processes=processes),
        records=tuple(_excerpt(log.records, kept, others)),
    )


def _excerpt(
    records: Iterable[Record], kept: frozenset[EngineId], others: set[str]
) -> Iterator[Record]:
    for record in records:
        match record:
            case SpanRecord():
                if record.process not in others:
                    yield dataclasses.replace(record, name=shown_name(record.name))
            case GroupRecord():
                if record.engine in kept:
                    yield record
            case EventRecord(event=RunStarted() as event):
                engines = tuple(one for one in event.engines if one in kept)
                yield dataclasses.replace(record, event=dataclasses.replace(event, engines=engines))
            case EventRecord(event=EngineLost() | EngineRetired() | EngineJoined() as event):
                if event.engine in kept:
                    yield record
            case ActionRecord(action=StartGroup() as action):
                if action.engine in kept:
                    yield record
            case _:
                yield record


def show_comparison(
    console: Console,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    ratio: Mapping[str, Any],
) -> None:
    """Print two reports side by side, with their ratios."""
    for mark, told in (("A", first), ("B", second)):
        console.print(f"[bold]{mark}  {escaped(told['name'])}[/]", markup=True)
        for line in setting_lines(told):
            console.print(f"   {line}", highlight=False)
    console.print()
    console.print(_comparison_table(first, second, ratio))
    console.print()
    console.print(time_table([first, second]))
    console.print()
    for line in (verdict(ratio), *ratio["model_error"]["says"]):
        console.print(line, highlight=False, markup=True)
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
        ("95th percentile of lag, versions", "token", "p95"),
        ("largest lag, versions", "head", "max"),
    ):
        lags = [told["lag"][kind][which] for told in (first, second)]
        table.add_row(title, *map(quantity, lags), "", "")
    thrown = [told["ledger"]["thrown_away"] for told in (first, second)]
    if any(map(mean_of, thrown)):
        table.add_row("thrown away, share of tokens", *map(quantity, thrown), "", "")
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
