"""Notes on a simulation in words: its settings, its bottleneck, and why lags exceed eta.

Find the bottleneck of a run from the time of its GPUs by state.

shares of each pool's time, busy and idle by name --> bottleneck
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from areal_lab.runlog.activity import (
    LOST,
    NOTHING_ADMITTED,
    ON_ITS_WAY,
    PAUSED,
    WAIT_BATCH,
    WAIT_CONTROLLER,
    WAIT_RANKS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator.catalogue.gpu import find_gpu
from simulator.config.schema import ClusterConfig, ControllerKind, ScheduleConfig, TrainerConfig
from simulator.run.flights import NOTHING_TO_HANDLE
from simulator.run.pools import CONTROLLER, GENERATE, MOVING_WEIGHTS, WAIT_HYBRID

TRAIN_BOUND: Final = "train-bound"
GENERATION_BOUND: Final = "generation-bound"
STALENESS_BOUND: Final = "staleness-bound"
WEIGHT_UPDATES: Final = "weight updates"
REWARDS_AND_TOOLS: Final = "rewards and tools"
FAILURES: Final = "failures"
CONTROLLER_BOUND: Final = "controller"
OTHER_RANKS: Final = "other ranks"

GENERATING: Final = ("decode", "prefill", "recompute", GENERATE)
"""Activities of engines that are generation."""
_FULL: Final = 0.9
"""Share of time from which the trainer counts as always busy."""
WAITING: Final = 0.1
"""Share of the engines' time from which waiting, not speed, is the bottleneck."""
CAUSES: Final[Mapping[str, str]] = {
    NOTHING_ADMITTED: STALENESS_BOUND,
    PAUSED: WEIGHT_UPDATES,
    WAIT_WEIGHTS: WEIGHT_UPDATES,
    WAIT_REWARDS: REWARDS_AND_TOOLS,
    ON_ITS_WAY: REWARDS_AND_TOOLS,
    LOST: FAILURES,
    WAIT_CONTROLLER: CONTROLLER_BOUND,
    WAIT_RANKS: OTHER_RANKS,
}
"""The bottleneck behind each cause of idleness."""


def bottleneck(shares: Mapping[str, Mapping[str, float]]) -> str:
    """The bottleneck of a run, from the shares of its pools' time.

    controller        the controller is busy 90 % of the time or more
    train-bound       else, the trainer works 90 % of the time or more
    weight updates    else, it waits for weights, or for hybrid GPUs, longer than for batches
    failures          else, it loses more time to failures than to either; so controller (for its
                      batch to be sent) and other ranks (SPMD: for theirs to be complete)
    staleness-bound   else, engines wait 10 % or more for new weights before they may start more
                      responses; also synchronous schedules in which neither side is always busy
    generation-bound  else, engines rarely wait

    If engines wait longer for rewards and tools, updates or failures, that is the bottleneck. If
    all GPUs that train also generate, it is the part that takes the largest share of their time.

    Args:
        shares: shares of the time of each pool (`rollout`, `hybrid` and `training`, or `all`), by
            activity and by cause of idleness.
    """
    if handling(shares) >= _FULL:
        return CONTROLLER_BOUND
    if (both := alternating(shares)) is not None:
        parts = largest_parts(both)
        return max(parts, key=lambda name: parts[name])
    training = shares["training"]
    if working(training) >= _FULL:
        return TRAIN_BOUND
    kept = {
        WEIGHT_UPDATES: updating(training),
        FAILURES: training.get(LOST, 0.0),
        CONTROLLER_BOUND: training.get(WAIT_CONTROLLER, 0.0),
        OTHER_RANKS: training.get(WAIT_RANKS, 0.0),
        WAIT_BATCH: training.get(WAIT_BATCH, 0.0),
    }
    causes = (WAIT_BATCH, WEIGHT_UPDATES, FAILURES, CONTROLLER_BOUND, OTHER_RANKS)
    longest = max(causes, key=lambda name: kept[name])
    if longest != WAIT_BATCH:
        return longest
    idle = _by_limit(engines_of(shares))
    limit = max(idle, key=lambda name: idle[name])
    return limit if idle[limit] >= WAITING else GENERATION_BOUND


