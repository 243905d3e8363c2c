"""Input of the deployment files: the options of the command, and values derived from them.

DeployConfig + TrainConfig --cli.deploy.request_of--> Request, whose names are checked
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Le
from pydantic import Field

from areal_lab.cluster.deploy.contents import Mount
from areal_lab.cluster.deploy.files import comments
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
from areal_lab.config.record import About, Count, FolderPath, Record, Whole

CONFIG_PATH: Final = "/etc/areal_lab/config.yaml"
"""The config in a container."""
CONFIG_FILE: Final = "config.yaml"
START_TIMEOUT_S: Final = 1800
"""Machines of a cluster start at different times: some pull the image or are rented first."""
Build = Literal["cpu", "gpu"]
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_NAME: Final = 40
"""KubeRay appends up to 23 characters to the name of a RayJob, and a label has at most 63."""
_IMAGE: Final = re.compile(
    r"(?:[a-zA-Z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
    r"(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ACCELERATOR: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_BUCKETS: Final = ("s3://", "gs://", "r2://", "https://", "cos://", "oci://")
ALIASES: Final = {
    "mount": "mounts",
    "secret": "secrets",
    "memory": "memory_gib",
    "time": "time_h",
}
"""Option names that differ from those of the settings."""


class DeployConfig(Record):
    """Machines, names and files of a deployment; null computes a number from the run's settings."""

    nodes: Count | None = None
    """Number of machines, including the controller's; the default is the fewest that hold the
    run."""
    gpus_per_node: Whole | None = None
    """GPUs of each machine; the default is as many as are needed, at most 8; 0 is CPU only."""
    port: Annotated[int, Ge(1), Le(65535)] | None = None
    """Port of the controller for the other machines; the default is cluster.port, or 6380."""
    image: Annotated[str, About(metavar="REGISTRY/NAME:TAG")] = ""
    """Image of the containers."""
    name: str = ""
    """Name of the job; the default is derived from experiment_name."""
    mounts: list[Annotated[str, About(metavar="SOURCE:/PATH")]] = Field(default_factory=list)
    """Files to appear at a path, read-only: a claim (rayjob, job), a folder or volume (compose),
    a folder or bucket (skypilot). May be repeated."""
    secrets: list[Annotated[str, About(metavar="VARIABLE")]] = Field(default_factory=list)
    """Environment variable to pass on as a secret, such as HF_TOKEN. May be repeated."""
    gpu: str = "H100"
    """Kind of GPU (skypilot)."""
    cpus: Count | None = None
    """Cores of each machine, instead of the computed ones."""
    memory_gib: Annotated[Count, About(unit="GiB", metavar="GIB")] | None = None
    """Memory of each machine, instead of the computed one."""
    time_h: Annotated[Count, About(metavar="HOURS")] = 24
    """Time limit of the job (slurm)."""
    with_ray: bool = False
    """Install Ray in the image (docker), for rayjob."""
    out: Annotated[FolderPath, About(metavar="FOLDER")] = "deploy"
    """Output folder."""
    force: bool = False
    """Also replace edited files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run to deploy."""

    options: DeployConfig
    """Options with the name, the image and all secrets filled in."""
    config: str
    """Resolved settings in YAML, without those of the location of the run."""
    config_path: str = CONFIG_FILE
    """Path of that file from the folder in which commands are run."""
    shape: Shape
    needs: Needs
    build: Build = "cpu"
    mounts: Sequence[Mount] = ()
    extras: Sequence[str] = ("train",)
    """Extras of the package that the image has."""
    packages: Sequence[str] = ()
    """Requirements of packages that only contain files: models."""
    engine: str = ""
    """Engine with a separate environment; empty for the embedded one."""
    start_timeout_s: int = START_TIMEOUT_S
    """Longest wait of the controller and the other machines for each other."""
    arguments: Sequence[str] = ()
    """Arguments of `areal-lab deploy`, for the file headers."""

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
        if not _ACCELERATOR.fullmatch(self.options.gpu):
            raise ValueError(f"--gpu is {self.options.gpu!r}, but must be a name such as H100")
        for one in self.secrets:
            if not _VARIABLE.fullmatch(one):
                raise ValueError(
                    f"--secret is {one!r}, but must be the name of an environment variable, "
                    "without its value"
                )

    @property
    def name(self) -> str:
        """Name of the job and of everything that belongs to it: a DNS label."""
        return self.options.name

    @property
    def image(self) -> str:
        """Image of the containers."""
        return self.options.image

    @property
    def secrets(self) -> Sequence[str]:
        """Environment variables with further secrets."""
        return self.options.secrets

    @property
    def secret_name(self) -> str:
        """Secret of Kubernetes with the token and other keys; the user creates it, no file does."""
        return f"{self.name}-secrets"

    @property
    def requirement(self) -> str:
        """Requirement that `pip` installs in a checkout."""
        return f".[{','.join(self.extras)}]"

    @property
    def groups(self) -> Sequence[Group]:
        """Machines by role."""
        return groups(self.needs, self.shape)

    @property
    def machine(self) -> Machine:
        """One size for all machines."""
        sizes = self.options
        return largest(
            [
                machine_of(self.needs, group, cpus=sizes.cpus, memory_gib=sizes.memory_gib)
                for group in self.groups
            ]
        )

    @property
    def ray_resources(self) -> str:
        """Named resources that each node offers to Ray, as JSON."""
        return json.dumps({k: v for group in self.groups for k, v in group.resources.items()})

    @property
    def file_mounts(self) -> Mapping[str, Any]:
        """Mounts of SkyPilot by path; a bucket is mounted, a folder is copied."""
        return {
            str(one.path): {"source": one.source, "mode": "MOUNT"}
            if one.source.startswith(_BUCKETS)
            else one.source
            for one in self.mounts
        }

    @property
    def token(self) -> bool:
        """True if machines must authenticate to each other."""
        return self.shape.n_nodes > 1

    @property
    def variables(self) -> list[str]:
        """Environment variables that are secrets."""
        return list(dict.fromkeys([*([TOKEN_VARIABLE] if self.token else []), *self.secrets]))

    def train_command(self, config: str, scheduler: str) -> list[str]:
        """Command line of the controller.

        `config` is the path of the config on the controller, `scheduler` the value of
        `scheduler.type`; one machine needs no scheduler.
        """
        shape, command = self.shape, ["areal-lab", "train", config]
        if scheduler != "ray" and shape.n_nodes == 1:
            return command
        command += [
            f"scheduler.type={scheduler}",
            f"cluster.n_nodes={shape.n_nodes}",
            f"cluster.n_gpus_per_node={shape.n_gpus_per_node}",
            f"scheduler.start_timeout_s={self.start_timeout_s}",
        ]
        return command if scheduler != "manual" else [*command, f"cluster.port={shape.port}"]

    def host_command(self, controller: str) -> list[str]:
        """Command line of every other machine; `controller` is the controller's name or address."""
        wait, address = str(self.start_timeout_s), f"{controller}:{self.shape.port}"
        return ["areal-lab", "host", "--join-s", wait, "--join", address]

    def head(self, purpose: str) -> str:
        """First lines of every file, as comments, without a line break at the end."""
        command = shlex.join(["areal-lab", "deploy", *self.arguments])
        lines = [purpose, f"Written by: {command}"] if self.arguments else [purpose]
        plain = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
        return comments(plain).rstrip("\n")


def job_name(text: str) -> str:
    """Valid name derived from an experiment's: `My Run_1` becomes `my-run-1`."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower())
    return re.sub(r"^[^a-z]+", "", plain)[:_LONGEST_NAME].strip("-") or "run"
