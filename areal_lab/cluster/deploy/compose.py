"""Compose: controller and hosts as containers of one machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.cluster.deploy.contents import RUNS, Mount
from areal_lab.cluster.deploy.files import yaml_text
from areal_lab.cluster.deploy.request import (
    CONFIG_FILE,
    CONFIG_PATH,
    Request,
    export_commands,
    head_of,
    host_command,
    train_command,
)

_GRACE: Final = "5m"
"""A run that is asked to end finishes its step and saves."""


def compose_file(request: Request) -> str:
    """A compose file.

    Each container has GPUs of its own: the first ones are the controller's.
    """
    services = {"controller": _controller(request)}
    for index in range(1, request.shape.n_nodes):
        services[f"host-{index}"] = {
            **_service(request, index),
            "command": host_command("controller", request),
            "depends_on": {"controller": {"condition": "service_healthy"}},
        }
    named = [one.source for one in request.mounts if not one.source.startswith((".", "/", "~"))]
    volumes: dict[str, dict[str, Any]] = {name: {} for name in ("runs", *named)}
    file = {
        "name": request.name,
        "services": services,
        "configs": {"run": {"file": f"./{CONFIG_FILE}"}},
        "volumes": volumes,
    }
    head = head_of(request, "Controller and hosts as containers of one machine.")
    return yaml_text(_escaped(file, keep=request.variables), head=head)


def _controller(request: Request) -> dict[str, Any]:
    service = {
        **_service(request, 0),
        "command": train_command(request, CONFIG_PATH, "manual"),
        "configs": [{"source": "run", "target": CONFIG_PATH}],
    }
    if request.shape.n_nodes > 1:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {request.shape.port}), 2)"
        service["healthcheck"] = {
            "test": ["CMD", "python3", "-c", connect],
            "interval": "5s",
            "timeout": "5s",
            "retries": 60,  # the controller reads its model first
        }
    return service


def _service(request: Request, index: int) -> dict[str, Any]:
    machine = request.machine
    service: dict[str, Any] = {"image": request.image}
    if request.variables:
        service["environment"] = {name: _required(name) for name in request.variables}
    service["volumes"] = [f"runs:{RUNS}", *(_volume(one) for one in request.mounts)]
    service["shm_size"] = f"{machine.shared_gib}gb"
    service["stop_grace_period"] = _GRACE
    service["security_opt"] = ["no-new-privileges:true"]
    limits: dict[str, Any] = {"cpus": str(machine.cpus), "memory": f"{machine.memory_gib}g"}
    service["deploy"] = {"resources": {"limits": limits}}
    if machine.gpus:
        first = index * machine.gpus
        service["deploy"]["resources"]["reservations"] = {
            "devices": [
                {
                    "driver": "nvidia",
                    "device_ids": [str(first + gpu) for gpu in range(machine.gpus)],
                    "capabilities": ["gpu"],
                }
            ]
        }
    return service


def _volume(mount: Mount) -> str:
    return f"{mount.source}:{mount.path}:ro"


def _required(variable: str) -> str:
    """A reference to a variable of the caller's environment; compose refuses to start without."""
    return f"${{{variable}:?is not set}}"


def _escaped(value: Any, keep: list[str]) -> Any:
    """With `$` doubled, which compose replaces, but for the references to secrets."""
    if isinstance(value, str):
        return value if value in map(_required, keep) else value.replace("$", "$$")
    if isinstance(value, Mapping):
        return {key: _escaped(one, keep) for key, one in value.items()}
    if isinstance(value, list):
        return [_escaped(one, keep) for one in value]
    return value


def compose_commands(request: Request, folder: str) -> list[str]:
    """Commands that start the run and end it."""
    file = shlex.quote(f"{folder}/compose.yaml")
    return [
        *export_commands(request),
        f"docker compose --file {file} up --abort-on-container-exit --exit-code-from controller",
        f"docker compose --file {file} down    # keeps the volume with the runs",
    ]
