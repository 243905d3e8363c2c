"""`areal-lab deploy`: files that start a run elsewhere, from the same config as the run.

config, options --request_of--> Request --deployment_files--> files, the commands to run next
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import typer

from areal_lab.cli.command import flag_of, read_options
from areal_lab.cli.outputs import folder_to_write
from areal_lab.cluster.deploy.contents import (
    WORK,
    check_contents,
    expected_files,
    extras_of,
    own_modules,
    packaged_models_of,
    parse_mount,
    secrets_of,
)
from areal_lab.cluster.deploy.files import write_files
from areal_lab.cluster.deploy.kinds import DeployKind, deployment_files, next_commands
from areal_lab.cluster.deploy.request import (
    ALIASES,
    CONFIG_FILE,
    START_TIMEOUT_S,
    DeployConfig,
    Request,
    job_name,
)
from areal_lab.cluster.deploy.shape import PORT, shape_for
from areal_lab.config.dump import to_yaml
from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.problem import refusal
from areal_lab.config.record import given_settings
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import training_configs
from areal_lab.config.unknown import nearest
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.host.terminal import printable
from areal_lab.resolve.needs import asks_for_gpus, needs_of

_BELOW: Final = {
    "container": f"{WORK}: add it in a Dockerfile of yours, or give --mount",
    "synced": "the current folder",
    "shared": "the current folder",
}


_ANYWHERE: Final = {
    "scheduler.type": "local",
    "cluster.n_nodes": 1,
    "cluster.n_gpus_per_node": 0,
    "cluster.port": 0,
}
"""Settings of the location of a run, which command lines set instead of the config."""


def run_deploy(kind: str, arguments: Sequence[str], flags: Mapping[str, Any]) -> None:
    """Write the files of one kind and print the purpose of each.

    `arguments` are those of `areal-lab train`, and settings of `DeployConfig`; `flags` are more of
    these. Problems are reported before anything is written.
    """
    if kind not in list(DeployKind):
        hint = nearest(kind, list(DeployKind))
        raise ValueError(f"KIND is {kind!r}, but must be one of {', '.join(DeployKind)}{hint}")
    options, arguments = read_options(DeployConfig, ALIASES, arguments, flags)
    configs, changes = split_arguments(arguments)
    if not configs:
        known = ", ".join(training_configs())
        raise refusal("CONFIG", f"give a CONFIG ({known}, or a file) after {kind}")
    config, kind = load_config(configs, changes), DeployKind(kind)
    request = request_of(kind, config, options, [kind, *arguments, *_given(options)])
    files = deployment_files(kind, request)
    out = folder_to_write("--out", Path(options.out))
    done = write_files(out, files, force=options.force)
    for file in files:
        typer.echo(printable(f"{done[file.name]:>9}  {out / file.name}  {file.purpose}"))
    for note in notes_of(kind, config, request):
        typer.echo(printable(f"note: {note}"))
    typer.echo("next:")
    for command in next_commands(kind, request, printable(str(out))):
        typer.echo(printable(f"    {command}"))


def request_of(
    kind: DeployKind, config: TrainConfig, options: DeployConfig, arguments: Sequence[str] = ()
) -> Request:
    """Input of the files of a config."""
    mounts = [parse_mount(one) for one in options.mounts]
    check_contents(config, mounts, kind.reads)
    nodes, gpus_per_node, port = _asked_shape(config, options)
    gpu = asks_for_gpus(config) if gpus_per_node is None else gpus_per_node > 0
    needs = needs_of(config, gpu=gpu)
    shape = shape_for(needs, nodes=nodes, gpus_per_node=gpus_per_node, port=port)
    build: Literal["cpu", "gpu"] = "gpu" if gpu else "cpu"
    config_path = os.path.relpath(Path(options.out) / CONFIG_FILE)
    if kind is DeployKind.SKYPILOT and config_path.startswith(".."):
        raise ValueError(
            f"--out is {options.out}, but only the current folder is copied to the machines; give "
            "a folder below it"
        )
    started = needs.servers and BACKENDS[needs.backend].own_environment
    complete = {
        "name": options.name or job_name(config.experiment_name),
        "image": options.image or f"areal-lab:{version('areal_lab')}-{build}",
        "secrets": list(dict.fromkeys([*secrets_of(config), *options.secrets])),
    }
    return Request(
        options=options.with_settings(complete),
        config=to_yaml(config.with_settings(_ANYWHERE)),
        config_path=config_path,
        shape=shape,
        needs=needs,
        build=build,
        mounts=mounts,
        extras=extras_of(config),
        packages=packaged_models_of(config),
        engine=needs.backend if started else "",
        start_timeout_s=max(START_TIMEOUT_S, math.ceil(config.scheduler.start_timeout_s)),
        arguments=arguments,
    )


def _asked_shape(config: TrainConfig, options: DeployConfig) -> tuple[int | None, int | None, int]:
    """Machines, GPUs of each and port: from the options, else from the config."""
    cluster = config.cluster
    nodes = options.nodes or (cluster.n_nodes if cluster.n_nodes > 1 else None)
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = cluster.n_gpus_per_node or None
    return nodes, gpus, options.port or cluster.port or PORT


def _given(options: DeployConfig) -> list[str]:
    """Options that differ from their defaults, as flags."""
    words: list[str] = []
    for one in given_settings(options):
        if one.name == "force":
            continue
        value, flag = getattr(options, one.name), flag_of(one.name, ALIASES)
        for each in value if isinstance(value, list) else [value]:
            words += [flag] if each is True else [flag, str(each)]
    return words


def notes_of(kind: DeployKind, config: TrainConfig, request: Request) -> list[str]:
    """Further steps for the user."""
    machine, needs = request.machine, request.needs
    each = f"{machine.cpus} cores, {machine.memory_gib} GiB of memory"
    if machine.gpus:
        each += f", {machine.gpus} GPU(s)"
    notes = []
    if kind is not DeployKind.DOCKER:
        notes.append(f"{request.shape.n_nodes} machine(s) of {each}")
        if needs.guess and request.options.memory_gib is None:
            notes.append(f"this memory is a guess, since {needs.guess}; give --memory GIB")
    reads = kind.reads
    in_image = "the image" if reads == "container" else "the machines"
    for setting, module in own_modules(config):
        notes.append(f"{setting} is in {module}, which {in_image} must have")
    for setting, text in expected_files(config, request.mounts):
        notes.append(f"{setting} is {text}, which {in_image} must have below {_BELOW[reads]}")
    if kind is DeployKind.RAYJOB:
        notes.append("the image must have Ray: areal-lab deploy docker CONFIG --with-ray")
    if kind is DeployKind.SLURM:
        notes.append("the config, models and run_dir must lie where all nodes see them")
    if kind in (DeployKind.JOB, DeployKind.RAYJOB):
        notes.append("give --image REGISTRY/NAME:TAG unless nodes have the image already")
    return notes
