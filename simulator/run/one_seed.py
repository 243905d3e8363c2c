"""Simulate a system with one seed and compute its result."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_lab.capacity import MeanStaleness, mean_staleness_bounded
from areal_lab.config.problem import refusal
from areal_lab.control.coordinator import TOO_FEW_GROUPS
from areal_lab.control.limits import Limits
from areal_lab.control.schedule import OnNewWeights
from areal_lab.runlog.activity import (
    LOST,
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    ON_ITS_WAY,
    PAUSED,
    PAUSED_BY_HAND,
    PAUSED_FOR_TRAINING,
    TRAINERS_TURN,
    WAIT_BATCH,
    WAIT_CONTROLLER,
    WAIT_RANKS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator import fast
from simulator.costs.economics import HOUR_S, Cost, Energy, PoolUse, run_cost, run_energy
from simulator.costs.switch import TO_TRAINING
from simulator.run.accounting import Moment, add_up
from simulator.run.event_loop import EventLoop
from simulator.run.flights import NOTHING_TO_HANDLE
from simulator.run.pools import (
    CONTROLLER,
    GENERATE,
    STARTING,
    WAIT_HYBRID,
    PoolShares,
    pool_shares,
    shared_gpus,
    split,
)
from simulator.run.recorder import Write
from simulator.run.responses import Responses
from simulator.run.result import Counts, SimulationResult, ascending, columns_of
from simulator.run.system import System

IDLE_CAUSES: Final = frozenset(
    {
        *(LOST, NOTHING_ADMITTED, NOTHING_LEFT, ON_ITS_WAY, PAUSED, PAUSED_FOR_TRAINING),
        *(PAUSED_BY_HAND, STARTING, TRAINERS_TURN, WAIT_BATCH, WAIT_HYBRID, WAIT_REWARDS),
        *(WAIT_WEIGHTS, NOTHING_TO_HANDLE, WAIT_CONTROLLER, WAIT_RANKS),
    }
)


def run_system(
    system: System,
    seed: int,
    write: Write | None = None,
    *,
    name: str = "",
    responses: Responses | None = None,
) -> SimulationResult:
    """Simulate `system` from its first step to its last.

    Args:
        seed: every system gets the same draws from the same seed.
        write: receives the records of `areal_lab.runlog.records`, the header first; None writes
            none and takes no time.
        responses: what the engines generate; None draws lengths from the system's distribution.

    Raises:
        ConfigError: dynamic sampling found too few groups with different rewards.
    """
    loop = _loop(system, seed, write, responses)
    with no_search_for_cycles():
        finish = loop.run()
    if finish.reason == TOO_FEW_GROUPS:
        message = f"rollout.dynamic_sampling: {loop.coordinator.failure}"
        raise refusal("rollout.dynamic_sampling", message)
    accounting = loop.accounting
    counts, window = loop.coordinator.counts, accounting.end.since(accounting.begin)
    pools = _pools(system, window)
    if system.controller is not None and system.controller.handles:
        pools[CONTROLLER] = pool_shares(0, window.at_s, window.controller, IDLE_CAUSES)
    cost, energy = _economics(system, pools, system.workload.steps - system.workload.warmup_steps)
    columns = columns_of(accounting.columns)
    return SimulationResult(
        name=name,
        seed=seed,
        columns=columns,
        warmup_steps=system.workload.warmup_steps,
        pools=pools,
        token_lags=ascending(accounting.token_lags),
        head_lags=ascending(accounting.head_lags),
        tail_lags=ascending(accounting.tail_lags),
        lag_parts=accounting.lag_parts,
        ledger=loop.ledger.tokens(),
        closed_form=_closed_form(system, columns, pools),
        counts=Counts(
            started=counts.started - counts.unfilled + counts.dropped + counts.filtered,
            trained=counts.trained,
            unfinished=loop.unfinished,
            dropped=counts.dropped - loop.unfinished,
            filtered=counts.filtered,
            filtered_tokens=accounting.filtered_tokens,
            generated_tokens=window.generated_tokens,
            recomputed_tokens=window.recomputed_tokens,
            preemptions=window.preemptions,
            interruptions=window.interruptions,
            engine_losses=accounting.engine_losses,
            trainer_restarts=accounting.trainer_restarts,
        ),
        gpus=system.gpus if loop.scaling is None else sum(pool.gpus for pool in pools.values()),
        engines=None if loop.scaling is None else loop.scaling.changes(accounting.engines),
        cost=cost,
        energy=energy,
    )


def _loop(system: System, seed: int, write: Write | None, responses: Responses | None) -> EventLoop:
    workload = system.workload
    sequences = workload.steps * system.limits.batch_groups * workload.samples_per_prompt
    if write is None and responses is None and fast.simulates(sequences):
        # Not at the top of the module: it needs numba.
        from simulator.run.compiled_loop import CompiledLoop, serves

        if serves(system):
            return CompiledLoop(system, seed)
    return EventLoop(system, seed, write, responses)


_ALWAYS_BUSY: Final = 0.01
"""Largest share of a step in which a trainer that is slower than the engines waits."""


def _closed_form(
    system: System, columns: Mapping[str, NDArray[np.float64]], pools: Mapping[str, PoolShares]
) -> MeanStaleness | None:
    """Mean lag in closed form from the groups in flight and the share of time without a batch.

    A trainer that never waits for a batch takes its groups at its own rate, in which weights are
    loaded, and the groups in flight are those that eq. 3 leaves. None for systems that the closed
    form is not made for, or that have not come to rest: a full queue takes some steps to fill.
    """
    limits, window = system.limits, slice(system.workload.warmup_steps, None)
    changes = bool(system.requests) or system.scaling is not None
    if "training" not in pools or not in_closed_form(limits, changes=changes):
        return None
    eta = limits.schedule.eta
    busy = 1 - pools["training"].idle.get(WAIT_BATCH, 0.0)
    in_flight = float(columns["in_flight"][window].mean())
    slow = busy >= 1 - _ALWAYS_BUSY  # the trainer
    if in_flight <= 0 or busy <= 0 or (slow and math.isinf(eta)):
        return None
    return mean_staleness_bounded(
        in_flight=in_flight,
        batch_size=limits.batch_groups,
        eta=eta,
        rate_ratio=1.0 if slow else busy,
    )


def in_closed_form(limits: Limits, *, changes: bool) -> bool:
    """Return whether `mean_staleness_bounded` is made for systems with these limits.

    Args:
        changes: people or rules change the run while it continues.
    """
    schedule = limits.schedule
    interrupts = schedule.on_new_weights is OnNewWeights.INTERRUPT and not schedule.carry_over
    devices = limits.hybrid_engines or limits.batch_parts > 1 or limits.ranks > 1
    others = changes or limits.sampling is not None or limits.order.drops_late
    return not (not interrupts or others or devices or schedule.eta % 1)


@contextmanager
def no_search_for_cycles() -> Iterator[None]:
    """Disable the cyclic garbage collector during a run: it took 10 to 20 % of the time.

    A run keeps many objects, the segments of responses that wait for training, but none of them
    form cycles: reference counts free them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _pools(system: System, window: Moment) -> dict[str, PoolShares]:
    rollout = _engine_seconds(system, window.engines, window.work)
    seconds = window.at_s
    if system.colocated:
        engines = {name: value / system.engines for name, value in rollout.items()}
        both = shared_gpus(engines, window.trainer, IDLE_CAUSES)
        return {"all": pool_shares(system.gpus, seconds, both, IDLE_CAUSES)}
    if system.limits.hybrid_engines:
        return _pools_with_hybrid(system, window)
    gpus: float = system.engines * system.rollout.tensor_parallel
    if system.scaling is not None:
        gpus = sum(window.engines.values()) / seconds * system.rollout.tensor_parallel
    return {
        "rollout": pool_shares(gpus, seconds, rollout, IDLE_CAUSES),
        "training": pool_shares(system.training_gpus, seconds, window.trainer, IDLE_CAUSES),
    }


