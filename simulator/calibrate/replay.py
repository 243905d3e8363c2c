"""Replay: simulate a recorded run with costs fitted elsewhere, and compare.

    costs (a YAML file) + workload of RUN (sizes, schedule, lengths) --simulate--> log
    log of RUN, log of the simulation --the same functions--> rows

Both logs have the same schema and are read by the same functions: steps from the events, idleness
by cause from `areal_lab.runlog.activity`. Averages exclude the first steps of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from areal_lab.control.ledger import mean_lag
from areal_lab.runlog.activity import PAUSED, activity
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.lags import TrainedBatch, total
from areal_lab.runlog.read_run import RecordedRun
from areal_lab.runlog.records import TRAINER, Log, finite_json
from areal_lab.runlog.replay import eta_changes
from simulator.assembly.simulate import simulated_log
from simulator.config.schema import SimulationConfig
from simulator.run.accounting import add_up
from simulator.run.pools import LOAD
from simulator.workload.recorded_run import Value, recorded_settings

ENGINES: Final = "engines"
_UPDATED: Final = "taking new weights"
"""Engines paused for weights or loading them. A simulated update is one state, a real one two."""
_LEAST_SHARE: Final = 0.02
"""Share of a pool's time below which causes of idleness get no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One number, measured and predicted."""

    name: str
    unit: str
    """Empty for a share of time, whose gap is a difference."""
    measured: float
    predicted: float

    @property
    def gap(self) -> float:
        """Predicted / measured - 1; for shares, predicted - measured."""
        if not self.unit:
            return self.predicted - self.measured
        return self.predicted / self.measured - 1 if self.measured else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run and its simulation."""

    name: str
    config: SimulationConfig
    warmup_steps: int
    measured_steps_s: tuple[float, ...]
    predicted_steps_s: tuple[float, ...]
    measured_use: Mapping[str, Mapping[str, float]]
    """Shares of time by activity, by pool (trainer, engines); idle ones begin with `idle: `."""
    predicted_use: Mapping[str, Mapping[str, float]]
    rows: tuple[Compared, ...]

    def to_json(self) -> dict[str, Any]:
        """The replay as one JSON object."""
        told = {
            "run": self.name,
            "warmup_steps": self.warmup_steps,
            "rows": [
                {
                    "name": row.name,
                    "unit": row.unit or "share",
                    "measured": row.measured,
                    "predicted": row.predicted,
                    "gap": row.gap,
                }
                for row in self.rows
            ],
            "steps": {
                "measured_s": list(self.measured_steps_s),
                "predicted_s": list(self.predicted_steps_s),
            },
        }
        return dict(finite_json(told))


def replay_settings(run: RecordedRun, config: SimulationConfig) -> dict[str, Value]:
    """Settings that make a simulation with the costs of `config` repeat the run's workload."""
    cluster, rollout = config.cluster, config.rollout.tensor_parallel
    engines = max(1, run.engines)
    return {
        **recorded_settings(run),
        "workload.answers.kind": "recorded",
        "workload.answers.trace": str(run.source),
        "workload.answers.max_tokens": _longest(run),
        "cluster.gpus": engines * rollout + max(1, cluster.gpus - cluster.rollout_gpus),
        "cluster.rollout_gpus": engines * rollout,
        "seeds": 1,
    }


