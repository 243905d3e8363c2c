"""Files of each kind of deployment, rendered from `templates`, and the commands to run next.

    Request --templates/NAME.jinja--> File of one format; commands.jinja --> lines for the terminal

Templates contain YAML directly. The filter `yaml` quotes a value that some parser would not read as
a string; the filter `shell` quotes words of a command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from areal_lab.cluster.deploy.contents import RUNS, WORK, Files
from areal_lab.cluster.deploy.files import File, comments, read_yaml_text, yaml_text
from areal_lab.cluster.deploy.request import CONFIG_FILE, CONFIG_PATH, Request
from areal_lab.cluster.deploy.shape import Machine
from areal_lab.cluster.records import TOKEN_VARIABLE

if TYPE_CHECKING:
    from jinja2 import Environment


class DeployKind(StrEnum):
    """Program that starts the run."""

    DOCKER = "docker"
    COMPOSE = "compose"
    RAYJOB = "rayjob"
    JOB = "job"
    SKYPILOT = "skypilot"
    SLURM = "slurm"

    @property
    def reads(self) -> Files:
        """Files of this machine that the run sees."""
        others: Mapping[DeployKind, Files] = {self.SKYPILOT: "synced", self.SLURM: "shared"}
        return others.get(self, "container")


_CONSTANTS: Final = {
    "CONFIG_FILE": CONFIG_FILE,
    "CONFIG_PATH": CONFIG_PATH,
    "HEAD": Machine(cpus=2, memory_gib=6, shared_gib=1),
    "RAY_VERSION": "2.60.0",
    "RUNS": RUNS,
    "RUN_FAILED": 42,
    "TOKEN_KEY": "auth_token",
    "TOKEN_VARIABLE": TOKEN_VARIABLE,
    "USER_ID": 10001,
    "WORK": WORK,
}
"""Names in the templates.

`HEAD` is Ray's head: its own processes take 1.3 GB, the driver is the controller. `RUN_FAILED` is
the exit code of a controller whose run did not end well, whatever its own code was. `TOKEN_KEY` is
the token's key in the Secret, under which KubeRay reads it. `USER_ID` is the user of containers,
above those that base images have."""


def deployment_files(kind: DeployKind, request: Request) -> list[File]:
    """Files of one kind; including the config where they need it."""

    def made(name: str, purpose: str, template: str = "", **values: Any) -> File:
        found = _templates().get_template(f"{template or name}.jinja")
        return File(name, found.render(run=request, **values), purpose)

    head = comments(["Settings of the run that differ from the defaults."])
    config = File(CONFIG_FILE, head + request.config, "the settings of the run")
    match kind:
        case DeployKind.DOCKER:
            images = [
                made(f"Dockerfile.{one}", f"the image for {one.upper()}s", "Dockerfile", build=one)
                for one in ("cpu", "gpu")
            ]
            built_from = "what the image is built from"
            return images + [
                made(f"{one.name}.dockerignore", built_from, "dockerignore") for one in images
            ]
        case DeployKind.COMPOSE:
            return [config, made("compose.yaml", "the containers of a run")]
        case DeployKind.SKYPILOT:
            return [config, made("sky.yaml", "a task of SkyPilot")]
        case DeployKind.SLURM:
            files = [config, made("run.sbatch", "the run under Slurm alone", "sbatch", ray=False)]
            if request.shape.n_nodes > 1:
                what = "the same run with Ray inside of the allocation"
                files.append(made("ray.sbatch", what, "sbatch", ray=True))
            return files
        case DeployKind.RAYJOB:
            files = [made("rayjob.yaml", "the run as a RayJob")]
        case DeployKind.JOB:
            files = [made("job.yaml", "the run as an Indexed Job")]
    files = [made("storage.yaml", "a claim for run folders"), *files]
    check_references([one for file in files for one in read_yaml_text(file.text)], request)
    return files


def next_commands(kind: DeployKind, request: Request, folder: str) -> list[str]:
    """Commands that start the run, follow it and end it.

    `folder` has the files; its name has no line breaks.
    """
    template = _templates().get_template("commands.jinja")
    return template.render(kind=kind, run=request, folder=folder).splitlines()


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("areal_lab.cluster.deploy"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.globals |= _CONSTANTS
    made.filters["yaml"] = yaml_text
    made.filters["shell"] = lambda words: shlex.join([words] if isinstance(words, str) else words)
    return made


def check_references(documents: list[Any], request: Request) -> None:
    """Check that a pod mounts the volumes it has, and that names it refers to exist.

    `documents` are those of one file, and of the files that are applied before it; the mounts of
    `request` are claims that exist. An error is a bug of the templates.
    """
    known = {(one["kind"], one["metadata"]["name"]) for one in documents}
    known |= {("PersistentVolumeClaim", mount.source) for mount in request.mounts}
    for spec in _pods(documents):
        volumes = {one["name"] for one in spec["volumes"]}
        mounted = {one["name"] for box in spec["containers"] for one in box["volumeMounts"]}
        if volumes != mounted:
            raise ValueError(f"volumes {sorted(volumes)} are mounted as {sorted(mounted)}")
        for one in spec["volumes"]:
            for kind, name in _referred(one):
                if (kind, name) not in known:
                    raise ValueError(f"no {kind} is named {name}")
        for box in spec["containers"]:
            for variable in box.get("env", ()):
                secret = variable["valueFrom"]["secretKeyRef"]["name"]
                if secret != request.secret_name:
                    raise ValueError(
                        f"{variable['name']} is not from the Secret {request.secret_name}"
                    )


def _referred(volume: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Source of a volume."""
    if "configMap" in volume:
        yield "ConfigMap", volume["configMap"]["name"]
    if "persistentVolumeClaim" in volume:
        yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]


def _pods(value: Any) -> Iterator[Any]:
    """All specs of pods in documents."""
    if isinstance(value, Mapping):
        if "containers" in value and "volumes" in value:
            yield value
        for one in value.values():
            yield from _pods(one)
    elif isinstance(value, list):
        for one in value:
            yield from _pods(one)
