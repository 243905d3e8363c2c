"""The command `areal-lab`: train, simulate, look at runs, check the installation.

Exit codes: 0 done, 1 a run failed, 2 the settings or the command line are wrong, 130 Ctrl-C.
What a command needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from areal_lab.cli import engine as engine_command
from areal_lab.cli.errors import (
    FAILED,
    INTERRUPTED,
    WRONG_SETTINGS,
    failure,
    reported,
    stop,
)
from areal_lab.extras import MissingExtra, require

app = typer.Typer(
    name="areal-lab",
    help="Asynchronous reinforcement learning of language models, after AReaL (arXiv:2505.24298).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(engine_command.app, name="engine")


def _with_settings(schema: Callable[[], tuple[type, Mapping[str, str]]]) -> type[TyperCommand]:
    """A command that shows every setting below its help."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            from areal_lab.config.reference import format_settings

            super().format_help(ctx, formatter)
            formatter.write("\nSettings, with their defaults:\n\n")
            formatter.write(format_settings(*schema()) + "\n")

    return Command


def _train_settings() -> tuple[type, Mapping[str, str]]:
    from areal_lab.config.load import ALIASES
    from areal_lab.config.schema import TrainConfig

    return TrainConfig, ALIASES


def _simulate_settings() -> tuple[type, Mapping[str, str]]:
    from simulator.config.load import ALIASES
    from simulator.config.schema import SimulationConfig

    return SimulationConfig, ALIASES


def _plan_settings() -> tuple[type, Mapping[str, str]]:
    from simulator.plan.schema import ALIASES, PlanConfig

    return PlanConfig, ALIASES


@app.command(cls=_with_settings(_train_settings))
@reported
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="YAML file, or a name: arithmetic, gsm8k.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c", help="Settings that replace the file's: eta=0 seed=2"),
    ] = None,
) -> None:
    """Train a model as CONFIG says; prints the run folder as its last line."""
    require("areal-lab train", "train")
    from areal_lab.config.load import load_config
    from areal_lab.config.problem import ConfigError

    settings = load_config(config, overrides or [])

    from areal_lab.pipeline.console import run_to_end

    try:
        code = run_to_end(settings)
    except ConfigError:
        raise
    except Exception as error:  # the last place that can tell the user
        raise stop(failure(error), FAILED) from error
    raise typer.Exit(code)


@app.command(cls=_with_settings(_simulate_settings))
@reported
def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.yaml a.b=c",
            help="What to simulate, and settings that replace the file's: eta=0 cluster.gpus=64",
        ),
    ] = None,
    *,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A shipped file instead of one's own.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Two files or presets, side by side: small 'small eta=0'. Of --trace and "
            "--gantt each has a file of its own, which ends with -a or -b.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repetitions that the intervals are over.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev here (JSON).")
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option(help="Draw what each process did, when (PNG).")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw utilization, lags and steps into a folder."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Replay a recorded run: predicted against measured."),
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="List the shipped files and end.")
    ] = False,
) -> None:
    """Say what a cluster does under asynchronous training: step time, idle time, lags, cost."""
    from areal_lab.cli.simulate import Wanted, print_presets, run_command

    if list_presets:
        print_presets()
        return
    sources, overrides = _sources(arguments or [], preset, compare)
    if against:
        from areal_lab.cli.calibrate import run_replay

        _check_replay(compare, {"--seeds": seeds, "--trace": trace, "--gantt": gantt})
        run_replay(sources[0], against, overrides, as_json=as_json, plots=plots)
        return
    run_command(
        Wanted(
            sources=sources,
            overrides=overrides,
            seeds=seeds,
            as_json=as_json,
            trace=trace,
            gantt=gantt,
            plots=plots,
        )
    )


