"""The result of a simulation: a row per step, shares of time, token lags, cost and energy.

    one_seed --> SimulationResult --> Replicated (all seeds, with 95 % intervals) --> JSON

Averages are over the steps after warm-up. Throughput counts only tokens that were trained on.
Utilization and idleness are shares of a pool's time, with the names of
`areal_lab.runlog.activity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_lab.capacity import MeanStaleness
from areal_lab.control.ledger import LagCounts, TokenCounts, lag_percentile, mean_lag
from areal_lab.extras import require
from areal_lab.runlog.records import finite_json
from simulator.costs.economics import Cost, Energy
from simulator.run.accounting import CONTROLLER_COLUMNS
from simulator.run.pools import CONTROLLER, PoolShares
from simulator.stats.statistics import Estimate, estimate

if TYPE_CHECKING:
    import pandas as pd


LAGS: Final = ("token", "head", "tail", "before_queue", "in_queue", "offered")
"""Names of the histograms of lags (`SimulationResult.lags`)."""
Show: TypeAlias = Callable[[Estimate], Any]
"""Function that turns an estimate into JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counters of a run; some count only what happened after warm-up."""

    started: int
    """Groups that were started, over the whole run."""
    trained: int
    """Groups given to the trainer."""
    unfinished: int
    """Groups that still ran or waited for training at the end of the simulated steps."""
    dropped: int
    """Groups that the batch order dropped."""
    filtered: int = 0
    """Groups that dynamic sampling replaced, over the whole run."""
    filtered_tokens: int = 0
    """Response tokens of these groups."""
    generated_tokens: int
    """Tokens after warm-up."""
    recomputed_tokens: int
    """Tokens prefilled again after an interruption or a preemption; after warm-up."""
    preemptions: int
    """Sequences sent back to the queue because the cache was full; after warm-up."""
    interruptions: int
    """Pauses of all engines after warm-up."""
    engine_losses: int
    trainer_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanges:
    """Engines that joined and left while the run continued."""

    by_step: tuple[float, ...]
    """Mean number in each step, warm-up included."""
    joined: int
    retired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One simulated run with one seed."""

    name: str
    seed: int
    columns: Mapping[str, NDArray[np.float64]]
    """Columns by name, one value per step; `simulator.run.accounting.COLUMNS` describes them."""
    warmup_steps: int
    pools: Mapping[str, PoolShares]
    """`rollout` and `training`, or `all` if the same GPUs do both; after warm-up."""
    token_lags: Mapping[int, int]
    """Trained tokens by lag in versions, ascending; after warm-up."""
    head_lags: Mapping[int, int]
    """Samples by the lag of their first token."""
    tail_lags: Mapping[int, int]
    """Samples by the lag of their last token."""
    lag_parts: LagCounts = field(default_factory=LagCounts)
    """Samples by the parts of the lag of their first token; after warm-up."""
    ledger: TokenCounts = field(default_factory=TokenCounts)
    """What became of all tokens of the run, at its end."""
    closed_form: MeanStaleness | None = None
    """Mean lag of first tokens by `capacity.mean_staleness_bounded`, beside that of `lag_parts`;
    None out of its range."""
    counts: Counts
    gpus: float
    """The mean, where engines join and leave."""
    engines: EngineChanges | None = None
    """None if the rule for their number is off."""
    cost: Cost
    """Cost of one training step, averaged over the steps after warm-up."""
    energy: Energy
    """Energy of one training step; nan for systems without GPUs of the catalogue."""

    @property
    def makespan_s(self) -> float:
        """End of the last step."""
        return float(self.columns["end_s"][-1])

    @property
    def window_s(self) -> float:
        """Duration of the steps after warm-up."""
        return float(self.columns["step_s"][self.warmup_steps :].sum())

    @property
    def step_s(self) -> float:
        """Mean seconds per training step."""
        return self.mean("step_s")

    @property
    def tokens_per_s(self) -> float:
        """Effective throughput: generated tokens that were trained on, per second."""
        return float(self.columns["tokens"][self.warmup_steps :].sum()) / self.window_s

    @property
    def cost_per_million_tokens(self) -> Cost:
        """Cost of a million trained tokens."""
        return self.cost.per_million_tokens(self.mean("tokens"))

    def lags(self, name: str) -> Mapping[int, int]:
        """The histogram of `token`, `head` or `tail` lags, or of a part of the head lags:
        `before_queue`, `in_queue`, or `offered` (`control.ledger`)."""
        parts = self.lag_parts
        return {
            "token": self.token_lags,
            "head": self.head_lags,
            "tail": self.tail_lags,
            "before_queue": parts.before_queue,
            "in_queue": parts.in_queue,
            "offered": parts.offered,
        }[name]

    def staleness(self) -> dict[str, float]:
        """Mean and 95th percentile of `LAGS` in versions, and the share of the generated tokens
        that is thrown away."""
        lags = {name: self.lags(name) for name in LAGS}
        return {
            **{f"{name}_mean": mean_lag(one) for name, one in lags.items()},
            **{f"{name}_p95": float(lag_percentile(one)) for name, one in lags.items()},
            "thrown_away": self.ledger.thrown_away,
        }

    def mean(self, column: str) -> float:
        """Mean of a column over the steps after warm-up."""
        return float(self.columns[column][self.warmup_steps :].mean())

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step, warm-up included; the index counts from 1."""
        require("SimulationResult.steps", "notebooks", "pandas")
        import pandas as pd

        steps = len(self.columns["end_s"])
        return pd.DataFrame(dict(self.columns), index=pd.RangeIndex(1, steps + 1, name="step"))

    def to_json(self) -> dict[str, Any]:
        """The object of `areal-lab simulate --json`, with plain numbers: one seed has no
        intervals."""
        return Replicated(results=(self,)).to_json(_only_mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Results of one simulation with several seeds."""

    results: tuple[SimulationResult, ...]

    def estimate(self, value: Callable[[SimulationResult], float]) -> Estimate:
        """Mean and interval of a number computed from each result."""
        return estimate([value(result) for result in self.results])

    def ratio(self, other: Replicated, value: Callable[[SimulationResult], float]) -> Estimate:
        """This divided by `other`, seed by seed: common random numbers cancel in each quotient.

        Raises:
            ValueError: if the seeds are not the same.
        """
        return estimate(self.ratios(other, value))

    def ratios(self, other: Replicated, value: Callable[[SimulationResult], float]) -> list[float]:
        """The quotients of `ratio`, one per seed.

        Raises:
            ValueError: if the seeds are not the same.
        """
        seeds, others = ([r.seed for r in both.results] for both in (self, other))
        if seeds != others:
            raise ValueError(f"seeds {seeds} and {others} differ; compare runs of the same seeds")
        pairs = zip(self.results, other.results, strict=True)
        return [value(mine) / value(theirs) for mine, theirs in pairs]

    @property
    def step_s(self) -> Estimate:
        """Seconds per training step."""
        return self.estimate(lambda result: result.step_s)

    @property
    def tokens_per_s(self) -> Estimate:
        """Effective throughput."""
        return self.estimate(lambda result: result.tokens_per_s)

    def largest_lag(self, name: str = "token") -> int:
        """The largest lag of all seeds; `name` is `token`, `head` or `tail`."""
        return max((lag for result in self.results for lag in result.lags(name)), default=0)

    def older_than(self, versions: float, name: str = "token") -> Estimate:
        """Share of `token`, `head` or `tail` lags above a number of versions."""
        return self.estimate(lambda result: _share_above(result.lags(name), versions))

    def utilization(self, pool: str) -> Estimate:
        """Share of a pool's time spent generating or training; see `PoolShares`."""
        return self.estimate(lambda result: result.pools[pool].utilization)

    def to_json(self, show: Show = Estimate.to_json) -> dict[str, Any]:
        """The output of `areal-lab simulate --json`: every number with its interval."""
        first = self.results[0]
        columns = ("train_s", "export_s", "outside_s", "wait_s", "update_s", "generate_s")
        told = {
            "name": first.name,
            "gpus": first.gpus,
            "steps": len(first.columns["end_s"]),
            "warmup_steps": first.warmup_steps,
            "seeds": [result.seed for result in self.results],
            "step_s": show(self.step_s),
            "tokens_per_s": show(self.tokens_per_s),
            "parts": {name: show(self.estimate(_column(name))) for name in columns},
            "utilisation": {pool: show(self.utilization(pool)) for pool in first.pools},
            "busy": self._shares(show, lambda pool: pool.busy),
            "idle": self._shares(show, lambda pool: pool.idle),
            "lag": {name: self._lag(show, name) for name in LAGS},
            "counts": {name: show(self.estimate(_count(name))) for name in Counts.__slots__},
            "cost": {
                "gpu_hours_per_step": show(self.estimate(lambda result: result.cost.gpu_hours)),
                "dollars_per_step": _dollars(show, [result.cost for result in self.results]),
                "dollars_per_million_tokens": _dollars(
                    show, [result.cost_per_million_tokens for result in self.results]
                ),
            },
            "energy": {"kwh_per_step": show(self.estimate(lambda result: result.energy.kwh))},
        }
        told["ledger"] = self._ledger(show)
        told["closed_form"] = self._closed_form(show)
        if CONTROLLER in first.pools:
            names = {name: show(self.estimate(_column(name))) for name in CONTROLLER_COLUMNS}
            told["controller"] = names
        if all(result.engines is not None for result in self.results):
            told["engines"] = self._engines(show)
        return dict(finite_json(told))

    def _ledger(self, show: Show) -> dict[str, Any]:
        ledgers = [result.ledger for result in self.results]
        reasons = sorted({reason for ledger in ledgers for reason in ledger.dropped})
        names = ("generated", "trained", "waiting", "generated_twice", "thrown_away")
        return {
            **{n: show(estimate([float(getattr(one, n)) for one in ledgers])) for n in names},
            "dropped": {
                reason: show(estimate([float(one.dropped.get(reason, 0)) for one in ledgers]))
                for reason in reasons
            },
        }

    def _closed_form(self, show: Show) -> dict[str, Any] | None:
        forms = [result.closed_form for result in self.results if result.closed_form is not None]
        if len(forms) < len(self.results):
            return None
        return {
            "before_queue": show(estimate([form.before_queue for form in forms])),
            "in_queue": show(estimate([form.in_queue for form in forms])),
        }

    def _engines(self, show: Show) -> dict[str, Any]:
        changes = [result.engines for result in self.results if result.engines is not None]
        return {
            "joined": show(estimate([float(one.joined) for one in changes])),
            "retired": show(estimate([float(one.retired) for one in changes])),
            "by_step": [
                show(estimate(step)) for step in zip(*(c.by_step for c in changes), strict=True)
            ],
        }

    def lag_shares(self, name: str) -> dict[int, Estimate]:
        """Share of each lag, ascending; `name` is `token`, `head` or `tail`."""
        histograms = [result.lags(name) for result in self.results]
        totals = [max(1, sum(histogram.values())) for histogram in histograms]
        return {
            lag: estimate([one.get(lag, 0) / n for one, n in zip(histograms, totals, strict=True)])
            for lag in sorted({lag for histogram in histograms for lag in histogram})
        }

    def _lag(self, show: Show, name: str) -> dict[str, Any]:
        histograms = [result.lags(name) for result in self.results]
        shares = self.lag_shares(name)
        return {
            "mean": show(estimate([mean_lag(histogram) for histogram in histograms])),
            "p95": show(estimate([float(lag_percentile(histogram)) for histogram in histograms])),
            "max": show(estimate([float(max(histogram, default=0)) for histogram in histograms])),
            "histogram": {str(lag): show(share) for lag, share in shares.items()},
        }

    def _shares(
        self, show: Show, of: Callable[[PoolShares], Mapping[str, float]]
    ) -> dict[str, dict[str, Any]]:
        shares: dict[str, dict[str, Any]] = {}
        for pool in self.results[0].pools:
            each = [of(result.pools[pool]) for result in self.results]
            names = dict.fromkeys(name for one in each for name in one)
            shares[pool] = {
                name: show(estimate([one.get(name, 0.0) for one in each])) for name in names
            }
        return shares


def _dollars(show: Show, costs: Sequence[Cost]) -> dict[str, Any] | None:
    if any(cost.dollars is None for cost in costs):
        return None
    return {
        name: show(estimate([getattr(cost, of) for cost in costs]))
        for name, of in (("low", "low"), ("typical", "dollars"), ("high", "high"))
    }


def _column(name: str) -> Callable[[SimulationResult], float]:
    return lambda result: result.mean(name)


def _count(name: str) -> Callable[[SimulationResult], float]:
    return lambda result: float(getattr(result.counts, name))


def _only_mean(value: Estimate) -> float:
    return value.mean


def ascending(counts: Mapping[int, int]) -> dict[int, int]:
    """A histogram in the order of its values."""
    return {value: counts[value] for value in sorted(counts)}


def columns_of(columns: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.float64]]:
    """Columns as read-only arrays."""
    arrays = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _share_above(lags: Mapping[int, int], versions: float) -> float:
    above = sum(times for lag, times in lags.items() if lag > versions)
    return above / max(1, sum(lags.values()))
