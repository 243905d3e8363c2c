"""Unknown names in settings: similar names, and reasons for what is asked for and not offered.

Explanations for settings and values of other projects that are not supported here.

Errors about a value, or an unknown setting, show these texts instead of the nearest known name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final


@lru_cache(maxsize=1024)  # the names of a catalogue are compared repeatedly
def plain(name: str) -> str:
    """Return a name without case, blanks and punctuation: `H100 SXM` and `h100-sxm` are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names that are similar to this one."""
    by_plain = {plain(one): one for one in known}
    return [by_plain[one] for one in difflib.get_close_matches(plain(name), by_plain, n=3)]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return `did you mean 'a' or 'b'?`, or all known names if none is similar; for error
    messages.
    """
    if near := near_names(name, known):
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"known are {', '.join(known)}"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return `; did you mean 'x'?`, or nothing if no known name is similar; for error messages.

    For dotted names the last part decides: `lr` is near `actor.optimizer.lr`.
    """
    by_name = {full.lower(): full for full in known}
    by_leaf = {full.rsplit(".", 1)[-1].lower(): full for full in reversed(known)}
    leaf = name.rsplit(".", 1)[-1].lower()
    if leaf in by_leaf:  # in another group, or without one: `lr`, `rollout.n_samples`
        found = [by_leaf[leaf]]
    else:
        found = [by_name[near] for near in difflib.get_close_matches(name.lower(), by_name, n=1)]
        found = found or [by_leaf[near] for near in difflib.get_close_matches(leaf, by_leaf, n=1)]
    return f"; did you mean {found[0]!r}?" if found else ""


_NPU: Final = (
    "Ascend NPUs are not supported, because nothing here was run on one: engines choose their "
    "device in areal_lab/engines/launch/options.py, the trainer its process group (hccl) in "
    "areal_lab/training/parallel.py"
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
    },
    "rollout.device": {"npu": _NPU},
    "actor.device": {"npu": _NPU},
    "scheduler.type": {
        "kubernetes": "on Kubernetes a run is a RayJob (ray) or an Indexed Job (manual), which "
        "areal-lab deploy writes",
        "skypilot": "SkyPilot starts agents manually; areal-lab deploy skypilot writes the task",
        "monarch": "Monarch's hosts need a separate bootstrap, and it is young; a scheduler is "
        "four functions (areal_lab/cluster/scheduler.py)",
    },
}
"""Explanations by setting and value."""
UNKNOWN: Final[Mapping[str, str]] = {
    "scheduler.head_node": _HEAD,
    "scheduler.head_address": _HEAD,
    "cluster.fileroot": "run folders are in run_dir",
}
"""Explanations of unknown settings that articles name."""


def of_value(setting: str, value: Any) -> str:
    """Return why a value is not supported, as the end of a sentence; empty without an
    explanation.
    """
    reason = VALUES.get(setting, {}).get(str(value).lower().replace("-", "_"), "")
    return reason and f"; {reason}"


def of_unknown(setting: str) -> str:
    """Return the replacement of a setting, as the end of a sentence; empty without one."""
    reason = UNKNOWN.get(setting, "")
    return reason and f"; {reason}"
