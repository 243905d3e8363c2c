"""The `areal-lab` command: train, simulate, inspect runs, check the installation.

Exit codes: 0 success, 1 the run failed, 2 wrong settings or command line, 130 Ctrl-C.
Each command imports what it needs when it runs, so that `--help` is fast.
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
    error_exit,
    error_text,
    exit_on_error,
)
from areal_lab.config.shipped import training_configs
from areal_lab.extras import MissingExtra, require
from areal_lab.host.terminal import printable

app = typer.Typer(
    name="areal-lab",
    help="Asynchronous reinforcement learning for language models, after AReaL (arXiv:2505.24298).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(engine_command.app, name="engine")

_A_CONFIG = f"YAML file, or a shipped config: {', '.join(training_configs())}."


def _with_settings(schema: Callable[[], tuple[type, Mapping[str, str]]]) -> type[TyperCommand]:
    """A command class whose `--help` also lists all settings of a schema, and named functions."""

    class Command(TyperCommand):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            from areal_lab.config.reference import format_settings
            from areal_lab.config.schema import TrainConfig

            super().format_help(ctx, formatter)
            record, aliases = schema()
            formatter.write("\nSettings, with their defaults:\n\n")
            formatter.write(format_settings(record, aliases) + "\n")
            if record is TrainConfig:
                from areal_lab.training.objective.formula_list import format_formulas

                formatter.write(f"\n{format_formulas()}\n")

    return Command


def _train_settings() -> tuple[type, Mapping[str, str]]:
    from areal_lab.config.load import ALIASES
    from areal_lab.config.schema import TrainConfig

    return TrainConfig, ALIASES


def _simulate_settings() -> tuple[type, Mapping[str, str]]:
    from simulator.config.load import ALIASES
    from simulator.config.schema import SimulationConfig

    return SimulationConfig, ALIASES


def _cosim_settings() -> tuple[type, Mapping[str, str]]:
    from cosim.load import ALIASES
    from cosim.schema import CosimConfig

    return CosimConfig, ALIASES


def _plan_settings() -> tuple[type, Mapping[str, str]]:
    from simulator.plan.schema import ALIASES, PlanConfig

    return PlanConfig, ALIASES


def _offline_settings(command: str) -> Callable[[], tuple[type, Mapping[str, str]]]:
    def schema() -> tuple[type, Mapping[str, str]]:
        from areal_lab.config.offline import ALIASES, KINDS

        return KINDS[command], ALIASES

    return schema


def _sweep_settings() -> tuple[type, Mapping[str, str]]:
    from areal_lab.sweep.study import StudyConfig

    return StudyConfig, {}


@app.command(cls=_with_settings(_train_settings))
@exit_on_error
def train(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help=_A_CONFIG,
        ),
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE a.b=c",
            help="Recipes and files that go over it (dapo), and settings that override them: eta=0 "
            "seed=2",
        ),
    ] = None,
    *,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Continue this run from its newest checkpoint, in its folder, instead of CONFIG.",
        ),
    ] = None,
    restart: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Continue the run after a crash, at most this many times."
        ),
    ] = 0,
) -> None:
    """Train a model with asynchronous RL.

    The last line of the output is the run folder.
    """
    require("areal-lab train", "train")
    from areal_lab.cli.train import run_train
    from areal_lab.config.problem import ConfigError

    arguments = [*([config] if config else []), *(overrides or [])]
    try:
        code = run_train(arguments, resume=resume, restarts=restart)
    except ConfigError:
        raise
    except Exception as error:  # reported here, as no caller does
        raise error_exit(error_text(error), FAILED) from error
    raise typer.Exit(code)


@app.command(cls=_with_settings(_train_settings))
@exit_on_error
def distill(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help=_A_CONFIG,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE a.b=c",
            help="Recipes and files that go over it, and settings that override them; one of them "
            "is teacher.path=MODEL",
        ),
    ] = None,
) -> None:
    """Train a model on its own samples to be like a teacher: `train` with the recipe distill.

    The last line of the output is the run folder. `areal-lab train --resume RUN` continues it.
    """
    require("areal-lab distill", "train")
    from areal_lab.cli.train import run_distill
    from areal_lab.config.problem import ConfigError

    try:
        code = run_distill([config, *(overrides or [])])
    except ConfigError:
        raise
    except Exception as error:  # reported here, as no caller does
        raise error_exit(error_text(error), FAILED) from error
    raise typer.Exit(code)


_Offline = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG a.b=c",
        help="YAML files or shipped configs, each over those before it, and settings that override "
        "them: dataset.path=rows.jsonl actor.path=MODEL",
    ),
]
_Continued = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue this run from its newest checkpoint, in its folder, instead of CONFIG.",
    ),
]


@app.command(cls=_with_settings(_offline_settings("sft")))
@exit_on_error
def sft(arguments: _Offline = None, *, resume: _Continued = None) -> None:
    """Fine-tune a model on demonstrations.

    A shipped config is sft_adder. The last line of the output is the run folder.
    """
    _offline("sft", arguments, resume)


@app.command(cls=_with_settings(_offline_settings("rm")))
@exit_on_error
def rm(arguments: _Offline = None, *, resume: _Continued = None) -> None:
    """Train a reward model on pairs of a chosen and a rejected response.

    A shipped config is rm_adder. The last line of the output is the run folder, whose `model` is
    for `reward.kwargs.path` and `critic.path` of `areal-lab train`.
    """
    _offline("rm", arguments, resume)


@app.command(cls=_with_settings(_offline_settings("dpo")))
@exit_on_error
def dpo(arguments: _Offline = None, *, resume: _Continued = None) -> None:
    """Train a policy on pairs of a chosen and a rejected response (DPO, IPO).

    A shipped config is dpo_adder. The last line of the output is the run folder.
    """
    _offline("dpo", arguments, resume)


def _offline(command: str, arguments: Sequence[str] | None, resume: Path | None) -> None:
    require(f"areal-lab {command}", "train")
    from areal_lab.cli.offline import run_offline
    from areal_lab.config.problem import ConfigError

    try:
        code = run_offline(command, arguments or [], resume=resume)
    except ConfigError:
        raise
    except Exception as error:  # reported here, as no caller does
        raise error_exit(error_text(error), FAILED) from error
    raise typer.Exit(code)


@app.command("eval", cls=_with_settings(_train_settings))
@exit_on_error
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder or name, RUN, or RUN/best.")
    ],
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            help="gsm8k, math500, humaneval or mbpp, with dataset.path=FILE; or a config, whose "
            "held-out problems are taken: tiny, RUN/config.yaml.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="a.b=c", help="Override settings: rollout.backend=sglang"),
    ] = None,
    *,
    samples: Annotated[int, typer.Option(min=1, help="Responses per problem.")] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="The default is 0 (greedy) for one sample, else gconfig.temperature."
        ),
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(help="The k of pass@k; may be repeated. The default is 1 and SAMPLES."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Evaluate the first problems only; 0 takes all.")
    ] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; the default is `seed`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder; the default is below evals/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Evaluate a model: pass@1, pass@k, rewards and lengths on a data set.

    Writes results.json and samples.jsonl into a folder, which is the last line of the output.
    """
    require("areal-lab eval", "train")
    from areal_lab.cli.evaluate import EvalOptions, run_eval

    options = EvalOptions(
        samples=samples,
        temperature=temperature,
        ks=k or (),
        limit=limit,
        seed=seed,
        out=out,
        as_json=as_json,
    )
    run_eval(model, dataset, overrides or [], options)


