"""Parts of Kubernetes files that an Indexed Job and a RayJob share; and a check of references."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from areal_lab.cluster.deploy.contents import RUNS, WORK
from areal_lab.cluster.deploy.docker import USER_ID
from areal_lab.cluster.deploy.files import File, yaml_text
from areal_lab.cluster.deploy.request import (
    CONFIG_FILE,
    CONFIG_PATH,
    Request,
)
from areal_lab.cluster.deploy.shape import Machine
from areal_lab.cluster.records import TOKEN_VARIABLE

GRACE_S: Final = 300
"""A run that is asked to end finishes its step and saves."""
_TOKEN_KEY: Final = "auth_token"
"""Key of the token in the Secret; KubeRay reads it under this name."""
_STORAGE: Final = "100Gi"
_FOLDER: Final = CONFIG_PATH.rpartition("/")[0]


def secret_name(request: Request) -> str:
    """The Secret with the token and other keys; the user makes it, no file has it."""
    return f"{request.name}-secrets"


def config_map(request: Request, *, script: str = "") -> dict[str, Any]:
    """The resolved config, and a script beside it."""
    data = {CONFIG_FILE: request.config}
    if script:
        data["start.sh"] = script
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{request.name}-config", "labels": labels(request)},
        "data": data,
    }


def storage_file(request: Request) -> File:
    """The claim for run folders; in a file of its own, since deleting a claim deletes the runs."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": f"{request.name}-runs", "labels": labels(request)},
        # Every pod mounts it: checkpoints are read by other machines than the one that writes them.
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": _STORAGE}},
        },
    }
    head = (
        "Storage for run folders, which outlives the job: deleting it deletes the runs.",
        "It needs a storage class that many nodes can mount at once.",
    )
    return File("storage.yaml", yaml_text(claim, head=head), "a claim for run folders")


def labels(request: Request) -> dict[str, str]:
    """Labels of everything that belongs to the run.

    Of our own: KubeRay's Services select pods by the usual ones (`app.kubernetes.io/name`).
    """
    return {"areal-lab/run": request.name}


def pod(request: Request, container: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Spec of a pod with one container, which gets config, runs, shared memory and secrets.

    Args:
        container: its name and what it runs.
        machine: its size; memory and GPUs are requested as they are limited, so that a full node
            kills no run.
    """
    size = {"memory": f"{machine.memory_gib}Gi"}
    if machine.gpus:
        size["nvidia.com/gpu"] = str(machine.gpus)
    mounts = [
        {"name": "config", "mountPath": _FOLDER, "readOnly": True},
        {"name": "runs", "mountPath": str(RUNS)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{request.name}-config"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": f"{request.name}-runs"}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{machine.shared_gib}Gi"},
        },
    ]
    for index, mount in enumerate(request.mounts):
        mounts.append({"name": f"data-{index}", "mountPath": str(mount.path), "readOnly": True})
        claim = {"claimName": mount.source, "readOnly": True}
        volumes.append({"name": f"data-{index}", "persistentVolumeClaim": claim})
    environment = [_from_secret(request, name) for name in request.variables]
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [
            {
                **container,
                "image": request.image,
                "workingDir": str(WORK),
                **({"env": environment} if environment else {}),
                "resources": {
                    "requests": {"cpu": str(machine.cpus), **size},
                    "limits": size,
                },
                "securityContext": {"allowPrivilegeEscalation": False},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def secret_commands(request: Request, *, token: bool) -> list[str]:
    """Commands that make the Secret, without a secret on a command line.

    Args:
        token: whether it has a token of the cluster.
    """
    name, others = shlex.quote(secret_name(request)), request.secrets
    files = " ".join(f"--from-file={one}=FILE_WITH_{one}" for one in others)
    create = f"kubectl create secret generic {name}"
    if token:
        source = f"--from-file={_TOKEN_KEY}=/dev/stdin"
        return [f"openssl rand -hex 32 | tr -d '\\n' | {create} {source} {files}".rstrip()]
    return [f"{create} {files}"] if others else []


def check_references(documents: list[Any], request: Request) -> None:
    """Check that a pod mounts the volumes it has, and that names it refers to exist.

    Args:
        documents: of one file, and of the files that are applied before it.
        request: what they were written from; its mounts are claims that exist.

    Raises:
        ValueError: in one line; a bug of what wrote the files.
    """
    secret = secret_name(request)
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
                if variable["valueFrom"]["secretKeyRef"]["name"] != secret:
                    raise ValueError(f"{variable['name']} is not from the Secret {secret}")


def _referred(volume: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a volume is made from."""
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


def _from_secret(request: Request, variable: str) -> dict[str, Any]:
    key = _TOKEN_KEY if variable == TOKEN_VARIABLE else variable
    return {
        "name": variable,
        "valueFrom": {"secretKeyRef": {"name": secret_name(request), "key": key}},
    }
