"""What a plan finds: candidates with their time and money, the front, the answer, the comparisons.

Hours and dollars are of all steps of the run: steps x the mean step after the pipeline has filled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.gpu import GPU, Price
from simulator.costs.economics import HOUR_S, Cost, PoolUse, run_cost
from simulator.plan.schema import LimitsConfig, PlanConfig, PriceEntry
from simulator.plan.space import Candidate, Space
from simulator.plan.trial import Trial
from simulator.report.bottleneck import GENERATING, bottleneck
from simulator.run.pools import MOVING_WEIGHTS
from simulator.stats.pareto import DOLLARS, Point
from simulator.stats.statistics import Estimate, estimate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A candidate that was simulated."""

    candidate: Candidate
    trials: tuple[Trial, ...]
    """One per seed; seeds are the same for all candidates that are compared."""
    steps: int
    """Of the whole run."""
    hourly: Cost
    """One hour of the cluster."""

    @property
    def hours(self) -> Estimate:
        """Of the whole run."""
        return estimate([trial.step_s * self.steps / HOUR_S for trial in self.trials])

    @property
    def gpu_hours(self) -> Estimate:
        """Of the whole run."""
        return times(self.hours, self.candidate.gpus)

    @property
    def dollars(self) -> Estimate | None:
        """At typical prices; None where one is not known."""
        return None if self.hourly.dollars is None else times(self.hours, self.hourly.dollars)

    @property
    def point(self) -> Point:
        """Its means, for the front."""
        return point_of(self.hours.mean, self.candidate, self.hourly)

    @property
    def limit(self) -> str:
        """What holds it up."""
        return limit_of(self.trials)

    @property
    def trainer_share(self) -> float:
        """Of the training GPUs' time in which they train."""
        return trainer_share(self.trials)

    @property
    def engine_share(self) -> float:
        """Of the generating GPUs' time in which they generate."""
        return engine_share(self.trials)

    def meets(self, limits: LimitsConfig) -> bool:
        """Whether its means keep to deadline and budget; unknown money keeps to no budget."""
        return self.hours.mean <= limits.deadline_h and self._dollars <= limits.budget_dollars

    def value(self, objective: str) -> float:
        """What is to be least; unknown money is infinite."""
        return {
            "gpus": float(self.candidate.gpus),
            "hours": self.hours.mean,
            "dollars": self._dollars,
        }[objective]

    @property
    def _dollars(self) -> float:
        return math.inf if self.dollars is None else self.dollars.mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """The best synchronous and the best asynchronous candidate on the same GPUs."""

    synchronous: Outcome
    asynchronous: Outcome

    @property
    def ratio(self) -> Estimate:
        """Time of the synchronous one over the other's, seed by seed."""
        pairs = zip(self.synchronous.trials, self.asynchronous.trials, strict=True)
        return estimate([slow.step_s / fast.step_s for slow, fast in pairs])

    @property
    def pays(self) -> bool | None:
        """Whether asynchrony is clearly faster: by 2 % at least, and beyond chance.

        None where the interval has room for such a gain and for a loss: the seeds cannot tell.
        """
        ratio = self.ratio
        if math.isfinite(ratio.low) and ratio.low <= 1 < 1 + LEAST_GAIN <= ratio.high:
            return None
        surely = ratio.low > 1 or not math.isfinite(ratio.low)
        return surely and ratio.mean >= 1 + LEAST_GAIN


