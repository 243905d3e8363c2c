"""Settings of a simulation that repeat a recorded run: sizes, schedule, engines; no costs.

header of the log, groups, config.yaml --> {"workload.prompts_per_batch": 4, ...}
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from areal_lab.control.events import GroupFiltered, Train
from areal_lab.control.routing import least_loaded
from areal_lab.runlog.read_run import RecordedRun
from areal_lab.runlog.records import Scalar
from simulator.catalogue.host import CPU_CORE
from simulator.workload.recorded_run import response_tokens

Value: TypeAlias = bool | int | float | str
EMBEDDED = "embedded"
_MOST_FILTERED = 0.99
"""Largest share that a simulation takes."""
_WARM_UP = 5
"""One of this many steps is excluded from averages as warm-up."""


def recorded_settings(run: RecordedRun) -> dict[str, Value]:
    """Settings with which a simulation has the workload and schedule of the run.

    Raises:
        ValueError: one line: the header of the log lacks one.
    """
    steps = len(run.batches)
    settings: dict[str, Value] = {
        "workload.prompts_per_batch": int(_limit(run, "batch_groups")),
        "workload.samples_per_prompt": samples_per_prompt(run),
        "workload.minibatches": int(run.settings.get("actor.ppo_n_minibatches") or 1),
        "workload.steps": steps,
        "workload.warmup_steps": max(1, steps // _WARM_UP) if steps > 1 else 0,
        "workload.whole_run": _limit(run, "train_steps") == steps,
        "schedule.name": str(_limit(run, "schedule")),
        "schedule.eta": float(_limit(run, "eta")),
        "schedule.interruptible": _limit(run, "on_new_weights") == "interrupt",
        "schedule.batch_order": str(_limit(run, "order")),
        "schedule.drop_late": bool(_limit(run, "drop_late")),
        "rollout.routing": str(run.log.header.limits.get("routing", least_loaded().name)),
        "schedule.max_concurrent_prompts": int(_limit(run, "max_in_flight")),
    }
    if settings["schedule.batch_order"] == "bounded_lag":
        # 0 would stand for eta; a lag is whole, so that any fraction of a version is 0.
        settings["schedule.max_lag"] = float(_limit(run, "max_lag")) or 0.5
    if filtered := _filtered_share(run):
        settings["workload.equal_rewards_share"] = min(filtered, _MOST_FILTERED)
    running = run.settings.get("rollout.max_running_requests")
    if running:
        settings["rollout.max_running"] = int(running)
    return settings


def cluster_settings(run: RecordedRun) -> dict[str, Value]:
    """One device per engine and one for the trainer; for the embedded engine, CPU cores."""
    engines = max(1, run.engines)
    settings: dict[str, Value] = {"cluster.gpus": engines + 1, "cluster.rollout_gpus": engines}
    if run.settings.get("rollout.backend", EMBEDDED) == EMBEDDED:
        return {"cluster.gpu": CPU_CORE.name, **settings}
    return settings


def samples_per_prompt(run: RecordedRun) -> int:
    """Responses per prompt, in most groups."""
    sizes = Counter(len(tokens) for tokens in response_tokens(run.log).values())
    return sizes.most_common(1)[0][0] if sizes else 1


def _filtered_share(run: RecordedRun) -> float:
    """Groups that dynamic sampling replaced, of all that ended; 0 for a run without it."""
    if run.log.header.limits.get("max_filtered") is None:
        return 0.0
    filtered = sum(isinstance(record.event, GroupFiltered) for record in run.log.events)
    trained = sum(
        len(record.action.groups) for record in run.log.actions if isinstance(record.action, Train)
    )
    return filtered / (filtered + trained) if filtered else 0.0


def _limit(run: RecordedRun, name: str) -> bool | int | float | str:
    value: Scalar = run.log.header.limits.get(name)
    if value is None and name == "train_steps":
        return 0  # a run without an end
    if value is None:
        raise ValueError(f"the header of {run.source} has no {name}; the run cannot be replayed")
    return value
