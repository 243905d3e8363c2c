"""A RayJob for KubeRay 1.7 or newer: a Ray cluster for one run, its workers grouped by role."""

from __future__ import annotations

import shlex
from typing import Any, Final

from areal_lab.cluster.deploy.files import File, read_yaml_text, yaml_text
from areal_lab.cluster.deploy.kubernetes import (
    check_references,
    config_map,
    labels,
    pod,
    secret_commands,
    secret_name,
    storage_file,
)
from areal_lab.cluster.deploy.request import (
    CONFIG_PATH,
    RAY_VERSION,
    Request,
    head_of,
    train_command,
)
from areal_lab.cluster.deploy.shape import Group, Machine

_OBJECT_STORE_BYTES: Final = 256 << 20
"""Ray's store of objects, which lies in shared memory; no tensors go through it."""
_HEAD: Final = Machine(cpus=2, memory_gib=6, shared_gib=1)
"""Ray's own processes take 1.3 GB, the driver is the controller."""
_KEPT_S: Final = 3600
"""How long an ended RayJob stays, for its status and logs."""


def rayjob_files(request: Request) -> list[File]:
    """The RayJob with its config, and storage.

    Raises:
        ValueError: in one line, if there is nothing for Ray to do.
    """
    storage = storage_file(request)
    head = head_of(request, "A run on a Ray cluster of its own, for KubeRay 1.7 or newer.")
    text = yaml_text(config_map(request), _rayjob(request), head=head)
    read = [*read_yaml_text(storage.text), *read_yaml_text(text)]
    check_references(read, request)
    return [storage, File("rayjob.yaml", text, "the run as a RayJob")]


def _rayjob(request: Request) -> dict[str, Any]:
    # KubeRay pastes the entrypoint into a shell, so it has only words that no shell changes.
    entrypoint = shlex.join(train_command(request, CONFIG_PATH, "ray"))
    head = pod(request, {"name": "ray-head"}, _HEAD)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": request.name, "labels": labels(request)},
        "spec": {
            "entrypoint": entrypoint,
            "submissionMode": "K8sJobMode",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT_S,
            # A run is continued from its checkpoint, not started again.
            "backoffLimit": 0,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token", "secretName": secret_name(request)},
                "headGroupSpec": {
                    # Nothing is placed on the head: losing it loses the run.
                    "rayStartParams": {
                        "num-cpus": "0",
                        "object-store-memory": str(_OBJECT_STORE_BYTES),
                    },
                    "template": {"metadata": {"labels": labels(request)}, "spec": head},
                },
                "workerGroupSpecs": [_workers(request, group) for group in request.groups],
            },
        },
    }


def _workers(request: Request, group: Group) -> dict[str, Any]:
    # Equal in size: the run places its hosts on any of them.
    machine = request.machine
    return {
        "groupName": group.name,
        "replicas": group.nodes,
        "minReplicas": group.nodes,
        "maxReplicas": group.nodes,
        "rayStartParams": {"object-store-memory": str(_OBJECT_STORE_BYTES)},
        # For scheduler.ray_resources and tasks of your own; cores and GPUs as the pod has them.
        "resources": {
            **{name: str(count) for name, count in group.resources.items()},
            "CPU": str(machine.cpus),
            **({"GPU": str(machine.gpus)} if machine.gpus else {}),
        },
        "template": {
            "metadata": {"labels": labels(request)},
            "spec": pod(request, {"name": "ray-worker"}, machine),
        },
    }


def rayjob_commands(request: Request, folder: str) -> list[str]:
    """Commands that start the run, follow it and end it."""
    storage, job = (shlex.quote(f"{folder}/{name}") for name in ("storage.yaml", "rayjob.yaml"))
    return [
        *secret_commands(request, token=True),
        f"kubectl apply --filename {storage} --filename {job}",
        f"kubectl logs --follow --selector job-name={request.name}",
        f"kubectl delete --filename {job}    # keeps the claim with the runs",
    ]
