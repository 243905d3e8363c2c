"""`areal-lab deploy`: files that start a run elsewhere, from the same config as the run.

config, options --request--> Request --_KINDS[kind]--> files, the commands to run next
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Final

import typer

from areal_lab.cli.outputs import folder_to_write
from areal_lab.cluster.deploy import compose, docker, job, rayjob, skypilot, slurm
from areal_lab.cluster.deploy.contents import (
    WORK,
    Files,
    check_contents,
    expected_files,
    extras_of,
    own_modules,
    packaged_models_of,
    parse_mount,
    secrets_of,
)
from areal_lab.cluster.deploy.files import File, comments, write_files
from areal_lab.cluster.deploy.request import CONFIG_FILE, START_TIMEOUT_S, Build, Request, job_name
from areal_lab.cluster.deploy.shape import PORT, shape_for
from areal_lab.config.dump import to_yaml
from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.problem import refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import training_configs
from areal_lab.config.suggest import nearest
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.host.terminal import printable
from areal_lab.preflight.needs import asks_for_gpus, needs_of


class DeployKind(StrEnum):
    """What starts the run."""

    DOCKER = "docker"
    COMPOSE = "compose"
    RAYJOB = "rayjob"
    JOB = "job"
    SKYPILOT = "skypilot"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """Options of the command; None computes a number from the config."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    port: int | None = None
    image: str = ""
    name: str = ""
    mounts: Sequence[str] = ()
    secrets: Sequence[str] = ()
    gpu: str = "H100"
    cpus: int | None = None
    memory_gib: int | None = None
    time_h: int = 24
    with_ray: bool = False
    out: Path = Path("deploy")
    force: bool = False


@dataclass(frozen=True, slots=True)
class _Kind:
    """How files of one kind are made."""

    files: Callable[[Request], list[File]]
    commands: Callable[[Request, str], list[str]]
    reads: Files


_KINDS: Final = {
    DeployKind.DOCKER: _Kind(
        docker.docker_files, lambda one, out: [docker.build_command(one, out)], "container"
    ),
    DeployKind.COMPOSE: _Kind(
        lambda one: [File("compose.yaml", compose.compose_file(one), "the containers of a run")],
        compose.compose_commands,
        "container",
    ),
    DeployKind.RAYJOB: _Kind(rayjob.rayjob_files, rayjob.rayjob_commands, "container"),
    DeployKind.JOB: _Kind(job.job_files, job.job_commands, "container"),
    DeployKind.SKYPILOT: _Kind(
        lambda one: [File("sky.yaml", skypilot.skypilot_file(one), "a task of SkyPilot")],
        skypilot.skypilot_commands,
        "synced",
    ),
    DeployKind.SLURM: _Kind(slurm.slurm_files, slurm.slurm_commands, "shared"),
}


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
"""Settings of where a run takes place, which command lines have instead of the config."""


def run_deploy(kind: str, arguments: Sequence[str], options: DeployOptions) -> None:
    """Write the files of one kind and print what they are for.

    Raises:
        ValueError: one line per problem of the config or the options, before anything is written.
        OSError: the folder cannot be written.
    """
    if kind not in list(DeployKind):
        hint = nearest(kind, list(DeployKind))
        raise ValueError(f"KIND is {kind!r}, but must be one of {', '.join(DeployKind)}{hint}")
    configs, changes = split_arguments(arguments)
    if not configs:
        known = ", ".join(training_configs())
        raise refusal("CONFIG", f"give a CONFIG ({known}, or a file) after {kind}")
    config, kind = load_config(configs, changes), DeployKind(kind)
    request = request_of(kind, config, options, [kind, *arguments, *_given(options)])
    files = deployment_files(kind, request)
    out = folder_to_write("--out", options.out)
    done = write_files(out, files, force=options.force)
    for file in files:
        typer.echo(printable(f"{done[file.name]:>9}  {out / file.name}  {file.purpose}"))
    for note in notes_of(kind, config, request):
        typer.echo(printable(f"note: {note}"))
    typer.echo("next:")
    for command in _KINDS[kind].commands(request, str(out)):
        typer.echo(printable(f"    {command}"))


