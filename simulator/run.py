"""Run a system with one seed: drive it to its end, and add up what the book says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from areal_lab.control.activity import (
    LOST,
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    ON_ITS_WAY,
    PAUSED,
    PAUSED_FOR_TRAINING,
    WAIT_BATCH,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator.book import Book, Moment, add_up
from simulator.drive import Drive, Write
from simulator.pools import GENERATE, PoolUse, pool_use, shared_gpus, split
from simulator.result import Counts, SimulationResult, ascending, columns_of
from simulator.system import Prices, System

IDLE_CAUSES: Final = frozenset(
    {
        *(LOST, NOTHING_ADMITTED, NOTHING_LEFT, ON_ITS_WAY, PAUSED, PAUSED_FOR_TRAINING),
        *(WAIT_BATCH, WAIT_REWARDS, WAIT_WEIGHTS),
    }
)


def run_system(
    system: System, seed: int, write: Write | None = None, *, name: str = ""
) -> SimulationResult:
    """Simulate `system` from its first step to its last.

    Args:
        seed: the same seed gives the same draws to every system.
        write: takes the records of `areal_lab.control.eventlog`, the header first; None costs
            nothing.
    """
    drive = Drive(system, seed, write)
    drive.run()
    book = drive.book
    counts, window = drive.coordinator.counts, book.end.since(book.begin)
    return SimulationResult(
        name=name,
        seed=seed,
        columns=columns_of(book.columns),
        warmup_steps=system.warmup_steps,
        pools=_pools(system, window),
        token_lags=ascending(book.token_lags),
        head_lags=ascending(book.head_lags),
        tail_lags=ascending(book.tail_lags),
        counts=Counts(
            started=counts.started + counts.dropped,
            trained=counts.trained,
            unfinished=drive.unfinished,
            dropped=counts.dropped - drive.unfinished,
            generated_tokens=window.generated_tokens,
            recomputed_tokens=window.recomputed_tokens,
            preemptions=window.preemptions,
            interruptions=window.interruptions,
            engine_losses=book.engine_losses,
            trainer_restarts=book.trainer_restarts,
        ),
        gpus=system.gpus,
        dollars=_dollars(system, book.end.at_s),
        energy_kwh=_energy_kwh(system, book),
    )


def _pools(system: System, window: Moment) -> dict[str, PoolUse]:
    rollout = _engine_seconds(system, window)
    seconds = window.at_s
    if system.colocated:
        engines = {name: value / system.engines for name, value in rollout.items()}
        both = shared_gpus(engines, window.trainer, IDLE_CAUSES)
        return {"all": pool_use(system.gpus, seconds, both, IDLE_CAUSES)}
    gpus = system.engines * system.gpus_per_engine
    return {
        "rollout": pool_use(gpus, seconds, rollout, IDLE_CAUSES),
        "training": pool_use(system.training_gpus, seconds, window.trainer, IDLE_CAUSES),
    }


def _engine_seconds(system: System, window: Moment) -> dict[str, float]:
    """Seconds by state, what engines did split by their own account of it."""
    states = dict(window.engines)
    generate_s = states.pop(GENERATE, 0.0)
    work_s = sum(window.work.values())
    if system.turns > 1 and work_s < generate_s:
        # Groups were there, but every sample of theirs was at its tool.
        add_up(states, {ON_ITS_WAY: generate_s - work_s})
        generate_s = work_s
    add_up(states, split(generate_s, window.work))
    return states


def _dollars(system: System, seconds: float) -> tuple[float | None, float | None, float | None]:
    hours = seconds / 3600
    rollout_h = system.engines * system.gpus_per_engine * hours
    training_h = 0.0 if system.colocated else system.training_gpus * hours
    told: list[float | None] = []
    for rollout, training in zip(
        system.rollout_prices.dollars_per_gpu_h,
        system.training_prices.dollars_per_gpu_h,
        strict=True,
    ):
        if rollout is None or (training is None and training_h):
            told.append(None)
        else:
            told.append(rollout * rollout_h + (training or 0.0) * training_h)
    low, typical, high = told
    return low, typical, high


def _energy_kwh(system: System, book: Book) -> float:
    """Every GPU at its limit while it works, and at its idle power while it waits."""
    trainer = book.end.trainer
    per_engine = system.gpus_per_engine
    if system.colocated:
        engines = {name: value / system.engines for name, value in book.end.engines.items()}
        both = shared_gpus(engines, trainer, IDLE_CAUSES)
        joules = _joules(both, system.gpus, system.rollout_prices)
    else:
        joules = _joules(book.end.engines, per_engine, system.rollout_prices)
        joules += _joules(trainer, system.training_gpus, system.training_prices)
    return joules / 3.6e6


def _joules(seconds: Mapping[str, float], gpus: int, prices: Prices) -> float:
    idle_s = sum(value for name, value in seconds.items() if name in IDLE_CAUSES)
    busy_s = sum(seconds.values()) - idle_s
    return gpus * (busy_s * prices.power_w + idle_s * prices.idle_power_w)
