"""What a simulation says in words: what was simulated, what limits it, why lags exceed eta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from areal_lab.control.activity import NOTHING_ADMITTED, WAIT_BATCH
from simulator.hardware import find_gpu

_BEHIND: Final = 0.1
"""Share of its time that a pool waits for the other, from which it is worth a word."""


def setting_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """What was simulated, in a few lines."""
    config = told["config"]
    cluster, rollout, trainer = config["cluster"], config["rollout"], config["trainer"]
    workload, schedule, answers = (
        config["workload"],
        config["schedule"],
        config["workload"]["answers"],
    )
    gpu = find_gpu(cluster["gpu"]).name
    colocated = cluster["placement"] == "colocated"
    trains = cluster["gpus"] if colocated else cluster["gpus"] - cluster["rollout_gpus"]
    generates = cluster["gpus"] if colocated else cluster["rollout_gpus"]
    split = f"TP {trainer['tensor_parallel']}, PP {trainer['pipeline_parallel']}"
    engines = (
        f"{generates // rollout['tensor_parallel']} engines of TP {rollout['tensor_parallel']}"
    )
    place = f"{config['model']} on {cluster['gpus']} {gpu}"
    if colocated:
        yield f"{place}, which generate ({engines}) and train ({split})"
    else:
        other = f" {find_gpu(cluster['rollout_gpu']).name}" if cluster["rollout_gpu"] else ""
        yield f"{place}: {generates}{other} generate ({engines}), {trains} train ({split})"
    name = schedule["name"].replace("_", " ")
    if schedule["name"] in ("asynchronous", "partial_rollout"):
        name += f", eta {schedule['eta']}".removesuffix(".0")
    if schedule["name"] == "asynchronous" and not schedule["interruptible"]:
        name += ", not interruptible"
    yield (
        f"{name}; {workload['prompts_per_batch']} x {workload['samples_per_prompt']} answers a "
        f"step, {answers['kind']}, at most {answers['max_tokens']:,} tokens"
    )
    seeds = len(told["seeds"])
    yield (
        f"{told['steps']} steps, the first {told['warmup_steps']} left out of averages; "
        + (f"{seeds} seeds, ± 95 %" if seeds > 1 else "one seed, no intervals")
    )


def limit_note(told: Mapping[str, Any]) -> str:
    """Which side waits for the other, if one clearly does."""
    idle = told["idle"]
    if "training" not in idle:
        return ""
    engines, trainer = (
        mean_of(idle[pool].get(cause, {"mean": 0.0}))
        for pool, cause in (("rollout", NOTHING_ADMITTED), ("training", WAIT_BATCH))
    )
    if trainer < _BEHIND < engines:
        return (
            f"[bold]Training limits this run:[/] engines have nothing to do {100 * engines:.0f} % "
            "of the time. More GPUs for training, fewer for generation, would help; more eta would "
            "not."
        )
    if engines < _BEHIND < trainer:
        return (
            f"[bold]Generation limits this run:[/] the trainer waits for a batch "
            f"{100 * trainer:.0f} % of the time. More GPUs for generation, fewer for training, "
            "would help."
        )
    if min(engines, trainer) > _BEHIND:
        return (
            f"[bold]Both sides wait:[/] engines have nothing to do {100 * engines:.0f} % of the "
            f"time, the trainer waits for a batch {100 * trainer:.0f} % of it. They take turns, or "
            "wait for the longest answers; more eta helps if anything does."
        )
    return ""


def lag_note(told: Mapping[str, Any]) -> str:
    """Why lags may exceed eta, where they do."""
    schedule = told["config"]["schedule"]
    eta = 0.0 if schedule["name"] == "synchronous" else float(schedule["eta"])
    eta = 1.0 if schedule["name"] == "one_step_overlap" else eta
    if mean_of(told["lag"]["head"]["max"]) <= eta:
        return ""
    return (
        f"More than eta ({eta:g}): it bounds how many prompts are started, not the age of each. "
        "schedule.batch_order=strict_start_order or bounded_lag bounds that."
    )


def mean_of(value: Mapping[str, Any]) -> float:
    """Of a number with its interval."""
    return float(value["mean"])
