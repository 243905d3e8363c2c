"""What a simulation says: a row per step, where the time went, how old tokens were, what it cost.

    drive --> SimulationResult (one seed) --> Replicated (all seeds, with 95 % intervals) --> JSON

Averages are over the steps after warm-up. Throughput counts tokens that were trained on, nothing
else. Utilization and idleness are shares of a pool's time, with the names of
`areal_lab.control.activity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.eventlog import finite_json
from simulator.pools import PoolUse
from simulator.statistics import Estimate, estimate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often what happened; after warm-up where it says so."""

    started: int
    """Groups whose number was handed out, over the whole run."""
    trained: int
    """Groups given to the trainer."""
    unfinished: int
    """Groups that ran, or waited to be trained on, when the simulated steps were over."""
    dropped: int
    """Groups that the batch order gave up."""
    generated_tokens: int
    """After warm-up."""
    recomputed_tokens: int
    """Tokens whose cache was built again, after an interruption or a preemption; after warm-up."""
    preemptions: int
    """Sequences that lost their place for lack of cache; after warm-up."""
    interruptions: int
    """Times that all engines were paused; after warm-up."""
    engine_losses: int
    trainer_restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """One simulated run of one seed."""

    name: str
    seed: int
    columns: Mapping[str, NDArray[np.float64]]
    """By name, one value per step; `simulator.book.COLUMNS` says what they are."""
    warmup_steps: int
    pools: Mapping[str, PoolUse]
    """`rollout` and `training`, or `all` where the same GPUs do both; after warm-up."""
    token_lags: Mapping[int, int]
    """Trained tokens by lag in versions, ascending; after warm-up."""
    head_lags: Mapping[int, int]
    """Samples by the lag of their first token."""
    tail_lags: Mapping[int, int]
    """Samples by the lag of their last token."""
    counts: Counts
    gpus: int
    dollars: tuple[float | None, float | None, float | None]
    """Of all simulated steps: low, typical and high; None where no price is known."""
    energy_kwh: float
    """Of all simulated steps."""

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

    def mean(self, column: str) -> float:
        """Mean of a column over the steps after warm-up."""
        return float(self.columns[column][self.warmup_steps :].mean())

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step, warm-up included; the index counts from 1."""
        import pandas as pd

        steps = len(self.columns["end_s"])
        return pd.DataFrame(dict(self.columns), index=pd.RangeIndex(1, steps + 1, name="step"))

    def to_json(self) -> dict[str, Any]:
        """The contract's names, with plain numbers: one seed has no intervals."""
        return Replicated(results=(self,)).to_json(_only_mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """The same simulation with several seeds."""

    results: tuple[SimulationResult, ...]

    def estimate(self, value: Callable[[SimulationResult], float]) -> Estimate:
        """Mean and interval of any number of a result."""
        return estimate([value(result) for result in self.results])

    def ratio(self, other: Replicated, value: Callable[[SimulationResult], float]) -> Estimate:
        """This over `other`, seed by seed: common random numbers cancel in each quotient.

        Raises:
            ValueError: if the seeds are not the same.
        """
        seeds, others = ([r.seed for r in both.results] for both in (self, other))
        if seeds != others:
            raise ValueError(f"seeds {seeds} and {others} differ; compare runs of the same seeds")
        pairs = zip(self.results, other.results, strict=True)
        return estimate([value(mine) / value(theirs) for mine, theirs in pairs])

    @property
    def step_s(self) -> Estimate:
        """Seconds per training step."""
        return self.estimate(lambda result: result.step_s)

    @property
    def tokens_per_s(self) -> Estimate:
        """Effective throughput."""
        return self.estimate(lambda result: result.tokens_per_s)

    def utilization(self, pool: str) -> Estimate:
        """Share of a pool's time spent generating or training."""
        return self.estimate(lambda result: result.pools[pool].utilization)

    def to_json(self, show: Callable[[Estimate], Any] = Estimate.to_json) -> dict[str, Any]:
        """The output contract of `areal-lab simulate --json`: everything with its interval."""

        def told(value: Callable[[SimulationResult], float]) -> Any:
            return show(self.estimate(value))

        first = self.results[0]
        steps = len(first.columns["end_s"])
        return dict(
            finite_json(
                {
                    "name": first.name,
                    "gpus": first.gpus,
                    "steps": steps,
                    "warmup_steps": first.warmup_steps,
                    "seeds": [result.seed for result in self.results],
                    "step_s": told(lambda r: r.step_s),
                    "tokens_per_s": told(lambda r: r.tokens_per_s),
                    "tokens_per_s_per_gpu": told(lambda r: r.tokens_per_s / r.gpus),
                    "parts": {
                        name: told(lambda r, name=name: r.mean(name))  # type: ignore[misc]
                        for name in ("train_s", "export_s", "wait_s", "update_s", "generate_s")
                    },
                    "utilisation": {
                        pool: told(lambda r, pool=pool: r.pools[pool].utilization)  # type: ignore[misc]
                        for pool in first.pools
                    },
                    "busy": self._shares(show, lambda use: use.busy),
                    "idle": self._shares(show, lambda use: use.idle),
                    "lag": {
                        name: {
                            "mean": told(lambda r, name=name: mean_lag(_lags(r, name))),  # type: ignore[misc]
                            "max": told(lambda r, name=name: max(_lags(r, name), default=0)),  # type: ignore[misc]
                            "histogram": self._histogram(name),
                        }
                        for name in ("token", "head", "tail")
                    },
                    "counts": {
                        name: told(lambda r, name=name: getattr(r.counts, name))  # type: ignore[misc]
                        for name in Counts.__slots__
                    },
                    "cost": {
                        "dollars_per_step": self._dollars(show),
                        "gpu_h_per_step": told(lambda r: r.gpus * r.makespan_s / 3600 / steps),
                    },
                    "energy": {"kwh_per_step": told(lambda r: r.energy_kwh / steps)},
                }
            )
        )

    def _shares(
        self, show: Callable[[Estimate], Any], of: Callable[[PoolUse], Mapping[str, float]]
    ) -> dict[str, dict[str, Any]]:
        shares: dict[str, dict[str, Any]] = {}
        for pool in self.results[0].pools:
            uses = [of(result.pools[pool]) for result in self.results]
            names = dict.fromkeys(name for use in uses for name in use)
            shares[pool] = {
                name: show(estimate([use.get(name, 0.0) for use in uses])) for name in names
            }
        return shares

    def _histogram(self, name: str) -> dict[str, float]:
        """Shares by lag, over all seeds."""
        total: dict[int, int] = {}
        for result in self.results:
            for lag, count in _lags(result, name).items():
                total[lag] = total.get(lag, 0) + count
        everything = sum(total.values())
        return {str(lag): total[lag] / everything for lag in sorted(total)}

    def _dollars(self, show: Callable[[Estimate], Any]) -> dict[str, Any]:
        steps = len(self.results[0].columns["end_s"])
        told: dict[str, Any] = {}
        for number, name in enumerate(("low", "typical", "high")):
            dollars = [result.dollars[number] for result in self.results]
            known = [one / steps for one in dollars if one is not None]
            told[name] = show(estimate(known)) if len(known) == len(dollars) else None
        return told


def mean_lag(lags: Mapping[int, int]) -> float:
    """Mean of a histogram of lags."""
    count = sum(lags.values())
    return sum(lag * times for lag, times in lags.items()) / count if count else 0.0


def _lags(result: SimulationResult, name: str) -> Mapping[int, int]:
    lags: Mapping[int, int] = getattr(result, f"{name}_lags")
    return lags


def _only_mean(value: Estimate) -> float:
    return value.mean


def ascending(counts: Mapping[int, int]) -> dict[int, int]:
    """A histogram in the order of its values."""
    return {value: counts[value] for value in sorted(counts)}


def columns_of(columns: Mapping[str, Sequence[float]]) -> dict[str, NDArray[np.float64]]:
    """Columns as arrays that cannot be written to."""
    arrays = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