@app.command(cls=_with_settings(_train_settings))
@exit_on_error
def gateway(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder or name, RUN, or RUN/best.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG a.b=c",
            help="A config, such as RUN/config.yaml, and settings that override it: "
            "rollout.backend=sglang rollout.engines=2, or 'rollout.addresses=[\"http://...\"]' for "
            "servers that run already; of gconfig and rollout. Without a config "
            "gconfig.max_new_tokens is 1024.",
        ),
    ] = None,
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 30100,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    admin_key_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File with the admin key, or to be made; the default is a new key in a file of "
            "its own.",
        ),
    ] = "",
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write each session into sessions.jsonl of this folder when it ends. By default "
            "only those that nothing has exported, below gateways/, when the gateway ends.",
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sessions that may be started before POST /grant_capacity grants more; the "
            "default is any number.",
        ),
    ] = None,
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Sessions at once; one more is refused with 429.")
    ] = 1024,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Calls that sample at once; one more is refused with 429.")
    ] = 1024,
    max_session_requests: Annotated[
        int, typer.Option(min=1, help="Calls that sample at once in one session.")
    ] = 64,
    session_timeout_s: Annotated[
        float, typer.Option(min=0.001, help="A session that is not used for so long is ended.")
    ] = 3600.0,
    reward_timeout_s: Annotated[
        float,
        typer.Option(min=0.0, help="How long after its end a session may still get its reward."),
    ] = 0.0,
    pinned: Annotated[
        bool,
        typer.Option(
            "--pinned",
            help="Ignore the temperature and top-p that clients ask for, as a run does.",
        ),
    ] = False,
    turn_discount: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Of rewards in sessions.jsonl, from turn to turn."),
    ] = 1.0,
    turn_discount_style: Annotated[
        str,
        typer.Option(
            help="tree (along each conversation) or linear (in order of creation, so that parallel "
            "conversations get each other's rewards)."
        ),
    ] = "tree",
    tool_call_parser: Annotated[
        str, typer.Option(help="How calls of tools are read; auto is what the template writes.")
    ] = "auto",
    template: Annotated[
        str, typer.Option(metavar="FILE", help="Chat template, instead of the model's.")
    ] = "",
    describe_tools: Annotated[
        bool,
        typer.Option(
            help="Whether tools are described in the system message if the template ignores them."
        ),
    ] = True,
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; the default is another one each time.")
    ] = None,
) -> None:
    """Serve a model to agents: OpenAI's and Anthropic's protocols, and sessions with rewards.

    Runs until Ctrl-C. Each session has a key of its own, which the admin key starts. Tokens are
    kept as they were sampled, with log-probs, and exported over HTTP or into a file.
    """
    require("areal-lab gateway", "train")
    from areal_lab.cli.gateway import GatewayOptions, run_gateway

    run_gateway(
        model,
        arguments or [],
        GatewayOptions(
            host=host,
            port=port,
            admin_key_file=admin_key_file,
            export=export,
            capacity=capacity,
            max_sessions=max_sessions,
            max_requests=max_requests,
            max_session_requests=max_session_requests,
            session_timeout_s=session_timeout_s,
            reward_timeout_s=reward_timeout_s,
            pinned=pinned,
            turn_discount=turn_discount,
            turn_discount_style=turn_discount_style,
            tool_call_parser=tool_call_parser,
            template=template,
            describe_tools=describe_tools,
            seed=seed,
        ),
    )