def handling(shares: Mapping[str, Mapping[str, float]]) -> float:
    """Share of its time in which the controller is busy; 0 if there is none."""
    controller = shares.get(CONTROLLER, {})
    return 1 - controller.get(NOTHING_TO_HANDLE, 0.0) if controller else 0.0


def alternating(
    shares: Mapping[str, Mapping[str, float]],
) -> Mapping[str, float] | None:
    """The pool of GPUs that generate and train, if no others train."""
    return None if "training" in shares else shares.get("all", shares.get("hybrid"))


def engines_of(shares: Mapping[str, Mapping[str, float]]) -> Mapping[str, float]:
    """The pool of engines: those that only generate, or hybrid ones if there are no others."""
    return shares["rollout"] if "rollout" in shares else shares["hybrid"]


def updating(training: Mapping[str, float]) -> float:
    """Share of the trainer's time for exporting weights and waiting for updates."""
    names = (*MOVING_WEIGHTS, WAIT_WEIGHTS, WAIT_HYBRID)
    return sum(training.get(name, 0.0) for name in names)


def working(training: Mapping[str, float]) -> float:
    """Share of the trainer's time without waiting, failures and weights."""
    causes = (WAIT_BATCH, LOST, WAIT_CONTROLLER, WAIT_RANKS)
    return 1 - updating(training) - sum(training.get(name, 0.0) for name in causes)


def largest_parts(shares: Mapping[str, float]) -> dict[str, float]:
    """Shares of the time of GPUs that generate and train, by bottleneck."""
    generating = sum(shares.get(name, 0.0) for name in GENERATING)
    parts = _by_limit(shares)
    moving = sum(shares.get(name, 0.0) for name in MOVING_WEIGHTS)
    training = 1 - generating - moving - sum(parts.values())
    parts[WEIGHT_UPDATES] += moving
    parts[GENERATION_BOUND] = generating
    parts[TRAIN_BOUND] = training
    return parts


def _by_limit(shares: Mapping[str, float]) -> dict[str, float]:
    idle = dict.fromkeys(CAUSES.values(), 0.0)
    for cause, limit in CAUSES.items():
        idle[limit] += shares.get(cause, 0.0)
    return idle


LARGE_REST: Final = 0.25
"""Share of a step from which `colocation.other_s` is more than what no term names."""


def rest_cause(share: float) -> str:
    """What is likely the cause of a large rest, for the end of a line.

    In released runs, a rest of 31 and 37 % was generation that was simulated too fast: with 10 and
    17 ms of CPU time per decode step in its place, the other runs of both systems are predicted
    within 12 %. 21 % and less was hand-over between processes.
    """
    return (
        f"; that is {share:.0%} of the step, more than hand-over and barriers take: most likely "
        "generation is simulated too fast (lengths, rollout.engine, CUDA graphs); fit it to its "
        "own seconds (rollout.engine_overhead_s, or rollout.time_factor)"
    )


_NAMES: Final[Mapping[str, str]] = {
    TRAIN_BOUND: "Training",
    GENERATION_BOUND: "Generation",
    STALENESS_BOUND: "Idling (staleness bound)",
    WEIGHT_UPDATES: "Moving weights",
    REWARDS_AND_TOOLS: "Waiting for rewards and tools",
    FAILURES: "Failures",
    CONTROLLER_BOUND: "Waiting for the controller",
    OTHER_RANKS: "Waiting for other ranks",
}
"""Bottlenecks of colocated GPUs, for a sentence."""


_CONTROLLERS: Final[Mapping[ControllerKind, Sequence[str]]] = {
    "none": (),
    "single": ("one controller reads all responses and sends them to the trainer",),
    "metadata": (
        "a controller for lengths and places; the trainer fetches responses from the hosts",
    ),
    "spmd": ("no controller: each rank has its engines and its part of every batch",),
}
"""Lines about the way of responses to the trainer."""