@app.command(cls=_with_settings(_simulate_settings))
@reported
def calibrate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CSV", help="Run folder, or a CSV file with the columns batch, context, ms."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c", help="Settings of `simulate` to write: cluster.gpu=H100"),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="For `simulate`; RUN/simulation.yaml if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw measured against predicted times (PNG).")
    ] = None,
) -> None:
    """Fit the simulator's costs and lengths to a recorded run, with errors on what is held out."""
    from areal_lab.cli.calibrate import run_calibration

    run_calibration(source, overrides or [], out=out, as_json=as_json, plot=plot)


@app.command(cls=_with_settings(_plan_settings))
@reported
def plan(
    file: Annotated[
        str, typer.Argument(metavar="FILE.yaml", help="Question, or a name: plan_example.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c", help="Settings that replace the file's: objective=gpus"),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the front and what the answer depends on (PNG).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one per processor if not given.")
    ] = None,
) -> None:
    """Find the fewest GPUs, the least money or the shortest time for a number of steps."""
    from areal_lab.cli.plan import run_plan

    run_plan(file, overrides or [], as_json=as_json, plot=plot, workers=workers)


@app.command()
@reported
def trace(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the trace goes; RUN/trace.json if not given.")
    ] = None,
) -> None:
    """Print what a run did, and export its trace for chrome://tracing or ui.perfetto.dev."""
    from areal_lab.pipeline.report import export_trace, format_run

    typer.echo(format_run(run))
    typer.echo(f"trace: {export_trace(run, out or run / 'trace.json')}")


@app.command()
def config() -> None:
    """List every setting with its type, default and meaning."""
    from areal_lab.config.reference import format_settings

    typer.echo(format_settings())


@app.command()
@reported
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c", help="Settings that replace those of --config."),
    ] = None,
    *,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Explain what this configuration would start where."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead.")] = False,
) -> None:
    """Check the installation; for what is missing, name the command that mends it."""
    from areal_lab.cli import doctor as examination

    if overrides and config is None:
        raise ValueError(f"{overrides[0]!r} changes a configuration; add --config FILE")
    findings = examination.judge(examination.gather())
    plan = None
    if config is not None:
        require("areal-lab doctor --config", "train")
        from areal_lab.config.load import load_config

        plan, refusals = examination.explain_config(load_config(config, overrides or []))
        findings += refusals
    told = examination.as_json if as_json else examination.as_table
    typer.echo(told(findings, plan))
    raise typer.Exit(examination.exit_code(findings))


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except MissingExtra as error:
        sys.exit(stop(str(error), WRONG_SETTINGS).exit_code)
    except BrokenPipeError:  # as in `areal-lab config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


def _sources(
    arguments: Sequence[str], preset: str | None, compare: tuple[str, str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to simulate, and the overrides.

    Raises:
        ValueError: nothing to simulate, or more than one thing.
    """
    overrides = tuple(one for one in arguments if "=" in one and not Path(one).is_file())
    files = tuple(one for one in arguments if one not in overrides)
    named = (*files, *([preset] if preset else ()), *(compare or ()))
    if compare and (files or preset):
        raise ValueError(f"--compare names what to simulate; leave out {(*files, preset)[0]!r}")
    if not named:
        raise ValueError("nothing to simulate; name a FILE.yaml, or --preset NAME (--list-presets)")
    if len(named) > 1 and not compare:
        raise ValueError(
            f"{' and '.join(map(repr, named))} are two things to simulate; --compare takes two"
        )
    return named, overrides


def _check_replay(compare: tuple[str, str] | None, unused: Mapping[str, object]) -> None:
    """Refuse what a replay has no use for.

    Raises:
        ValueError: in one line.
    """
    if compare:
        raise ValueError("--against replays one file or preset; --compare names two: leave one out")
    given = [option for option, value in unused.items() if value is not None]
    if given:
        raise ValueError(
            f"{' and '.join(given)} would have no effect: --against replays a recorded run, once; "
            "leave out one or the other"
        )


if __name__ == "__main__":
    main()
