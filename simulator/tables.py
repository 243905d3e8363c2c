"""What a simulation says, as tables for a terminal, made from `simulator.report`'s object.

`±` is half of the 95 % interval over the seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from areal_lab.control.activity import NOTHING_ADMITTED, WAIT_BATCH
from simulator.hardware import find_gpu
from simulator.quantities import duration, number, quantity, shown_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LEAST_SHARE: Final = 0.0005
"""Of a pool's time: what would be listed with 0.0 % is left out."""
_MOST_LAGS: Final = 9
"""Columns of the table of lags; what is above is added up in the last."""
_LONGEST_BAR: Final = 12
_SHORTEST_BAR: Final = 4
_WITHOUT_BARS: Final = 76
"""Width of the table of two pools without its bars."""
_BEHIND: Final = 0.1
"""Share of its time that a pool waits for the other, from which it is worth a word."""


def show_report(console: Console, told: Mapping[str, Any]) -> None:
    """Print what `report` made."""
    console.print(f"[bold]{_escape(told['name'])}[/]")
    for line in setting_lines(told):
        console.print(line, highlight=False)
    tables = (_step_table(told), _time_table([told], width=console.width), _lag_table(told))
    for table in tables:
        console.print()
        console.print(table)
    for note in (_lag_note(told), _limit_note(told)):
        if note:
            console.print(note, highlight=False)
    for table in (_count_table(told), _sources_table(told["sources"])):
        console.print()
        console.print(table)
    show_warnings(console, told["warnings"])


def setting_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """What was simulated, in a few lines."""
    config = told["config"]
    cluster, rollout, trainer = config["cluster"], config["rollout"], config["trainer"]
    workload, schedule, answers = (
        config["workload"],
        config["schedule"],
        config["workload"]["answers"],
    )
    gpu = find_gpu(cluster["gpu"]).name
    colocated = cluster["placement"] == "colocated"
    trains = cluster["gpus"] if colocated else cluster["gpus"] - cluster["rollout_gpus"]
    generates = cluster["gpus"] if colocated else cluster["rollout_gpus"]
    split = f"TP {trainer['tensor_parallel']}, PP {trainer['pipeline_parallel']}"
    engines = (
        f"{generates // rollout['tensor_parallel']} engines of TP {rollout['tensor_parallel']}"
    )
    place = f"{config['model']} on {cluster['gpus']} {gpu}"
    if colocated:
        yield f"{place}, which generate ({engines}) and train ({split})"
    else:
        other = f" {find_gpu(cluster['rollout_gpu']).name}" if cluster["rollout_gpu"] else ""
        yield f"{place}: {generates}{other} generate ({engines}), {trains} train ({split})"
    name = schedule["name"].replace("_", " ")
    if schedule["name"] in ("asynchronous", "partial_rollout"):
        name += f", eta {schedule['eta']}".removesuffix(".0")
    if schedule["name"] == "asynchronous" and not schedule["interruptible"]:
        name += ", not interruptible"
    yield (
        f"{name}; {workload['prompts_per_batch']} x {workload['samples_per_prompt']} answers a "
        f"step, {answers['kind']}, at most {answers['max_tokens']:,} tokens"
    )
    seeds = len(told["seeds"])
    yield (
        f"{told['steps']} steps, the first {told['warmup_steps']} left out of averages; "
        + (f"{seeds} seeds, ± 95 %" if seeds > 1 else "one seed, no intervals")
    )


def show_warnings(console: Console, lines: Iterable[str]) -> None:
    """One line each, marked."""
    for line in lines:
        console.print(f"[yellow]warning:[/] {_escape(line)}", highlight=False)


def show_comparison(
    console: Console,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    ratio: Mapping[str, Any],
) -> None:
    """Print two reports side by side, and the second over the first."""
    for mark, told in (("A", first), ("B", second)):
        console.print(f"[bold]{mark}  {_escape(told['name'])}[/]")
        for line in setting_lines(told):
            console.print(f"   {line}", highlight=False)
    console.print()
    console.print(_comparison_table(first, second, ratio))
    console.print()
    console.print(_time_table([first, second]))
    console.print()
    console.print(_verdict(ratio), highlight=False)
    show_warnings(console, dict.fromkeys([*first["warnings"], *second["warnings"]]))


def _comparison_table(
    first: Mapping[str, Any], second: Mapping[str, Any], ratio: Mapping[str, Any]
) -> Table:
    table = _table("", "A", "B", "B / A")
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
    for title, path, unit_name in (
        ("GPU-hours a step", ("cost", "gpu_hours_per_step"), ""),
        ("dollars a step", ("cost", "dollars_per_step", "typical"), ""),
        ("kWh a step", ("energy", "kwh_per_step"), ""),
    ):
        values = [_at(told, path) for told in (first, second)]
        if None in values:
            continue
        means = [value["mean"] for value in values]
        table.add_row(
            title,
            *(quantity(value, unit_name) for value in values),
            number(means[1] / means[0]) if means[0] else "",
        )
    for title, kind, which in (
        ("lag of a trained token", "token", "mean"),
        ("lag of the oldest token", "head", "max"),
    ):
        lags = [_mean(told["lag"][kind][which]) for told in (first, second)]
        table.add_row(f"{title}, {which}", *(f"{lag:.2f} versions" for lag in lags), "")
    return table


