"""The `areal-lab` command: train, simulate, inspect runs, check the installation.

Exit codes: 0 success, 1 the run failed, 2 wrong settings or command line, 130 Ctrl-C.
Each command imports its modules when it runs, so `--help` is fast.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from areal_lab.cli import engine as engine_command
from areal_lab.cli import environment as environment_command
from areal_lab.cli import simulations
from areal_lab.cli.command import command_class, schema
from areal_lab.cli.outputs import (
    FAILED,
    WRONG_SETTINGS,
    error_exit,
    exit_on_error,
    failures_reported,
)
from areal_lab.config.shipped import training_configs
from areal_lab.extras import MissingExtra, require
from areal_lab.host.terminal import INTERRUPTED

app = typer.Typer(
    name="areal-lab",
    help="Asynchronous reinforcement learning for language models, after AReaL (arXiv:2505.24298).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(engine_command.app, name="engine")
app.add_typer(environment_command.app, name="environment")

_A_CONFIG = f"YAML file, or a shipped config: {', '.join(training_configs())}."


_Continued = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue this run from its newest checkpoint, in its folder, instead of CONFIG.",
    ),
]
_TRAIN: Final = schema("areal_lab.config.schema:TrainConfig", "areal_lab.config.load:ALIASES")
_OFFLINE_NAMES: Final = "areal_lab.config.offline:ALIASES"
_GATEWAY: Final = schema(
    "areal_lab.config.serving:GatewayConfig", "areal_lab.config.serving:GATEWAY_ALIASES"
)
_DEPLOY: Final = schema(
    "areal_lab.cluster.deploy.request:DeployConfig", "areal_lab.cluster.deploy.request:ALIASES"
)


@app.command(cls=command_class(_TRAIN))
@exit_on_error
def train(
    config: _Config = "",
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE a.b=c",
            help="Recipes and files that go over it (dapo), and settings that override them: eta=0 "
            "seed=2",
        ),
    ] = None,
    *,
    resume: _Continued = None,
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

    arguments = [*([config] if config else []), *(overrides or [])]
    with failures_reported():
        code = run_train(arguments, resume=resume, restarts=restart)
    raise typer.Exit(code)


@app.command(cls=command_class(_TRAIN))
@exit_on_error
def distill(
    config: _Config,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE a.b=c",
            help="Recipes and files that go over it, and settings that override them; one of them "
            "is teacher.path=MODEL",
        ),
    ] = None,
) -> None:
    """Train a model on its own samples to imitate a teacher: `train` with the recipe distill.

    The last line of the output is the run folder. `areal-lab train --resume RUN` continues it.
    """
    require("areal-lab distill", "train")
    from areal_lab.cli.train import run_distill

    with failures_reported():
        code = run_distill([config, *(overrides or [])])
    raise typer.Exit(code)


_Config = Annotated[str, typer.Argument(metavar="CONFIG", help=_A_CONFIG)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder or name, RUN, or RUN/best.")
]
_Offline = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG a.b=c",
        help="YAML files or shipped configs, each over those before it, and settings that override "
        "them: dataset.path=rows.jsonl actor.path=MODEL",
    ),
]


@app.command(cls=command_class(schema("areal_lab.config.offline:SFTConfig", _OFFLINE_NAMES)))
@exit_on_error
def sft(arguments: _Offline = None, *, resume: _Continued = None) -> None:
    """Fine-tune a model on demonstrations.

    A shipped config is sft_adder. The last line of the output is the run folder.
    """
    _offline("sft", arguments, resume)


@app.command(
    cls=command_class(schema("areal_lab.config.offline:RewardModelConfig", _OFFLINE_NAMES))
)
@exit_on_error
def rm(arguments: _Offline = None, *, resume: _Continued = None) -> None:
    """Train a reward model on pairs of a chosen and a rejected response.

    A shipped config is rm_adder. The last line of the output is the run folder, whose `model` is
    for `reward.kwargs.path` and `critic.path` of `areal-lab train`.
    """
    _offline("rm", arguments, resume)


@app.command(cls=command_class(schema("areal_lab.config.offline:DPOConfig", _OFFLINE_NAMES)))
@exit_on_error
def dpo(arguments: _Offline = None, *, resume: _Continued = None) -> None:
    """Train a policy on pairs of a chosen and a rejected response (DPO, IPO).

    A shipped config is dpo_adder. The last line of the output is the run folder.
    """
    _offline("dpo", arguments, resume)


def _offline(command: str, arguments: Sequence[str] | None, resume: Path | None) -> None:
    require(f"areal-lab {command}", "train")
    from areal_lab.cli.train import run_offline

    with failures_reported():
        code = run_offline(command, arguments or [], resume=resume)
    raise typer.Exit(code)


@app.command("eval", cls=command_class(_TRAIN))
@exit_on_error
def evaluate(
    model: _Model,
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
    as_json: _Json = False,
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


@app.command(cls=command_class(_TRAIN, _GATEWAY))
@exit_on_error
def gateway(
    ctx: typer.Context,
    model: _Model,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG a.b=c",
            help="A config, such as RUN/config.yaml, and settings that override it: "
            "rollout.backend=sglang rollout.engines=2, or 'rollout.addresses=[\"http://...\"]' for "
            "servers that run already; of gconfig and rollout. Without a config "
            "gconfig.max_new_tokens is 1024. Options may be given as settings, too: port=30100.",
        ),
    ] = None,
) -> None:
    """Serve a model to agents: OpenAI's and Anthropic's protocols, and sessions with rewards.

    Runs until Ctrl-C. Each session has a separate key, which the admin key starts. Tokens are kept
    as they were sampled, with log-probs, and exported over HTTP or into a file.
    """
    require("areal-lab gateway", "train")
    from areal_lab.cli.gateway import run_gateway

    run_gateway(model, arguments or [], ctx.obj)


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


@app.command(cls=command_class(None, _DEPLOY))
@exit_on_error
def deploy(
    ctx: typer.Context,
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="docker, compose, rayjob, job, skypilot or slurm."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG a.b=c",
            help="As of `areal-lab train`: a config, recipes, changed settings. Options may be "
            "given as settings, too: nodes=2 out=there.",
        ),
    ] = None,
) -> None:
    """Write the files that start a run in containers, on Kubernetes, in a cloud or with Slurm.

    The files have the settings of the run, and no secrets. Prints what each is for, and the
    commands to run next.
    """
    require("areal-lab deploy", "train")
    from areal_lab.cli.deploy import run_deploy

    run_deploy(kind, arguments or [], ctx.obj)


for _command, _settings in simulations.COMMANDS:
    app.command(cls=command_class(_settings))(_command)


@app.command("import")
@exit_on_error
def import_logs(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG...",
            help="Logs of one run of another framework: console text, also pasted or compressed; "
            "metric files; - reads standard input. With --advise also settings of `simulate`: "
            "gpus=16xH100 model=Qwen/Qwen3-4B",
        ),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a run folder, for `trace` and notebooks."),
    ] = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise",
            help="Simulate what other schedules would give on the same GPUs, and say what to "
            "change first.",
        ),
    ] = False,
    framework: Annotated[
        str,
        typer.Option(metavar="NAME", help="Framework of the logs; the default recognizes it."),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object as the last line.")
    ] = False,
) -> None:
    """Read logs of another framework: steps, times, lengths, rewards, and what is missing.

    Reads verl, TRL, unsloth, ms-swift, verifiers, prime-rl, slime, Miles, NeMo-RL, OpenRLHF, SkyRL,
    AReaL, ROLL, Megatron-RL and tinker-cookbook. Nothing in a log is executed.
    """
    from areal_lab.cli.import_logs import run_import

    raise typer.Exit(run_import(logs, framework=framework, as_json=as_json, out=out, advise=advise))


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
    """Show the status of a running training, pause or resume it, change eta, or stop it.

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
    """List running trainings."""
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
    """Watch a run: rewards, lags, speed, idle processes and their reasons, alarms.

    Follows a run folder as it grows; also shows one that has ended. Ctrl-C ends the view only.
    """
    from areal_lab.cli.control import run_watch

    run_watch(run, parent, once=once)


@app.command()
@exit_on_error
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders, two or more.")
    ],
    *,
    as_json: _Json = False,
) -> None:
    """Compare runs: rewards, speed, lag and drift side by side, and the settings that differ."""
    from areal_lab.cli.control import run_compare

    run_compare(runs, as_json=as_json)


@app.command()
def config() -> None:
    """List all training settings: type, default and meaning."""
    from areal_lab.config.dump import format_settings

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
    as_json: _Json = False,
) -> None:
    """Check the installation and suggest a fix for each problem."""
    from areal_lab.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(config, overrides or [], in_json=as_json))


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


if __name__ == "__main__":
    main()
