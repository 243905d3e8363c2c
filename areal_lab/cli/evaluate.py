"""`areal-lab eval`: sample a model's responses to a data set and score them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lab.cli.errors import FAILED, error_exit, error_text
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.data.benchmarks import REWARDS, benchmark_named
from areal_lab.host.terminal import printable
from areal_lab.pipeline.console import interval_text
from areal_lab.pipeline.model_evaluation import Evaluation, evaluate, prepare_evaluation
from areal_lab.pipeline.progress import terminal_display

MAX_NEW_TOKENS = 512
"""Longest response on a benchmark, unless `gconfig.max_new_tokens` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The options of the command line."""

    samples: int
    temperature: float | None
    ks: Sequence[int]
    limit: int
    seed: int | None
    out: Path | None
    as_json: bool


def run_eval(model: str, dataset: str, overrides: Sequence[str], options: EvalOptions) -> None:
    """Evaluate, print the results and, as the last line, the folder that has them.

    Raises:
        ConfigError: one line per problem, before any process starts.
    """
    config = eval_config(model, dataset, overrides, options)
    stem = f"{Path(model).resolve().name}-{Path(dataset).stem}"
    out = options.out or Path("evals") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    evaluation = prepare_evaluation(
        config, samples=options.samples, ks=options.ks, limit=options.limit, out=out
    )
    try:
        found = _run(evaluation)
    except ConfigError:
        raise
    except Exception as error:  # reported here, as no caller does
        raise error_exit(error_text(error), FAILED) from error
    if options.as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(results_table(found))
        print(out)
    if not found["rewards"].get("ok"):
        raise error_exit(f"no response was scored: {found['first_failure']}", FAILED)


def eval_config(
    model: str, dataset: str, overrides: Sequence[str], options: EvalOptions
) -> TrainConfig:
    """The settings of an evaluation: the data set's, then the overrides, then the options.

    Raises:
        ConfigError: as `load_config`.
    """
    given = list(overrides)
    name = benchmark_named(dataset)
    if name is not None:
        usual = [f"dataset.type={name}", f"reward.fn={REWARDS[name]}"]
        given = [*usual, f"gconfig.max_new_tokens={MAX_NEW_TOKENS}", *given]
    given.append(f"actor.path={model}")
    if options.seed is not None:
        given.append(f"seed={options.seed}")
    if options.temperature is not None or options.samples == 1:
        given.append(f"gconfig.temperature={options.temperature or 0.0}")
    return load_config(dataset if name is None else None, given)


def results_table(found: Mapping[str, Any]) -> Table:
    """The results for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column()
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

    def tell(text: str) -> None:
        nonlocal state
        state = text

    with terminal_display(str, lambda: state) as display:
        return asyncio.run(evaluate(evaluation, display, tell))