def request_of(
    kind: DeployKind, config: TrainConfig, options: DeployOptions, arguments: Sequence[str] = ()
) -> Request:
    """What the files of a config are written from.

    Raises:
        ValueError: one line per problem.
    """
    mounts = [parse_mount(one) for one in options.mounts]
    check_contents(config, mounts, _KINDS[kind].reads)
    nodes, gpus_per_node, port = _asked_shape(config, options)
    gpu = asks_for_gpus(config) if gpus_per_node is None else gpus_per_node > 0
    needs = needs_of(config, gpu=gpu)
    shape = shape_for(needs, nodes=nodes, gpus_per_node=gpus_per_node, port=port)
    build: Build = "gpu" if gpu else "cpu"
    config_path = os.path.relpath(options.out / CONFIG_FILE)
    if kind is DeployKind.SKYPILOT and config_path.startswith(".."):
        raise ValueError(
            f"--out is {options.out}, but only the current folder is copied to the machines; give "
            "a folder below it"
        )
    started = needs.servers and BACKENDS[needs.backend].own_environment
    return Request(
        name=options.name or job_name(config.experiment_name),
        config=to_yaml(config.with_settings(_ANYWHERE)),
        config_path=config_path,
        shape=shape,
        needs=needs,
        image=options.image or f"areal-lab:{version('areal_lab')}-{build}",
        build=build,
        mounts=mounts,
        secrets=list(dict.fromkeys([*secrets_of(config), *options.secrets])),
        extras=extras_of(config),
        packages=packaged_models_of(config),
        engine=needs.backend if started else "",
        with_ray=options.with_ray,
        accelerator=options.gpu,
        time_h=options.time_h,
        start_timeout_s=max(START_TIMEOUT_S, math.ceil(config.scheduler.start_timeout_s)),
        cpus=options.cpus,
        memory_gib=options.memory_gib,
        arguments=arguments,
    )


def _asked_shape(config: TrainConfig, options: DeployOptions) -> tuple[int | None, int | None, int]:
    """Machines, GPUs of each and port: by the options, else by the config where it names them."""
    cluster = config.cluster
    nodes = options.nodes or (cluster.n_nodes if cluster.n_nodes > 1 else None)
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = cluster.n_gpus_per_node or None
    return nodes, gpus, options.port or cluster.port or PORT


def _given(options: DeployOptions) -> list[str]:
    """Options of the command line that differ from their defaults."""
    names = {"mounts": "mount", "secrets": "secret", "memory_gib": "memory", "time_h": "time"}
    words: list[str] = []
    for one in fields(options):
        value = getattr(options, one.name)
        if value == one.default or one.name == "force":
            continue
        option = f"--{names.get(one.name, one.name).replace('_', '-')}"
        values = value if isinstance(value, list | tuple) else [value]
        words += [
            word for each in values for word in (option, *([] if each is True else [str(each)]))
        ]
    return words


def deployment_files(kind: DeployKind, request: Request) -> list[File]:
    """The files of one kind; where they need the config beside them, with it."""
    files = _KINDS[kind].files(request)
    if kind in (DeployKind.COMPOSE, DeployKind.SKYPILOT, DeployKind.SLURM):
        head = comments(["Settings of the run that differ from the defaults."])
        files.insert(0, File(CONFIG_FILE, head + request.config, "the settings of the run"))
    return files


def notes_of(kind: DeployKind, config: TrainConfig, request: Request) -> list[str]:
    """What the user has to know or to do besides."""
    machine, needs = request.machine, request.needs
    each = f"{machine.cpus} cores, {machine.memory_gib} GiB of memory"
    if machine.gpus:
        each += f", {machine.gpus} GPU(s)"
    notes = []
    if kind is not DeployKind.DOCKER:
        notes.append(f"{request.shape.n_nodes} machine(s) of {each}")
        if needs.guess and request.memory_gib is None:
            notes.append(f"this memory is a guess, since {needs.guess}; give --memory GIB")
    reads = _KINDS[kind].reads
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
