"""A SkyPilot task: machines of a cloud, on which a copy of the checkout is installed."""

from __future__ import annotations

import shlex
from typing import Any, Final

from areal_lab.cluster.deploy.files import yaml_text
from areal_lab.cluster.deploy.request import (
    Request,
    export_commands,
    head_of,
    host_command,
    train_command,
)
from areal_lab.cluster.deploy.scripts import ranked_script

_VENV: Final = '"$HOME/areal_lab"'
_DISK_GIB: Final = 256
_BUCKETS: Final = ("s3://", "gs://", "r2://", "https://", "cos://", "oci://")


def skypilot_file(request: Request) -> str:
    """A task, launched in a checkout: `workdir` is copied to every machine.

    The image is not used: SkyPilot installs packages into containers, which needs root.
    """
    machine = request.machine
    resources: dict[str, Any] = {
        "cpus": f"{machine.cpus}+",
        "memory": f"{machine.memory_gib}+",
        "disk_size": _DISK_GIB,
    }
    if machine.gpus:
        resources["accelerators"] = f"{request.accelerator}:{machine.gpus}"
    task: dict[str, Any] = {
        "name": request.name,
        "num_nodes": request.shape.n_nodes,
        "workdir": ".",
        "resources": resources,
    }
    if request.mounts:
        task["file_mounts"] = {str(one.path): _source(one.source) for one in request.mounts}
    if request.variables:
        task["secrets"] = dict.fromkeys(request.variables)
    task["setup"] = _setup(request)
    train = train_command(request, request.config_path, "manual")
    task["run"] = ranked_script(train, host_command("", request))
    head = head_of(request, "A run on machines of a cloud. Launch it in the checkout.")
    return yaml_text(task, head=head)


def _setup(request: Request) -> str:
    extras = ",".join(request.extras)
    install = f"uv pip install --python {_VENV} --constraint constraints.txt"
    lines = [
        "set -euo pipefail",
        'export PATH="$HOME/.local/bin:$PATH"',
        "command -v uv > /dev/null || python3 -m pip install --user uv",
        f"uv venv --python 3.11 --seed --allow-existing {_VENV}",
        f"{install} {shlex.quote(f'.[{extras}]')}",
    ]
    if request.packages:
        lines.append(f"uv pip install --python {_VENV} --no-deps {shlex.join(request.packages)}")
    if request.engine:
        lines.append(
            f"{_VENV}/bin/areal-lab engine install {request.engine} --build {request.build}"
        )
    return "\n".join([*lines, ""])


def _source(source: str) -> Any:
    return {"source": source, "mode": "MOUNT"} if source.startswith(_BUCKETS) else source


def skypilot_commands(request: Request, folder: str) -> list[str]:
    """Commands that start the run, fetch its folder and end the cluster."""
    name, file = request.name, shlex.quote(f"{folder}/sky.yaml")
    secrets = "".join(f" --secret {one}" for one in request.variables)
    return [
        *export_commands(request),
        f"sky launch --cluster {name}{secrets} {file}",
        f"rsync --archive {name}:sky_workdir/runs/ runs/    # before the machines are gone",
        f"sky down {name}",
    ]