def _pools_with_hybrid(system: System, window: Moment) -> dict[str, PoolShares]:
    """GPUs that only generate, that do both, and that only train, if there are any."""
    hybrid, gpus = system.limits.hybrid_engines, system.rollout.tensor_parallel
    both = _engine_seconds(system, window.hybrid, window.hybrid_work)
    pools = {}
    if others := system.engines - hybrid:
        states = _without(window.engines, window.hybrid)
        alone = _engine_seconds(system, states, _without(window.work, window.hybrid_work))
        pools["rollout"] = pool_shares(others * gpus, window.at_s, alone, IDLE_CAUSES)
    shared = shared_gpus(
        {name: value / hybrid for name, value in both.items()}, window.trainer, IDLE_CAUSES
    )
    pools["hybrid"] = pool_shares(hybrid * gpus, window.at_s, shared, IDLE_CAUSES)
    if not system.training_gpus:
        return pools
    trains = {name: value for name, value in window.trainer.items() if name not in TO_TRAINING}
    switches_s = sum(window.trainer.get(name, 0.0) for name in TO_TRAINING)
    add_up(trains, {WAIT_HYBRID: switches_s})
    pools["training"] = pool_shares(system.training_gpus, window.at_s, trains, IDLE_CAUSES)
    return pools


def _without(total: Mapping[str, float], part: Mapping[str, float]) -> dict[str, float]:
    return {name: value - part.get(name, 0.0) for name, value in total.items()}


def _engine_seconds(
    system: System, engines: Mapping[str, float], work: Mapping[str, float]
) -> dict[str, float]:
    states = dict(engines)
    generate_s = states.pop(GENERATE, 0.0)
    work_s = sum(work.values())
    if system.workload.most_turns > 1 and work_s < generate_s:
        # The engine had groups, but all their samples waited for tools.
        add_up(states, {ON_ITS_WAY: generate_s - work_s})
        generate_s = work_s
    add_up(states, split(generate_s, work))
    return states


def _economics(system: System, pools: Mapping[str, PoolShares], steps: int) -> tuple[Cost, Energy]:
    generates = system.rollout_gpu
    gpus = {"all": generates, "rollout": generates, "hybrid": generates}
    gpus["training"] = system.training_gpu
    pools = {name: shares for name, shares in pools.items() if shares.gpus}
    uses = [
        PoolUse(
            name=name,
            gpu=gpu,
            gpus=shares.gpus,
            seconds=shares.seconds / steps,
            utilization=shares.utilization,
        )
        for name, shares in pools.items()
        if (gpu := gpus[name]) is not None
    ]
    if len(uses) < len(pools):  # a system without GPUs of the catalogue
        hours = sum(shares.gpus * shares.seconds for shares in pools.values()) / steps / HOUR_S
        unknown = Cost(dollars=None, low=None, high=None, gpu_hours=hours, parts={}, sources={})
        return unknown, Energy(kwh=math.nan, parts={})
    cost = run_cost(uses, price_per_gpu_h=system.price_per_gpu_h, overhead=system.overhead)
    return cost, run_energy(uses)
