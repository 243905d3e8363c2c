"""Requests as the command makes them, and generated files by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_lab.cli.deploy import request_of
from areal_lab.cluster.deploy.files import read_yaml_text
from areal_lab.cluster.deploy.kinds import DeployKind, deployment_files
from areal_lab.cluster.deploy.request import DeployConfig
from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig

KINDS = tuple(DeployKind)
FOUR_NODES = ("arithmetic", "allocation_mode=sglang:d6t2+fsdp:d4")
"""Three machines of four GPUs generate, one trains."""


def files_of(
    kind: DeployKind, config: TrainConfig | Sequence[str] = ("tiny",), **options: Any
) -> dict[str, str]:
    """The text of each file, by name.

    Args:
        config: a config, or arguments of the command.
        options: fields of `DeployConfig`.
    """
    if not isinstance(config, TrainConfig):
        names = [one for one in config if "=" not in one]
        config = load_config(names, [one for one in config if "=" in one])
    request = request_of(kind, config, DeployConfig(**options), [kind, config.experiment_name])
    return {file.name: file.text for file in deployment_files(kind, request)}


def documents(text: str) -> dict[str, Any]:
    """Documents of a Kubernetes file, by kind."""
    return {one["kind"]: one for one in read_yaml_text(text)}


def config_in(kind: DeployKind, files: dict[str, str], folder: Path) -> TrainConfig | None:
    """What `areal-lab train` reads where the files start it; None of Dockerfiles."""
    texts = {
        DeployKind.JOB: lambda: documents(files["job.yaml"])["ConfigMap"]["data"]["config.yaml"],
        DeployKind.RAYJOB: lambda: documents(files["rayjob.yaml"])["ConfigMap"]["data"][
            "config.yaml"
        ],
        DeployKind.DOCKER: lambda: None,
    }
    text = texts.get(kind, lambda: files["config.yaml"])()
    if text is None:
        return None
    path = folder / "read.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)