@app.command()
@exit_on_error
def host(
    *,
    join: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS:PORT",
            help="Of the run: cluster.address and cluster.port of its settings.",
        ),
    ],
    name: Annotated[
        str, typer.Option(help="Of this host in messages; the default is its host name.")
    ] = "",
    address: Annotated[
        str,
        typer.Option(
            help="Of this host, as the others reach it; the default is the one from which it "
            "reaches the run."
        ),
    ] = "",
    join_s: Annotated[
        float, typer.Option(min=0.0, help="Longest wait for the run, in seconds.")
    ] = 300.0,
    rejoin_s: Annotated[
        float,
        typer.Option(
            min=0.0, help="The same after the run has stopped asking for this host, in seconds."
        ),
    ] = 15.0,
) -> None:
    """Make this machine a host of a run on another one, until the run ends.

    The run (scheduler.type=manual) starts engines and trainer processes here. Both have the same
    secret in AREAL_LAB_CLUSTER_TOKEN. If the run does not ask for this host for
    cluster.lease_s, it ends everything that it has started here.
    """
    require("areal-lab host", "train")
    from areal_lab.cli.host import run_host

    run_host(join=join, name=name, address=address, join_s=join_s, rejoin_s=rejoin_s)


@app.command()
@exit_on_error
def deploy(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="docker, compose, rayjob, job, skypilot or slurm."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG a.b=c",
            help="As of `areal-lab train`: a config, recipes, changed settings.",
        ),
    ] = None,
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Machines, with that of the controller; the default is the fewest that hold the "
            "run.",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            min=0, help="GPUs of each; the default is as many as are needed, at most 8; 0 is a CPU."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Where the controller listens for the others; the default is cluster.port, or "
            "6380.",
        ),
    ] = None,
    image: Annotated[
        str, typer.Option(metavar="REGISTRY/NAME:TAG", help="Image of the containers.")
    ] = "",
    name: Annotated[
        str, typer.Option(help="Of the job; the default is made from experiment_name.")
    ] = "",
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE:/PATH",
            help="Files to appear at a path, read only: a claim (rayjob, job), a folder or volume "
            "(compose), a folder or bucket (skypilot). May be repeated.",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VARIABLE",
            help="Environment variable to pass on as a secret, such as HF_TOKEN. May be repeated.",
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help="Kind of GPU (skypilot).")] = "H100",
    cpus: Annotated[
        int | None, typer.Option(min=1, help="Cores of each machine, instead of the computed ones.")
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="GIB", help="Memory of each machine, instead of the computed one."
        ),
    ] = None,
    time: Annotated[
        int, typer.Option(min=1, metavar="HOURS", help="Time limit of the job (slurm).")
    ] = 24,
    with_ray: Annotated[
        bool, typer.Option("--with-ray", help="Install Ray in the image (docker), for rayjob.")
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the files are written.")
    ] = Path("deploy"),
    force: Annotated[
        bool, typer.Option("--force", help="Replace files that were edited, too.")
    ] = False,
) -> None:
    """Write the files that start a run elsewhere: containers, Kubernetes, a cloud, Slurm.

    The files have the settings of the run, and no secrets. Prints what each is for, and the
    commands to run next.
    """
    require("areal-lab deploy", "train")
    from areal_lab.cli.deploy import DeployOptions, run_deploy

    options = DeployOptions(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        port=port,
        image=image,
        name=name,
        mounts=mount or (),
        secrets=secret or (),
        gpu=gpu,
        cpus=cpus,
        memory_gib=memory,
        time_h=time,
        with_ray=with_ray,
        out=out,
        force=force,
    )
    run_deploy(kind, arguments or [], options)