LEAST_GAIN = 0.02
"""What is less is no reason to train on stale answers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class End:
    """The finalists under one changed input."""

    value: str
    """Of the input, with its unit."""
    outcomes: tuple[Outcome, ...]
    """Those that can be simulated so, in the order of the finalists."""
    best: Outcome | None
    """Of them; None if none keeps to the limits any more."""
    why_not: str = ""
    """Why the answer itself cannot be simulated so; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Input:
    """One input at either end of what it may be."""

    name: str
    value: str
    """As it is."""
    source: str
    """Where the ends come from."""
    low: End
    high: End


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sensitivity:
    """How the answer depends on the inputs, one at a time; the largest effect first."""

    base: Outcome
    """The answer, with the seed that the inputs are tried with."""
    finalists: int
    inputs: tuple[Input, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """All that was found."""

    config: PlanConfig
    space: Space
    screened: tuple[Outcome, ...]
    """Simulated once, coarsely."""
    outcomes: tuple[Outcome, ...]
    """Simulated with all seeds."""
    front: tuple[Outcome, ...]
    """Of them, those that no other beats in hours, money and GPUs; fewest GPUs first."""
    best: Outcome | None
    """By the objective, within the limits."""
    comparisons: tuple[Comparison, ...] = ()
    sensitivity: Sensitivity | None = None
    simulations: int = 0

    @property
    def bounded(self) -> int:
        """Candidates left out because something simulated is better than they can be."""
        return len(self.space.possible) - len(self.screened)

    @property
    def gentler(self) -> Outcome | None:
        """As good as the answer within 2 % on the same GPUs, with less staleness; the least."""
        if self.best is None:
            return None
        return min(
            (
                one
                for one in self.outcomes
                if one.candidate.cluster == self.best.candidate.cluster
                and one.candidate.eta < self.best.candidate.eta
                and one.hours.mean <= self.best.hours.mean * (1 + LEAST_GAIN)
                and one.meets(self.config.limits)
            ),
            key=lambda one: (one.candidate.eta, one.hours.mean),
            default=None,
        )


def times(value: Estimate, factor: float) -> Estimate:
    """A multiple of an estimate."""
    return Estimate(value.mean * factor, value.low * factor, value.high * factor)


def point_of(hours: float, candidate: Candidate, hourly: Cost) -> Point:
    """Where a candidate lies that takes so long."""
    if hourly.dollars is None:
        cluster = candidate.config.cluster
        unit = f"GPU-hours of {cluster.gpu} {cluster.rollout_gpu}".rstrip()
        return Point(hours, hours * candidate.gpus, candidate.gpus, unit)
    return Point(hours, hours * hourly.dollars, candidate.gpus, DOLLARS)


def best_of(outcomes: Sequence[Outcome], objective: str, limits: LimitsConfig) -> Outcome | None:
    """The least by the objective that keeps to the limits; of equal ones the fastest."""
    kept = [one for one in outcomes if one.meets(limits) and math.isfinite(one.value(objective))]
    return min(
        kept,
        key=lambda one: (
            one.value(objective),
            one.hours.mean,
            one.candidate.gpus,
            one.candidate.eta,
        ),
        default=None,
    )


def hourly_cost(candidate: Candidate, prices: Sequence[PriceEntry]) -> Cost:
    """One hour of a candidate's cluster; own prices come before the catalogue's."""
    cluster = candidate.config.cluster
    trains, generates = find_gpu(cluster.gpu), find_gpu(cluster.generating_gpu)
    uses = [
        PoolUse(name=name, gpu=_priced(gpu, prices), gpus=gpus, seconds=HOUR_S, utilization=1.0)
        for name, gpu, gpus in (
            ("training", trains, cluster.training_gpus),
            ("rollout", generates, cluster.gpus - cluster.training_gpus),
        )
        if gpus
    ]
    return run_cost(uses, price_per_gpu_h=cluster.price_per_gpu_h, overhead=cluster.overhead)


def _priced(gpu: GPU, prices: Sequence[PriceEntry]) -> GPU:
    for entry in prices:
        if find_gpu(entry.gpu).name == gpu.name:
            price = Price(
                low=entry.typical if entry.low is None else entry.low,
                typical=entry.typical,
                high=entry.typical if entry.high is None else entry.high,
                source="the plan file's prices",
                date="",
            )
            return dataclasses.replace(gpu, price=price)
    return gpu


def limit_of(trials: Sequence[Trial]) -> str:
    """What `simulator.report.bottleneck` says of the mean over the seeds."""
    return bottleneck({pool: _mean_shares(trials, pool) for pool in trials[0].busy})


def trainer_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that train do so."""
    pool = "all" if "all" in trials[0].busy else "training"
    busy = [
        sum(
            share
            for name, share in trial.busy[pool].items()
            if name not in MOVING_WEIGHTS and name not in GENERATING
        )
        for trial in trials
    ]
    return sum(busy) / len(busy)


def engine_share(trials: Sequence[Trial]) -> float:
    """Share of the time in which GPUs that generate do so."""
    pool = "all" if "all" in trials[0].busy else "rollout"
    busy = [sum(trial.busy[pool].get(name, 0.0) for name in GENERATING) for trial in trials]
    return sum(busy) / len(busy)


def _mean_shares(trials: Sequence[Trial], pool: str) -> dict[str, float]:
    """Busy and idle shares of a pool by name, mean over the seeds."""
    shares: dict[str, float] = {}
    for trial in trials:
        for name, share in (*trial.busy[pool].items(), *trial.idle[pool].items()):
            shares[name] = shares.get(name, 0.0) + share / len(trials)
    return shares