def setting_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """The main settings, in a few lines."""
    config = told["config"]
    cluster, rollout, trainer = config["cluster"], config["rollout"], config["trainer"]
    workload, schedule, answers = (
        config["workload"],
        config["schedule"],
        config["workload"]["answers"],
    )
    gpu = find_gpu(cluster["gpu"]).name
    split_up = ClusterConfig(**cluster)
    trains, generates = split_up.training_gpus, split_up.generating_gpus
    split = f"TP {trainer['tensor_parallel']}, PP {trainer['pipeline_parallel']}"
    for letters, setting in (("CP", "context"), ("SP", "sequence"), ("EP", "expert")):
        if trainer[f"{setting}_parallel"] > 1:
            split += f", {letters} {trainer[f'{setting}_parallel']}"
    if trainer["kind"] != TrainerConfig().kind:
        split = f"{trainer['kind']}, {split}"
    if trainer["lora_rank"]:
        split += f", LoRA {trainer['lora_rank']}"
    engines = (
        f"{generates // rollout['tensor_parallel']} engines of TP {rollout['tensor_parallel']}"
    )
    if rollout["weight_precision"] != "auto":
        engines += f", {rollout['weight_precision']}"
    if rollout["speculative_tokens"]:
        engines += f", {rollout['speculative_tokens']} drafted tokens"
    place = f"{config['model']} on {cluster['gpus']} {gpu}"
    if split_up.colocated:
        yield f"{place}, which generate ({engines}) and train ({split})"
    else:
        other = f" {find_gpu(cluster['rollout_gpu']).name}" if cluster["rollout_gpu"] else ""
        joins = split_up.hybrid_gpus
        hybrid = f", {joins} of which join training" if joins else ""
        yield f"{place}: {generates}{other} generate ({engines}){hybrid}, {trains} train ({split})"
    name = schedule["name"].replace("_", " ")
    if schedule["name"] in ("asynchronous", "partial_rollout"):
        name += f", eta {schedule['eta']}".removesuffix(".0")
    if schedule["name"] == "asynchronous" and not schedule["interruptible"]:
        name += ", not interruptible"
    if 0 < (taken := schedule["require_batches"]) < workload["minibatches"]:
        name += f", trains on {taken} of {workload['minibatches']} minibatches as they finish"
    yield (
        f"{name}; {workload['prompts_per_batch']} x {workload['samples_per_prompt']} responses per "
        f"step, {answers['kind']}, at most {answers['max_tokens']:,} tokens"
    )
    yield from _CONTROLLERS[config["controller"]["kind"]]
    seeds = len(told["seeds"])
    yield (
        f"{told['steps']} steps, averages without the first {told['warmup_steps']}; "
        + (f"{seeds} seeds, with 95 % intervals (±)" if seeds > 1 else "one seed, so no ±")
    )


def limit_note(told: Mapping[str, Any]) -> str:
    """The bottleneck found by `simulator.report.notes`, and what would help."""
    shares = {
        pool: {name: mean_of(share) for name, share in (*busy.items(), *told["idle"][pool].items())}
        for pool, busy in told["busy"].items()
    }
    limit = bottleneck(shares)
    if limit == CONTROLLER_BOUND:
        return _controller_limit(shares)
    if (both := alternating(shares)) is not None:
        which = "these GPUs" if "all" in shares else "the hybrid GPUs"
        return (
            f"[bold]{_NAMES[limit]}[/] takes the largest share of the time of {which}, which "
            "alternate between generation and training: "
            f"{_percent(largest_parts(both)[limit])}."
        )
    workload, engines, trainer = told["config"]["workload"], engines_of(shares), shares["training"]
    says = {
        TRAIN_BOUND: _training_limits(engines, trainer),
        WEIGHT_UPDATES: _updates_limit(engines, trainer),
        REWARDS_AND_TOOLS: _rewards_limit(engines, workload["reward_workers"]),
        FAILURES: (
            f"[bold]Failures limit this run:[/] the trainer loses "
            f"{_percent(trainer.get(LOST, 0.0))} of the time, engines "
            f"{_percent(engines.get(LOST, 0.0))}. Fewer failures (faults.node_mtbf_h) or faster "
            "recovery (detection_s, restart_s) would help; more nodes fail more often."
        ),
        OTHER_RANKS: (
            "[bold]The slowest rank limits this run:[/] ranks with their part of the batch wait "
            f"for others {_percent(trainer.get(WAIT_RANKS, 0.0))} of the trainer's time and "
            f"{_percent(engines.get(WAIT_RANKS, 0.0))} of the engines'. Fewer controller.ranks, "
            "larger batches or another controller.kind would help."
        ),
        STALENESS_BOUND: (
            "[bold]Both sides wait:[/] engines are idle "
            f"{_percent(engines.get(NOTHING_ADMITTED, 0.0))} of the time, the trainer waits for a "
            f"batch {_percent(trainer.get(WAIT_BATCH, 0.0))} of the time. They alternate, or wait "
            "for the longest responses; a larger eta may help."
        ),
        GENERATION_BOUND: (
            "[bold]Generation limits this run:[/] the trainer waits for a batch "
            f"{_percent(trainer.get(WAIT_BATCH, 0.0))} of the time. More GPUs for generation and "
            "fewer for training would help."
        ),
    }
    return says[limit]


