"""The `areal-lab simulate` command: load, simulate with progress, print, write files.

FILE or preset, a.b=c --load--> config --seeds--> Replicated --> tables, JSON, pictures
                                       --first seed, logged--> trace, gantt
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from areal_lab.cli.outputs import (
    console_on,
    file_to_write,
    folder_to_write,
    picture_to_write,
)
from areal_lab.host.durable import replace_text
from areal_lab.host.terminal import INTERRUPTED
from areal_lab.runlog.records import Log
from areal_lab.shell.stop import ended_like_ctrl_c
from simulator.assembly.simulate import changes_of, fitted, replicate, simulated_log
from simulator.assembly.unused import ignored_overrides
from simulator.config.load import load_simulation, presets
from simulator.config.schema import SimulationConfig
from simulator.report.to_json import comparison, report
from simulator.run.result import Replicated, SimulationResult

if TYPE_CHECKING:
    from rich.console import Console

_MARKS: Final = ("a", "b")
"""Suffixes for the two simulations of a comparison, as in the JSON."""
_SMALL_SEQUENCES: Final = 50_000
"""With fewer sequences, all seeds take less time than starting processes."""
_LOGGED_GROUPS: Final = 6_000
"""Maximum groups of a logged run that trace viewers can open easily."""
_DRAWN_ENGINES: Final = 8
"""Maximum engine rows of a gantt picture."""
_DRAWN_STEPS: Final = 2.5
"""Steps in the enlarged part of a gantt picture."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one call of the command."""

    sources: tuple[str | None, ...]
    """One file or preset, or two to compare, each optionally followed by its own overrides; None
    takes the defaults."""
    overrides: tuple[str, ...] = ()
    seeds: int | None = None
    as_json: bool = False
    trace: Path | None = None
    """For two simulations, `t.json` becomes t-a.json and t-b.json."""
    gantt: Path | None = None
    """For two simulations, `g.png` becomes g-a.png and g-b.png."""
    plots: Path | None = None


def run_command(options: Options) -> None:
    """Load the configs, simulate, print the report and write the files."""
    loaded = [_load(options, source) for source in options.sources]
    notes = console_on(sys.stderr)
    configs = [_fitted(config, notes) for config, _ in loaded]
    options = _with_outputs(options)
    runs = _replicated(configs, notes)
    stopped = len(runs) < len(configs) or any(
        len(run.results) < config.seeds for run, config in zip(runs, configs, strict=True)
    )
    configs = configs[: len(runs)]
    reports = [report(run, config) for run, config in zip(runs, configs, strict=True)]
    for result, config, (_, overrides) in zip(reports, configs, loaded, strict=False):
        result["warnings"].extend(ignored_overrides(config, overrides))
    if options.as_json:
        print(json.dumps(_json(configs, runs, reports), indent=2, allow_nan=False))
    else:
        _print(configs, runs, reports)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    for path in _write_files(options, configs, runs, notes):
        notes.print(f"written: {path}", highlight=False, soft_wrap=True)


def _replicated(configs: Sequence[SimulationConfig], notes: Console) -> list[Replicated]:
    """Simulate all seeds of each config; after Ctrl-C, return the finished ones (if any)."""
    runs: list[Replicated] = []
    for config in configs:
        results: list[SimulationResult] = []
        try:
            with ended_like_ctrl_c():
                runs.append(replicate_with_progress(config, notes, results.append))
        except KeyboardInterrupt:
            total = sum(one.seeds for one in configs)
            done = sum(len(run.results) for run in runs) + len(results)
            notes.print(f"stopped, as requested: {done} of {total} seeds were simulated")
            if results:
                runs.append(Replicated(results=tuple(sorted(results, key=lambda one: one.seed))))
            if not runs:
                raise
            break
    # Two configs are compared seed by seed.
    shared = set.intersection(*({one.seed for one in run.results} for run in runs))
    if not shared:
        return runs[:1]
    return [
        Replicated(results=tuple(one for one in run.results if one.seed in shared)) for run in runs
    ]


def replicate_with_progress(
    config: SimulationConfig,
    notes: Console,
    on_result: Callable[[SimulationResult], object] = lambda _: None,
) -> Replicated:
    """Simulate all seeds, with a progress bar on a terminal; `on_result` gets each immediately."""
    workload = config.workload
    sequences = workload.steps * workload.prompts_per_batch * workload.samples_per_prompt
    small = sequences * config.seeds < _SMALL_SEQUENCES
    with _progress(notes, config.name, config.seeds) as advance:
        done = 0

        def note(result: SimulationResult) -> None:
            nonlocal done
            done += 1
            on_result(result)
            advance()
            if not small and not notes.is_terminal:
                notes.print(f"simulated {done} of {config.seeds} seeds", highlight=False)

        return replicate(config, processes=1 if small else None, on_result=note)