@app.command(cls=_with_settings(_cosim_settings))
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

    run_command(config, overrides or [])


@app.command(cls=_with_settings(_simulate_settings))
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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


@app.command(cls=_with_settings(_simulate_settings))
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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
) -> None:
    """Fit the simulator to a recorded run, or a named trainer to measured steps.

    Writes the fitted costs and response lengths as a config for `simulate`, and prints the errors
    on held-out data.
    """
    from areal_lab.cli.calibrate import run_calibration, run_step_table

    if step_table is not None:
        settings = [*([] if source is None else [source]), *(overrides or [])]
        run_step_table(step_table, settings, out=out, as_json=as_json, plot=plot)
        return
    if source is None:
        raise ValueError("calibrate needs a run folder or a CSV file, or --step-table CSV")
    run_calibration(Path(source), overrides or [], out=out, as_json=as_json, plot=plot)


@app.command(cls=_with_settings(_plan_settings))
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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


@app.command(cls=_with_settings(_sweep_settings))
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
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


@app.command()
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
    typer.echo(f"trace: {export_trace(run, out or run / 'trace.json')}")


@app.command()
@exit_on_error
def control(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            help="status; pause (nothing new starts, nothing is lost); resume; stop (finish the "
            "step, save, end); eta=4 (another staleness bound from now on).",
        ),
    ] = "status",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Look at a run that continues, pause or resume it, change eta, or stop it.

    Works from any process that can see and write the run folder. Exits with 1 if the run is not
    alive, or refuses.
    """
    from areal_lab.cli.control import run_control

    run_control(run, request, as_json=as_json)


@app.command()
@exit_on_error
def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the runs (run_dir).")
    ] = Path("runs"),
) -> None:
    """List the runs that are alive."""
    from areal_lab.cli.control import print_live_runs

    print_live_runs(folder)


@app.command()
@exit_on_error
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or latest.")] = "latest",
    *,
    parent: Annotated[
        Path, typer.Option("--in", metavar="FOLDER", help="Folder of the runs, for latest.")
    ] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
) -> None:
    """Watch a run: rewards, lags, speed, what its processes wait for, alarms.

    Follows a run folder as it grows; also shows one that has ended. Ctrl-C ends the view only.
    """
    from areal_lab.cli.watch import run_watch

    run_watch(run, parent, once=once)


@app.command()
def config() -> None:
    """List all training settings: type, default and meaning."""
    from areal_lab.config.reference import format_settings

    typer.echo(format_settings())


@app.command()
@exit_on_error
def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="a.b=c", help="Recipes over --config, and changed settings: dapo eta=2"
        ),
    ] = None,
    *,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also show where a run with this config would start its processes."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check the installation and suggest a fix for each problem."""
    from areal_lab.cli import doctor as checks

    if overrides and config is None:
        raise ValueError(
            f"{overrides[0]!r} overrides a setting, but there is no config; add --config FILE"
        )
    findings = checks.diagnose(checks.gather())
    plan = None
    if config is not None:
        require("areal-lab doctor --config", "train")
        from areal_lab.config.load import load_config, split_arguments

        recipes, changes = split_arguments(overrides or [])
        plan, problems = checks.explain_config(load_config([config, *recipes], changes))
        findings += problems
    formatted = checks.as_json if as_json else checks.as_table
    typer.echo(formatted(findings, plan))
    raise typer.Exit(checks.exit_code(findings))


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except MissingExtra as error:
        sys.exit(error_exit(str(error), WRONG_SETTINGS).exit_code)
    except BrokenPipeError:  # as in `areal-lab config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


def _sources(
    arguments: Sequence[str], preset: str | None, compare: tuple[str, str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files or presets to simulate, and the overrides.

    Raises:
        ValueError: none is given, or more than one without `--compare`.
    """
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
    """Refuse options that have no effect with `--against`.

    Raises:
        ValueError: in one line.
    """
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


if __name__ == "__main__":
    main()