def _verdict(ratio: Mapping[str, Any]) -> str:
    """Which trains faster, and which for less."""
    mean, low, high = (ratio["tokens_per_s"][name] for name in ("mean", "low", "high"))
    if (low is not None and low <= 1 <= high) or mean == 1:
        speed = "B trains as fast as A, as far as these seeds can tell."
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
    if abs(per_gpu / mean - 1) < 0.001:  # the same GPUs: that was said
        return speed
    return f"{speed} For the same tokens, B takes [bold]{1 / per_gpu:.3g} times[/] the GPU-hours."


# --- tables --------------------------------------------------------------------------------------


def _step_table(told: Mapping[str, Any]) -> Table:
    table = _table("a training step", "", "")
    parts, steps = told["parts"], told["steps"]
    table.add_row("step time", quantity(told["step_s"], "s"))
    for name, title in (
        ("train_s", "training"),
        ("export_s", "exporting weights, switching over"),
        ("wait_s", "trainer waits"),
    ):
        if _mean(parts[name]) > _LEAST_SHARE * _mean(told["step_s"]):
            table.add_row(f"  {title}", quantity(parts[name], "s"))
    table.add_row(
        "effective throughput",
        quantity(told["tokens_per_s"], "tokens/s"),
        f"{number(_mean(told['tokens_per_s_per_gpu']))} per GPU; trained tokens only",
    )
    if _mean(parts["update_s"]) > 0:
        note = "until all engines have them"
        table.add_row("weight update", quantity(parts["update_s"], "s"), note)
    table.add_row(
        f"{steps} steps", duration(_mean(told["step_s"]) * steps), "if all are as the averaged ones"
    )
    gpu_h = told["cost"]["gpu_hours_per_step"]
    table.add_row("GPU-hours", quantity(gpu_h), f"{number(_mean(gpu_h) * steps)} in all steps")
    table.add_row(*_dollars_row(told["cost"]["dollars_per_step"], steps))
    energy = told["energy"]["kwh_per_step"]
    table.add_row(
        "energy",
        quantity(energy, "kWh"),
        f"{number(_mean(energy) * steps)} kWh in all steps; GPUs alone",
    )
    return table


def _dollars_row(dollars: Mapping[str, Any] | None, steps: int) -> tuple[str, str, str]:
    if dollars is None:
        return "cost", "no price known", ""
    typical, low, high = (dollars[name] for name in ("typical", "low", "high"))
    note = f"${number(_mean(typical) * steps)} in all steps"
    if _mean(low) < _mean(high):
        note += f"; a step ${number(_mean(low))} to ${number(_mean(high))}, by price"
    return "cost", f"${quantity(typical)}", note