def _training_limits(engines: Mapping[str, float], trainer: Mapping[str, float]) -> str:
    idle = engines.get(NOTHING_ADMITTED, 0.0)
    if idle < WAITING:
        return (
            "[bold]Training limits this run:[/] the trainer works "
            f"{_percent(working(trainer))} of the time. More GPUs for training would help; a "
            "larger eta would not."
        )
    return (
        f"[bold]Training limits this run:[/] engines are idle {_percent(idle)} of the time. More "
        "GPUs for training and fewer for generation would help; a larger eta would not."
    )


def _updates_limit(engines: Mapping[str, float], trainer: Mapping[str, float]) -> str:
    standing = sum(engines.get(name, 0.0) for name in (*MOVING_WEIGHTS, PAUSED, WAIT_WEIGHTS))
    help_ = "A faster weights.backend"
    if engines.get(PAUSED, 0.0) >= WAITING:
        help_ += " or schedule.interruptible"
    taken, works = updating(trainer), working(trainer)
    also = f"; so would more GPUs for training, which takes {_percent(works)}"
    return (
        f"[bold]Weight updates limit this run:[/] they take {_percent(taken)} of the trainer's "
        f"time and {_percent(standing)} of the engines'. {help_} would help"
        f"{also if works > taken else '; more GPUs would not'}."
    )


def _rewards_limit(engines: Mapping[str, float], reward_workers: int) -> str:
    rewards, tools = engines.get(WAIT_REWARDS, 0.0), engines.get(ON_ITS_WAY, 0.0)
    if tools > rewards:
        what, help_ = "Tools limit", "Faster tools or a larger eta"
    elif reward_workers:
        what, help_ = "Rewards limit", "More workload.reward_workers"
    else:
        what, help_ = "Rewards limit", "Faster rewards or a larger eta"
    return (
        f"[bold]{what} this run:[/] engines wait for them {_percent(max(rewards, tools))} of the "
        f"time. {help_} would help; more GPUs would not."
    )


def _controller_limit(shares: Mapping[str, Mapping[str, float]]) -> str:
    waits = max(pool.get(WAIT_CONTROLLER, 0.0) for pool in shares.values())
    return (
        f"[bold]The controller limits this run:[/] it is busy {_percent(handling(shares))} of the "
        f"time, and GPUs wait for it {_percent(waits)} of theirs. controller.kind=metadata, or a "
        "faster reader (controller.inputs), would help; more GPUs would not."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def lag_note(told: Mapping[str, Any]) -> str:
    """Why lags exceed eta; empty if they do not."""
    schedule = told["config"]["schedule"]
    eta = ScheduleConfig(name=schedule["name"], eta=float(schedule["eta"])).versions_ahead
    if mean_of(told["lag"]["head"]["max"]) <= eta:
        return ""
    return (
        f"Lags exceed eta ({eta:g}), which bounds the number of started prompts, not the lag of "
        "each one. schedule.batch_order=strict_start_order or bounded_lag bounds every lag."
    )


def mean_of(value: Mapping[str, Any]) -> float:
    """Mean of a number with its interval."""
    return float(value["mean"])
