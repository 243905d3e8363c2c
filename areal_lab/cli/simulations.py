"""Commands that simulate, search and summarize: cosim, simulate, calibrate, plan, sweep, trace.

Each command imports its modules when it runs, so `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from areal_lab.cli.command import schema
from areal_lab.cli.outputs import (
    FAILED,
    error_exit,
    error_text,
    exit_on_error,
    failures_reported,
)
from areal_lab.extras import require
from areal_lab.host.terminal import printable

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@exit_on_error
def cosim(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file, or a shipped config: cosim, cosim_sorting.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="a.b=c", help="Override settings of the file: eta=8 objective=naive seed=3"
        ),
    ] = None,
) -> None:
    """Train a small model under the schedule of a simulated cluster.

    Deterministic, on one core. The last line of the output is the run folder.
    """
    require("areal-lab cosim", "train")
    from areal_lab.cli.cosim import run_command

    with failures_reported():
        code = run_command(config, overrides or [])
    raise typer.Exit(code)


@exit_on_error
def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.yaml a.b=c",
            help="Config file, and settings that override it: eta=0 cluster.gpus=64",
        ),
    ] = None,
    *,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Simulate a shipped preset (see --list-presets)."),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Compare two files or presets side by side: small 'small eta=0'. --trace and "
            "--gantt write two files, named with -a and -b.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds for the confidence intervals.")
    ] = None,
    as_json: _Json = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace (JSON) for ui.perfetto.dev.")
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option(help="Draw the timeline of each process (PNG).")
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw utilization, lags and step times into a folder."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Replay a recorded run and compare predicted with measured times."
        ),
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list-presets", help="List the shipped presets and exit.")
    ] = False,
) -> None:
    """Simulate a cluster under asynchronous training.

    Prints step time, throughput, idle time, lags and cost.
    """
    from areal_lab.cli.simulate import Options, print_presets, run_command

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
        Options(
            sources=sources,
            overrides=overrides,
            seeds=seeds,
            as_json=as_json,
            trace=trace,
            gantt=gantt,
            plots=plots,
        )
    )


@exit_on_error
def calibrate(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|CSV", help="Run folder, or a CSV file with columns batch, context, ms."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="a.b=c", help="Simulator settings to include in the output: cluster.gpu=H100"
        ),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Output file; the default is RUN/simulation.yaml."),
    ] = None,
    as_json: _Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Plot measured against predicted times (PNG).")
    ] = None,
    step_table: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Instead of a run: fit a named trainer to measured training steps (columns "
            "seconds, tokens, sequences; optional lengths, gpus, micro_batch_tokens, minibatches).",
        ),
    ] = None,
    gpu_day: Annotated[
        Path | None,
        typer.Option(
            metavar="JSONL",
            help="Instead of a run: fit this library's trainer and engine to the facts that "
            "`python -m tools.gpu_day` wrote.",
        ),
    ] = None,
) -> None:
    """Fit the simulator to a recorded run, a day on a GPU, or a named trainer to measured steps.

    Writes the fitted costs and response lengths as a config for `simulate`, and prints the errors
    on held-out data.
    """
    from areal_lab.cli.calibrate import run_calibration, run_gpu_day, run_step_table

    settings = [*([] if source is None else [source]), *(overrides or [])]
    if step_table is not None and gpu_day is not None:
        raise ValueError("--step-table and --gpu-day are two sources; give one of them")
    if gpu_day is not None:
        run_gpu_day(gpu_day, settings, out=out, as_json=as_json, plot=plot)
        return
    if step_table is not None:
        run_step_table(step_table, settings, out=out, as_json=as_json, plot=plot)
        return
    if source is None:
        raise ValueError(
            "calibrate needs a run folder or a CSV file, --step-table CSV or --gpu-day JSONL"
        )
    run_calibration(Path(source), overrides or [], out=out, as_json=as_json, plot=plot)


@exit_on_error
def plan(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.yaml", help="Plan file, or a shipped one: plan_example, plan_small."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c", help="Override settings of the file: objective=gpus"),
    ] = None,
    *,
    as_json: _Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the Pareto front and the sensitivity (PNG).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; the default is one per CPU.")
    ] = None,
) -> None:
    """Find the smallest, cheapest or fastest cluster for a run.

    Searches the candidates of a plan file and prints a recommendation, with its alternatives and
    how sensitive it is to the inputs.
    """
    from areal_lab.cli.plan import run_plan

    run_plan(file, overrides or [], as_json=as_json, plot=plot, workers=workers)


@exit_on_error
def sweep(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY.yaml", help="Study file, or a shipped one: study_loss, study_eta."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="a.b=c",
            help="Override the file: workers=2 grid.seed=[1,2] settings.total_train_steps=8",
        ),
    ] = None,
    *,
    as_json: _Json = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the cells, and run nothing.")
    ] = False,
) -> None:
    """Run a grid of settings: trainings or simulations, several at a time.

    Cells that are complete are not run again. Writes cells.csv and figure.png into the study's
    folder, which is the last line of the output. Exits with 1 if a cell failed.
    """
    from areal_lab.cli.sweep import run_sweep

    try:
        code = run_sweep(study, overrides or [], as_json=as_json, dry_run=dry_run)
    except BaseExceptionGroup as error:
        raise error_exit(error_text(error), FAILED) from error
    raise typer.Exit(code)


@exit_on_error
def trace(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[
        Path | None, typer.Option(help="Trace file; the default is RUN/trace.json.")
    ] = None,
) -> None:
    """Summarize a run and export its trace.

    Open the trace in ui.perfetto.dev or chrome://tracing.
    """
    from areal_lab.pipeline.report import export_trace, format_run

    typer.echo(printable(format_run(run)))
    typer.echo(printable(f"trace: {export_trace(run, out or run / 'trace.json')}"))


def _sources(
    arguments: Sequence[str], preset: str | None, compare: tuple[str, str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files or presets to simulate, and the overrides."""
    overrides = tuple(one for one in arguments if "=" in one and not Path(one).is_file())
    files = tuple(one for one in arguments if one not in overrides)
    named = (*files, *([preset] if preset else ()), *(compare or ()))
    if compare and (files or preset):
        raise ValueError(f"--compare takes both simulations; leave out {(*files, preset)[0]!r}")
    if not named:
        raise ValueError(
            "nothing to simulate; give a FILE.yaml, or --preset NAME (see --list-presets)"
        )
    if len(named) > 1 and not compare:
        raise ValueError(
            f"{' and '.join(map(repr, named))} are two simulations; use --compare for two"
        )
    return named, overrides


def _check_replay(compare: tuple[str, str] | None, unused: Mapping[str, object]) -> None:
    """Refuse options that have no effect with `--against`."""
    if compare:
        raise ValueError(
            "--against takes one file or preset, but --compare takes two; leave one of them out"
        )
    given = [option for option, value in unused.items() if value is not None]
    if given:
        raise ValueError(
            f"{' and '.join(given)} would have no effect with --against, which replays a recorded "
            "run once; leave one of them out"
        )


_SIMULATION: Final = schema(
    "simulator.config.schema:SimulationConfig", "simulator.config.load:ALIASES"
)
COMMANDS: Final = (
    (cosim, schema("cosim.schema:CosimConfig", "cosim.load:ALIASES")),
    (simulate, _SIMULATION),
    (calibrate, _SIMULATION),
    (plan, schema("simulator.plan.schema:PlanConfig", "simulator.plan.schema:ALIASES")),
    (sweep, schema("areal_lab.sweep.study:StudyConfig")),
    (trace, None),
)
"""Commands, and the settings that they take."""