def _time_table(reports: Sequence[Mapping[str, Any]], *, width: int = 0) -> Table:
    """Busy and idle shares of each pool, with bars where there is room; of two simulations, side
    by side and without."""
    bar = -1
    if len(reports) == 1:
        bar = min(max((width - _WITHOUT_BARS) // 2, 0), _LONGEST_BAR)
    columns: list[tuple[str, Mapping[str, Any], str]] = []
    for told, mark in zip(reports, ("A: ", "B: ") if len(reports) > 1 else ("",), strict=True):
        columns += [(f"{mark}{pool}", told, pool) for pool in told["utilisation"]]
    table = _table("where GPU time goes", *(title for title, _, _ in columns), text=True)
    for kind, mark in (("busy", ""), ("idle", "idle: ")):
        shares = [told[kind].get(pool, {}) for _, told, pool in columns]
        largest: dict[str, float] = {}
        for column in shares:
            for name, share in column.items():
                largest[name] = max(largest.get(name, 0.0), _mean(share))
        for name in sorted(largest, key=lambda name: -largest[name]):
            if largest[name] >= _LEAST_SHARE:
                style = "dim" if kind == "idle" else None
                cells = [_share_cell(column.get(name), bar=bar) for column in shares]
                table.add_row(f"{mark}{shown_name(name)}", *cells, style=style)
    table.add_section()
    use = [told["utilisation"][pool] for _, told, pool in columns]
    table.add_row("utilization", *(_share_cell(one, bar=bar) for one in use))
    return table


def _lag_table(told: Mapping[str, Any]) -> Table:
    lags = told["lag"]
    highest = max((int(lag) for kind in lags.values() for lag in kind["histogram"]), default=0)
    shown = [str(lag) for lag in range(min(highest, _MOST_LAGS - 1) + 1)]
    rest = [str(lag) for lag in range(len(shown), highest + 1)]
    table = _table(
        "lag of what was trained on", "mean", "max", *shown, *([f"{rest[0]}+"] if rest else [])
    )
    for kind, title in (
        ("token", "tokens"),
        ("head", "samples, first token"),
        ("tail", "samples, last token"),
    ):
        histogram = lags[kind]["histogram"]
        cells = [histogram.get(lag, 0.0) for lag in shown]
        if rest:
            cells.append(sum(histogram.get(lag, 0.0) for lag in rest))
        table.add_row(
            title,
            f"{_mean(lags[kind]['mean']):.2f}",
            number(_mean(lags[kind]["max"])),
            *(f"{100 * cell:.1f} %" if cell else "" for cell in cells),
        )
    return table


def _limit_note(told: Mapping[str, Any]) -> str:
    """Which side waits for the other, if one clearly does."""
    idle = told["idle"]
    if "training" not in idle:
        return ""
    engines, trainer = (
        _mean(idle[pool].get(cause, {"mean": 0.0}))
        for pool, cause in (("rollout", NOTHING_ADMITTED), ("training", WAIT_BATCH))
    )
    if trainer < _BEHIND < engines:
        return (
            f"[bold]Training limits this run:[/] engines have nothing to do {100 * engines:.0f} % "
            "of the time. More GPUs for training, fewer for generation, would help; more eta would "
            "not."
        )
    if engines < _BEHIND < trainer:
        return (
            f"[bold]Generation limits this run:[/] the trainer waits for a batch "
            f"{100 * trainer:.0f} % of the time. More GPUs for generation, fewer for training, "
            "would help."
        )
    if min(engines, trainer) > _BEHIND:
        return (
            f"[bold]Both sides wait:[/] engines have nothing to do {100 * engines:.0f} % of the "
            f"time, the trainer waits for a batch {100 * trainer:.0f} % of it. They take turns, or "
            "wait for the longest answers; more eta helps if anything does."
        )
    return ""


def _lag_note(told: Mapping[str, Any]) -> str:
    """Why lags may exceed eta, where they do."""
    schedule = told["config"]["schedule"]
    eta = 0.0 if schedule["name"] == "synchronous" else float(schedule["eta"])
    eta = 1.0 if schedule["name"] == "one_step_overlap" else eta
    if _mean(told["lag"]["head"]["max"]) <= eta:
        return ""
    return (
        f"More than eta ({eta:g}): it bounds how many prompts are started, not the age of each. "
        "schedule.batch_order=strict_start_order or bounded_lag bounds that."
    )


def _count_table(told: Mapping[str, Any]) -> Table:
    table = _table("counts", "a run", "")
    counts = told["counts"]
    after = "after warm-up"
    generated = _mean(counts["generated_tokens"])
    recomputed = _mean(counts["recomputed_tokens"])
    table.add_row("tokens generated", _million(generated), after)
    if recomputed:
        share = f"{100 * recomputed / generated:.1f} % of what was generated" if generated else ""
        table.add_row("tokens prefilled again", _million(recomputed), f"{after}; {share}")
    for name, title, note in (
        ("interruptions", "interruptions", f"{after}; each pauses all engines"),
        (
            "preemptions",
            "preemptions",
            f"{after}; sequences that lost their place for lack of cache",
        ),
        ("dropped", "prompts dropped", "too old to train on"),
        ("engine_losses", "engines lost", "failures of nodes"),
        ("trainer_restarts", "trainer restarts", "failures of nodes"),
    ):
        if _mean(counts[name]):
            table.add_row(title, quantity(counts[name]), note)
    return table


def _sources_table(parts: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("where times come from", "error", "", wrap_last=True)
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        by_source.setdefault(part["source"], []).append(part)
    for source, same in by_source.items():
        names = ", ".join(part["name"] for part in same)
        errors = dict.fromkeys(_error(part["error"]) for part in same)
        table.add_row(names, ", ".join(errors), _escape(source))
    return table


def _error(error: float | None) -> str:
    if error is None:
        return "?"
    return "given" if error == 0 else f"{100 * error:.0f} %"


def _table(*titles: str, text: bool = False, wrap_last: bool = False) -> Table:
    """An empty table; columns without a title hold notes, with `text` all do."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    for place, title in enumerate(titles):
        last = place == len(titles) - 1
        left = text or place == 0 or (last and title == "")
        table.add_column(
            title,
            justify="left" if left else "right",
            no_wrap=not (last and (wrap_last or title == "")),
            overflow="fold",
        )
    return table


def _share_cell(value: Mapping[str, Any] | None, *, bar: int) -> str:
    """A share, with its interval unless `bar` is negative, and a bar if there is room."""
    if value is None or value["mean"] < _LEAST_SHARE:
        return ""
    mean, low, high = value["mean"], value["low"], value["high"]
    text = f"{100 * mean:5.1f} %"
    if bar < 0:
        return text
    if low is not None:
        text += f" ± {50 * (high - low):<4.1f}"
    return f"{text} {'█' * round(bar * mean):<{bar}}" if bar >= _SHORTEST_BAR else text


def _million(count: float) -> str:
    return f"{number(count / 1e6)} million" if count >= 1e6 else number(count)


def _mean(value: Mapping[str, Any]) -> float:
    return float(value["mean"])


def _at(told: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = told
    for name in path:
        value = None if value is None else value[name]
    return value


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
