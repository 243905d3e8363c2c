"""What people ask for that is not here: the reason, and where it would be added.

Errors about a value, or an unknown setting, show these words instead of the nearest known name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_NPU: Final = (
    "Ascend NPUs are not supported, because nothing here was run on one: engines choose their "
    "device in areal_lab/engines/launch/device.py, the trainer its process group (hccl) in "
    "areal_lab/training/parallel/group.py"
)
_HEAD: Final = (
    "a Ray cluster is started by `ray start` on each node, and the run once on one of them with "
    "scheduler.type=ray; scheduler.ray_address names another cluster"
)
VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "rollout.transfer": {
        "nixl": "NIXL needs CUDA or UCX, which nothing here was run on; a transfer is a Sender of "
        "areal_lab/engines/weights/push.py. Between hosts take folder, or distributed on GPUs",
        "mooncake": "Mooncake over TCP was no faster than HTTP here, and its RDMA was not tried; a "
        "transfer is a Sender of areal_lab/engines/weights/push.py. Between hosts take folder",
        "cuda_ipc": "CUDA IPC needs both ends to name one GPU, which nothing here was run on; a "
        "transfer is a Sender of areal_lab/engines/weights/push.py. On one machine take folder",
    },
    "rollout.device": {"npu": _NPU},
    "actor.device": {"npu": _NPU},
    "scheduler.type": {
        "kubernetes": "on Kubernetes a run is a RayJob (ray) or an Indexed Job (manual), which "
        "areal-lab deploy writes",
        "skypilot": "SkyPilot starts agents by hand (manual); areal-lab deploy skypilot writes the "
        "task",
        "monarch": "Monarch's hosts need a bootstrap of their own, and it is young; a scheduler is "
        "four functions (areal_lab/cluster/scheduler.py)",
    },
}
"""By setting and value."""
UNKNOWN: Final[Mapping[str, str]] = {
    "scheduler.head_node": _HEAD,
    "scheduler.head_address": _HEAD,
    "cluster.fileroot": "run folders are in run_dir",
}
"""Of settings that articles name."""


def of_value(setting: str, value: Any) -> str:
    """Why a value is not there, as the end of a sentence; empty if it is nothing known."""
    reason = VALUES.get(setting, {}).get(str(value).lower().replace("-", "_"), "")
    return reason and f"; {reason}"


def of_unknown(setting: str) -> str:
    """What there is instead of a setting, as the end of a sentence; empty if it is not known."""
    reason = UNKNOWN.get(setting, "")
    return reason and f"; {reason}"