def list_presets(console: Console) -> None:
    """Print a line per preset."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, title in presets().items():
        table.add_row(name, title)
    console.print(table, highlight=False)


def print_presets() -> None:
    """Print a line per preset on stdout."""
    list_presets(console_on(sys.stdout))


def _load(options: Options, source: str | None) -> tuple[SimulationConfig, Sequence[str]]:
    """Config to simulate, and the overrides applied to it."""
    overrides = list(options.overrides)
    if options.seeds is not None:
        overrides.append(f"seeds={options.seeds}")
    own: list[str] = []
    if source is not None and not Path(source).is_file():  # "FILE a.b=c": its own overrides
        source, *own = _split(source)
    config = load_simulation(source, [*overrides, *own])
    if own:
        config.name = " ".join([config.name, *own])
    return config, [*overrides, *own]


def _fitted(config: SimulationConfig, notes: Console) -> SimulationConfig:
    """Adjust defaults that follow from given settings, and report them."""
    found = fitted(config)
    if changed := changes_of(config, found):
        said = " ".join(f"{name}={value}" for name, value in changed.items())
        notes.print(f"note: to fit what was given: {said}", highlight=False, markup=False)
    return found


def _split(source: str) -> list[str]:
    try:
        return shlex.split(source) or [source]
    except ValueError as error:
        raise ValueError(
            f"{source!r} has an unclosed quotation mark; close it or remove it"
        ) from error


@contextmanager
def _progress(notes: Console, name: str, seeds: int) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("simulating {task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("seeds"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task(name, total=seeds)
        yield lambda: bar.advance(task)


def _with_outputs(options: Options) -> Options:
    """Options with checked output paths; a gantt without a suffix becomes a PNG."""
    count = len(options.sources)
    checked = dataclasses.replace(
        options,
        trace=options.trace and file_to_write("--trace", options.trace),
        gantt=options.gantt and picture_to_write("--gantt", options.gantt),
        plots=options.plots and folder_to_write("--plots", options.plots),
    )
    for option, path in (("--trace", checked.trace), ("--gantt", checked.gantt)):
        for each in _one_each(path, count) if path else ():
            file_to_write(option, each)
    return checked


def _one_each(path: Path, count: int) -> list[Path]:
    """One path per simulation; for two of them with suffixes -a and -b."""
    if count == 1:
        return [path]
    return [path.with_stem(f"{path.stem}-{mark}") for mark in _MARKS[:count]]


def _marked(configs: Sequence[SimulationConfig]) -> Sequence[SimulationConfig]:
    """For two simulations, prefix the names with A and B as in the comparison."""
    if len(configs) == 1:
        return configs
    return [
        config.with_settings({"name": f"{mark.upper()}: {config.name}"})
        for mark, config in zip(_MARKS, configs, strict=True)
    ]


def _json(
    configs: Sequence[SimulationConfig],
    runs: Sequence[Replicated],
    reports: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    if len(runs) == 1:
        return reports[0]
    return {"a": reports[0], "b": reports[1], "ratio": _ratio(configs, runs)}


def _print(
    configs: Sequence[SimulationConfig],
    runs: Sequence[Replicated],
    reports: Sequence[dict[str, Any]],
) -> None:
    from simulator.report.tables import show_comparison, show_report

    console = console_on(sys.stdout)
    if len(runs) == 1:
        show_report(console, reports[0])
    else:
        show_comparison(console, reports[0], reports[1], _ratio(configs, runs))


def _ratio(configs: Sequence[SimulationConfig], runs: Sequence[Replicated]) -> dict[str, Any]:
    return comparison(runs[0], runs[1], (configs[0], configs[1]))


def _write_files(
    options: Options,
    configs: Sequence[SimulationConfig],
    runs: Sequence[Replicated],
    notes: Console,
) -> Iterator[Path]:
    if options.trace or options.gantt:
        # Both pictures enlarge the same length of time.
        zoom_s = _DRAWN_STEPS * max(run.step_s.mean for run in runs)
        for number, config in enumerate(_marked(configs)):
            log = _logged_run(config, notes)
            if options.trace:
                yield _write_trace(log, _one_each(options.trace, len(configs))[number])
            if options.gantt:
                path = _one_each(options.gantt, len(configs))[number]
                yield _draw_gantt(log, path, config, zoom_s)
    if options.plots:
        from simulator.report.plots import write_plots

        yield from write_plots(runs, options.plots)


def _logged_run(config: SimulationConfig, notes: Console) -> Log:
    """Log of the first seed, cut to the first steps if the run is long."""
    workload = config.workload
    most = max(workload.warmup_steps + 3, _LOGGED_GROUPS // workload.prompts_per_batch)
    if workload.steps > most:
        notes.print(
            f"trace and gantt of {config.name} show the first {most} of {workload.steps} steps, "
            f"of seed {config.seed}",
            highlight=False,
        )
        config = config.with_settings({"workload.steps": most})
    return simulated_log(config)


def _write_trace(log: Log, path: Path) -> Path:
    from areal_lab.runlog.chrome_trace import chrome_trace

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(chrome_trace(log), allow_nan=False, separators=(",", ":")))
    return path


def _draw_gantt(log: Log, path: Path, config: SimulationConfig, zoom_s: float) -> Path:
    from areal_lab.plots.style import save_picture
    from areal_lab.plots.timeline import draw_timeline
    from simulator.report.tables import engines_of, only_engines

    engines = engines_of(log)
    drawn = only_engines(log, engines[:_DRAWN_ENGINES], rewards=config.workload.reward.mean_s > 0)
    title = f"{config.name}, simulated"
    if len(engines) > _DRAWN_ENGINES:
        title += f"; {_DRAWN_ENGINES} of {len(engines)} engines"
    return save_picture(draw_timeline(drawn, zoom_s=zoom_s, title=title), path)
