"""What deployment files are written from: one record, whose names are checked when it is made."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from areal_lab.cluster.deploy.contents import Mount
from areal_lab.cluster.deploy.shape import (
    Group,
    Machine,
    Needs,
    Shape,
    groups,
    largest,
    machine_of,
)
from areal_lab.cluster.records import TOKEN_VARIABLE

CONFIG_PATH: Final = "/etc/areal_lab/config.yaml"
"""The config in a container."""
CONFIG_FILE: Final = "config.yaml"
RAY_VERSION: Final = "2.60.0"
START_TIMEOUT_S: Final = 1800
"""Machines of a cluster start at different times: some load the image or are rented first."""
Build = Literal["cpu", "gpu"]
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_NAME: Final = 40
"""KubeRay puts up to 23 characters behind the name of a RayJob, and a label has at most 63."""
_IMAGE: Final = re.compile(
    r"(?:[a-zA-Z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ACCELERATOR: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run to be deployed."""

    name: str
    """Of the job and of everything that belongs to it: a DNS label."""
    config: str
    """The resolved settings, in YAML, without where the run takes place."""
    config_path: str = CONFIG_FILE
    """Path of that file from the folder in which commands are run."""
    shape: Shape
    needs: Needs
    image: str
    build: Build = "cpu"
    mounts: Sequence[Mount] = ()
    secrets: Sequence[str] = ()
    """Environment variables with further secrets."""
    extras: Sequence[str] = ("train",)
    """Extras of the package that the image has."""
    packages: Sequence[str] = ()
    """Requirements whose packages only bring files: models."""
    engine: str = ""
    """Engine with an environment of its own; empty for the embedded one."""
    with_ray: bool = False
    """Whether the image has Ray."""
    accelerator: str = "H100"
    """Kind of GPU, where a cloud has to be told."""
    time_h: int = 24
    """Longest time of the job, where a scheduler has to be told."""
    start_timeout_s: int = START_TIMEOUT_S
    """Longest wait of the controller and the others for each other."""
    cpus: int | None = None
    memory_gib: int | None = None
    """Of each machine, in place of the computed ones."""
    arguments: Sequence[str] = ()
    """What followed `areal-lab deploy`, for the heads of the files."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            raise ValueError(
                f"--name is {self.name!r}, but must be lower-case letters, digits and '-', begin "
                f"with a letter and have at most {_LONGEST_NAME} characters, as in my-run"
            )
        if not _IMAGE.fullmatch(self.image):
            raise ValueError(
                f"--image is {self.image!r}, but must be REGISTRY/NAME:TAG, in lower case but for "
                "the tag"
            )
        if not _ACCELERATOR.fullmatch(self.accelerator):
            raise ValueError(f"--gpu is {self.accelerator!r}, but must be a name such as H100")
        for one in self.secrets:
            if not _VARIABLE.fullmatch(one):
                raise ValueError(
                    f"--secret is {one!r}, but must be the name of an environment variable, "
                    "without its value"
                )
        if (self.cpus or 1) < 1 or (self.memory_gib or 1) < 1 or self.time_h < 1:
            raise ValueError("need --cpus, --memory and --time of at least 1")

    @property
    def groups(self) -> Sequence[Group]:
        """Machines by role."""
        return groups(self.needs, self.shape)

    @property
    def machine(self) -> Machine:
        """One size for all machines."""
        return largest([self.machine_of(group) for group in self.groups])

    def machine_of(self, group: Group) -> Machine:
        """Size of the machines of one role."""
        return machine_of(self.needs, group, cpus=self.cpus, memory_gib=self.memory_gib)

    @property
    def token(self) -> bool:
        """Whether machines have to know each other."""
        return self.shape.n_nodes > 1

    @property
    def variables(self) -> list[str]:
        """Environment variables that are secrets."""
        return list(dict.fromkeys([*([TOKEN_VARIABLE] if self.token else []), *self.secrets]))


def train_command(request: Request, config: str, scheduler: str) -> list[str]:
    """The controller's command line.

    Args:
        config: path of the config, as the controller sees it.
        scheduler: value of `scheduler.type`; on one machine there is nothing to schedule.
    """
    shape, command = request.shape, ["areal-lab", "train", config]
    if scheduler != "ray" and shape.n_nodes == 1:
        return command
    command += [
        f"scheduler.type={scheduler}",
        f"cluster.n_nodes={shape.n_nodes}",
        f"cluster.n_gpus_per_node={shape.n_gpus_per_node}",
        f"scheduler.start_timeout_s={request.start_timeout_s}",
    ]
    return command if scheduler != "manual" else [*command, f"cluster.port={shape.port}"]


def host_command(controller: str, request: Request) -> list[str]:
    """The command line of every other machine.

    Args:
        controller: name or address of the controller's machine.
    """
    wait = str(request.start_timeout_s)
    return ["areal-lab", "host", "--join-s", wait, "--join", f"{controller}:{request.shape.port}"]


def export_commands(request: Request) -> list[str]:
    """Commands that put secrets into the environment; that of the token makes a new one."""
    made = f'export {TOKEN_VARIABLE}="$(openssl rand -hex 32)"'
    return [made if one == TOKEN_VARIABLE else f"export {one}=..." for one in request.variables]


def job_name(text: str) -> str:
    """A valid name made from an experiment's: `My Run_1` becomes `my-run-1`."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return re.sub(r"^[^a-z]+", "", plain)[:_LONGEST_NAME].strip("-") or "run"


def head_of(request: Request, purpose: str) -> list[str]:
    """The first lines of every file, without comment marks."""
    command = shlex.join(["areal-lab", "deploy", *request.arguments])
    lines = [purpose, f"Written by: {command}"] if request.arguments else [purpose]
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