def replay(
    config: SimulationConfig, run: RecordedRun, *, own: Iterable[str] = (), name: str = ""
) -> Replay:
    """Simulate a run's workload, and compare.

    Args:
        config: costs; its workload and schedule are replaced by those of the run.
        own: dotted names of settings that keep the value of `config`.
        name: name of the run, for people.

    Raises:
        ValueError: one line: the run has no step to compare, or cannot be simulated.
    """
    if (steps := len(run.batches)) < 2:
        raise ValueError(
            f"{run.source} has {steps} finished training steps, but must have >= 2 to compare step "
            "times; replay a longer run"
        )
    if pauses(run.log) or eta_changes(run.log):
        raise ValueError(
            f"{run.source} was paused by hand, or its eta was changed, which a simulation does not "
            "repeat; replay a run that was left alone"
        )
    settings = replay_settings(run, config)
    for kept in own:
        settings.pop(kept, None)
    config = config.with_settings(settings)
    simulated = RecordedRun(run.source, simulated_log(config))
    warmup = config.workload.warmup_steps
    measured, predicted = (_Reading(one, warmup) for one in (run, simulated))
    return Replay(
        name=name or run.source.name,
        config=config,
        warmup_steps=warmup,
        measured_steps_s=measured.steps_s,
        predicted_steps_s=predicted.steps_s,
        measured_use=measured.use,
        predicted_use=predicted.use,
        rows=tuple(_rows(measured, predicted)),
    )


class _Reading:
    """Step times, throughput, lag and shares of time of a run after its first steps."""

    def __init__(self, run: RecordedRun, warmup: int) -> None:
        log, batches = run.log, run.batches
        ends_s = [run.began_s, *(batch.done_s for batch in batches)]
        self.steps_s = tuple(after - before for before, after in pairwise(ends_s))
        kept: Sequence[TrainedBatch] = batches[warmup:]
        self.window_s = ends_s[-1] - ends_s[warmup]
        self.step_s = self.window_s / len(kept)
        self.tokens_per_s = sum(batch.tokens for batch in kept) / self.window_s
        self.token_lag = mean_lag(total(batch.token_lags for batch in kept))
        self.use = _use(log, ends_s[warmup], ends_s[-1])


def _use(log: Log, begin_s: float, end_s: float) -> dict[str, dict[str, float]]:
    seconds: dict[str, dict[str, float]] = {TRAINER: {}, ENGINES: {}}
    for process, stretches in activity(log).items():
        pool = TRAINER if process == TRAINER else ENGINES
        if pool == ENGINES and not process.startswith("engine "):
            continue
        for one in stretches:
            inside_s = min(one.end_s, end_s) - max(one.start_s, begin_s)
            if inside_s > 0:
                name = one.name if one.busy else f"idle: {one.name}"
                if pool == ENGINES and one.name in (LOAD, PAUSED):
                    name = f"idle: {_UPDATED}"
                add_up(seconds[pool], {name: inside_s})
    return {
        pool: {name: value / sum(of.values()) for name, value in sorted(of.items(), key=_largest)}
        for pool, of in seconds.items()
        if of
    }


def _largest(item: tuple[str, float]) -> float:
    return -item[1]


def _rows(measured: _Reading, predicted: _Reading) -> Iterable[Compared]:
    yield Compared(name="step time", unit="s", measured=measured.step_s, predicted=predicted.step_s)
    yield Compared(
        name="effective throughput",
        unit="tokens/s",
        measured=measured.tokens_per_s,
        predicted=predicted.tokens_per_s,
    )
    yield Compared(
        name="lag of a trained token",
        unit="versions",
        measured=measured.token_lag,
        predicted=predicted.token_lag,
    )
    for pool in (TRAINER, ENGINES):
        uses = [reading.use.get(pool, {}) for reading in (measured, predicted)]
        idle = [sum(v for k, v in use.items() if k.startswith("idle: ")) for use in uses]
        yield Compared(name=f"{pool} idle", unit="", measured=idle[0], predicted=idle[1])
        for name in dict.fromkeys(name for use in uses for name in use):
            shares = [use.get(name, 0.0) for use in uses]
            if name.startswith("idle: ") and max(shares) >= _LEAST_SHARE:
                cause = name.removeprefix("idle: ")
                yield Compared(
                    name=f"  {pool}: {cause}", unit="", measured=shares[0], predicted=shares[1]
                )


def _longest(run: RecordedRun) -> int:
    """Cap of the responses, or the longest response if that is longer."""
    responses = [sum(t for _, t in sample) for group in run.log.groups for sample in group.segments]
    return max(int(run.settings.get("gconfig.max_new_tokens") or 1), *responses, 2)
