"""`areal-lab eval`: sample a model's responses to a data set and score them."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lab.cli.outputs import FAILED, error_exit, error_text
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError, refusal
from areal_lab.config.record import given_settings
from areal_lab.config.schema import TrainConfig
from areal_lab.data.benchmarks import REWARDS, benchmark_named
from areal_lab.host.terminal import INTERRUPTED, printable
from areal_lab.pipeline.console import loading
from areal_lab.pipeline.model_evaluation import Evaluation, evaluate, prepare_evaluation
from areal_lab.resolve.unread import EVAL
from areal_lab.shell.display import Display, terminal_display
from areal_lab.shell.stop import StopSignal, stop_on_interrupt
from areal_lab.shell.terminal import interval_text, two_columns

MAX_NEW_TOKENS = 512
"""Longest response on a benchmark, unless `gconfig.max_new_tokens` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of the command line."""

    samples: int
    temperature: float | None
    ks: Sequence[int]
    limit: int
    seed: int | None
    out: Path | None
    as_json: bool


def run_eval(model: str, dataset: str, overrides: Sequence[str], options: EvalOptions) -> None:
    """Evaluate, print the results and, as the last line, the folder with them."""
    config = eval_config(model, dataset, overrides, options)
    stem = f"{os.path.basename(os.path.realpath(model))}-{Path(dataset).stem}"
    out = options.out or Path("evals") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    with loading(config):
        evaluation = prepare_evaluation(
            config, samples=options.samples, ks=options.ks, limit=options.limit, out=out
        )
    try:
        found = _run(evaluation)
    except ConfigError:
        raise
    except asyncio.CancelledError:
        _show_stopped(out, as_json=options.as_json)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:  # reported here, because no caller does
        raise error_exit(error_text(error), FAILED) from error
    if options.as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(results_table(found))
        print(out)
    if not found["rewards"].get("ok"):
        raise error_exit(f"no response was scored: {found['first_failure']}", FAILED)


def _show_stopped(out: Path, *, as_json: bool) -> None:
    """Print the scores of a stopped evaluation."""
    file = out / "results.json"
    if not file.is_file():
        typer.secho("stopped, as requested; nothing was scored", err=True, fg="red")
        return
    found = json.loads(file.read_text(encoding="utf-8"))
    typer.secho(f"stopped, as requested, after {found['stopped']}", err=True, fg="red")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(results_table(found))
        print(out)


def eval_config(
    model: str, dataset: str, overrides: Sequence[str], options: EvalOptions
) -> TrainConfig:
    """Settings of an evaluation: the data set's, then the overrides, then the options."""
    name, given = benchmark_named(dataset), list(overrides)
    if name is not None:
        usual = [f"dataset.type={name}", f"reward.fn={REWARDS[name]}"]
        given = [*usual, f"gconfig.max_new_tokens={MAX_NEW_TOKENS}", *given]
    # The config may be that of a run; only the settings given in addition have to be used.
    config = load_config(dataset if name is None else None, given, files_are_given=False)
    greedy = options.temperature is None and options.samples == 1
    asked = next((one for one in given_settings(config) if one.name == "gconfig.temperature"), None)
    if greedy and asked is not None and config.gconfig.temperature:
        value = f"{config.gconfig.temperature:g}"
        raise refusal(
            "gconfig.temperature",
            f"gconfig.temperature is {value}, but has no effect on one sample, which is greedy; "
            f"use --temperature {value}, or --samples",
        )
    for note in EVAL.check(config):
        typer.secho(printable(f"note: {note}"), err=True, fg="yellow")
    chosen: dict[str, Any] = {"actor.path": model}
    if options.seed is not None:
        chosen["seed"] = options.seed
    if greedy or options.temperature is not None:
        chosen["gconfig.temperature"] = options.temperature or 0.0
    return config.with_settings(chosen)


def results_table(found: Mapping[str, Any]) -> Table:
    """Results as a table."""
    table = two_columns()
    for k, interval in found["pass_at"].items():
        table.add_row(f"pass@{k}", interval_text(interval))
    table.add_row("mean reward", interval_text(found["reward"]))
    each = found["samples_per_problem"]
    how = "greedy" if found["temperature"] == 0 else f"temperature {found['temperature']:g}"
    table.add_row("samples", f"{found['samples']:,}, {each} for each problem, {how}")
    cut = f"{found['truncated_share']:.1%} cut off at {found['max_new_tokens']}"
    table.add_row("length", f"{found['mean_tokens']:.1f} tokens on average, {cut}")
    counts = {name: count for name, count in found["rewards"].items() if name != "ok"}
    failed = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none failed"
    table.add_row("rewards", failed, style="red" if counts else "")
    if counts:
        last = found["first_failure"].strip().splitlines()[-1]
        table.add_row("first failure", Text(printable(last)), style="red")
    table.add_row("time", f"{found['wall_s']:.0f} s, {found['generating_s']:.0f} s generating")
    return table


def _run(evaluation: Evaluation) -> dict[str, Any]:
    state = ""

    def show(text: str) -> None:
        nonlocal state
        state = text

    async def until_done(display: Display) -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None, "a coroutine"
        stop_on_interrupt(StopSignal(), first=task.cancel)
        return await evaluate(evaluation, display, show)

    with terminal_display(str, lambda: state) as display:
        return asyncio.run(until_done(display))
