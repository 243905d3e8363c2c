"""The result of a plan: outcomes of candidates, the front, the recommendation and comparisons.

Hours and dollars are for all steps of the run: steps x the mean step after warm-up. `Estimate`s
have the 95 % interval over the seeds; `Prediction`s a 90 % interval that also contains the model's
error on measured runs (`simulator.report.measured_errors`). Both are factors, so no end is 0.

Pareto front of points with time, money and number of GPUs, which are all minimized.

Money is dollars, or GPU-hours of a GPU type if no price is known, which only compare with GPU-hours
of the same type.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from simulator.assembly.build import part_trainer
from simulator.assembly.check import longest_tokens
from simulator.assembly.engines import engines_of
from simulator.catalogue.gpu import GPU, Price, find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.economics import HOUR_S, Cost, PoolUse, interruption_factor, run_cost
from simulator.costs.training import TrainingCost, training_cost
from simulator.plan.schema import LimitsConfig, PlanConfig, PriceEntry
from simulator.plan.space import Candidate, Space
from simulator.plan.trial import Trial
from simulator.report.lags import Lag, lags_of
from simulator.report.measured_errors import Known, MeasuredErrors, kind_of, undecided
from simulator.report.notes import GENERATING, TRAIN_BOUND, bottleneck
from simulator.run.pools import MOVING_WEIGHTS
from simulator.stats.statistics import Estimate, Prediction, log_estimate, prediction

DOLLARS = "dollars"


class Point(NamedTuple):
    """Time, money and GPUs of a candidate."""

    hours: float
    money: float
    gpus: int
    unit: str = DOLLARS
    """Unit of money: `dollars`, or the type of GPU whose hours they are."""


Named = TypeVar("Named")


def dominates(one: Point, other: Point, *, slack: float = 0.0) -> bool:
    """Return whether one is at least as good as the other in everything, and better in something.

    Args:
        slack: fraction by which the other must be worse in both time and money; with slack, it is
            enough to be equal after that.
    """
    if one.unit != other.unit or one.gpus > other.gpus:
        return False
    longer, dearer = one.hours * (1 + slack), one.money * (1 + slack)
    if longer > other.hours or dearer > other.money:
        return False
    return slack > 0 or (one.hours, one.money, one.gpus) != (other.hours, other.money, other.gpus)


def front(points: Sequence[tuple[Named, Point]], *, slack: float = 0.0) -> list[Named]:
    """Points that no other one dominates, in the given order; with slack also points near them.

    Equal points all stay.
    """
    return [
        name
        for name, point in points
        if not any(dominates(other, point, slack=slack) for _, other in points)
    ]


def most_promising_first(points: Sequence[tuple[Named, Point]]) -> list[Named]:
    """All points, ordered by how many others dominate each: the front comes first."""
    ranks = [sum(dominates(other, point) for _, other in points) for _, point in points]
    order = sorted(range(len(points)), key=lambda place: ranks[place])
    return [points[place][0] for place in order]


class KnownErrors(NamedTuple):
    """Known errors of the model on runs of a candidate's kind."""

    step: Known
    """Error of the seconds per step, and so of hours and dollars."""
    gain: Known
    """Error of the gain of asynchrony."""


def known_errors(candidate: Candidate, errors: MeasuredErrors) -> KnownErrors:
    """Return the known errors of the model on runs of a candidate's kind."""
    kind = kind_of(candidate.config)
    return KnownErrors(step=errors.step(kind), gain=errors.gain(kind))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A simulated candidate."""

    candidate: Candidate
    trials: tuple[Trial, ...]
    """One per seed; all compared candidates have the same seeds."""
    steps: int
    """Steps of the whole run."""
    hourly: Cost
    """Cost of one hour of the cluster."""
    known: KnownErrors
    """Errors of predictions of measured runs of its kind."""
    pessimistic: bool = False
    """True if it is ranked, and held against limits, by the high end of its interval."""

    @property
    def hours(self) -> Estimate:
        """Hours of the whole run."""
        return log_estimate(self._hours)

    @property
    def predicted_hours(self) -> Prediction:
        """Hours of the whole run; with one seed, the interval is that of the model's error
        alone."""
        return prediction(self._hours, self.known.step.error)

    @property
    def predicted_gpu_hours(self) -> Prediction:
        """GPU-hours of the whole run."""
        return self.predicted_hours.times(self.candidate.gpus)

    @property
    def predicted_dollars(self) -> Prediction | None:
        """Dollars of the whole run at typical prices; None if a price is unknown."""
        dollars = self.hourly.dollars
        return None if dollars is None else self.predicted_hours.times(dollars)

    @property
    def _hours(self) -> list[float]:
        return [trial.step_s * self.steps / HOUR_S for trial in self.trials]

    @property
    def ranked_hours(self) -> float:
        """Hours by which it is ranked: the mean, or the high end of the interval."""
        return self.predicted_hours.high if self.pessimistic else self.hours.mean

    @property
    def gpu_hours(self) -> Estimate:
        """GPU-hours of the whole run."""
        return times(self.hours, self.candidate.gpus)

    @property
    def dollars(self) -> Estimate | None:
        """Dollars of the whole run at typical prices; None if a price is unknown."""
        return None if self.hourly.dollars is None else times(self.hours, self.hourly.dollars)

    @property
    def point(self) -> Point:
        """Hours and money by which it is ranked, for the front."""
        return point_of(self.ranked_hours, self.candidate, self.hourly)

    @property
    def limit(self) -> str:
        """Bottleneck of the run."""
        return limit_of(self.trials)

    @property
    def trainer_share(self) -> float:
        """Share of the training GPUs' time in which they train."""
        return trainer_share(self.trials)

    @property
    def engine_share(self) -> float:
        """Share of the generating GPUs' time in which they generate."""
        return engine_share(self.trials)

    @property
    def staleness(self) -> dict[str, float]:
        """Lags in versions and the share of tokens thrown away, as `SimulationResult.staleness`
        has them; means over the seeds."""
        return {
            name: sum(trial.staleness[name] for trial in self.trials) / len(self.trials)
            for name in self.trials[0].staleness
        }

    @property
    def lags(self) -> dict[str, Lag] | None:
        """Mean and 95th percentile of the lag of first tokens with their 90 % intervals; None where
        no closed form says what moves it."""
        idle, staleness = ([getattr(one, n) for one in self.trials] for n in ("idle", "staleness"))
        return lags_of(self.candidate.config, idle, staleness, self.known.step.error)

    def meets(self, limits: LimitsConfig) -> bool:
        """Return whether it is within deadline and budget; unknown money exceeds any budget."""
        dollars = self.rank("dollars")
        return self.ranked_hours <= limits.deadline_h and dollars <= limits.budget_dollars

    def value(self, objective: str) -> float:
        """The mean of what is minimized; unknown money is infinite."""
        return self._at(self.hours.mean, objective)

    def rank(self, objective: str) -> float:
        """Value by which it is ranked: the mean, or the high end of the interval."""
        return self._at(self.ranked_hours, objective)

    def _at(self, hours: float, objective: str) -> float:
        dollars = self.hourly.dollars
        return {
            "gpus": float(self.candidate.gpus),
            "hours": hours,
            "dollars": math.inf if dollars is None else hours * dollars,
        }[objective]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """The best synchronous and the best asynchronous candidate on the same GPUs."""

    synchronous: Outcome
    asynchronous: Outcome

    @property
    def ratio(self) -> Estimate:
        """Time of the synchronous one over the asynchronous one's, seed by seed."""
        return log_estimate(self._ratios)

    @property
    def predicted_ratio(self) -> Prediction:
        """Ratio with the model's error on measured gains of asynchrony."""
        return prediction(self._ratios, self.asynchronous.known.gain.error)

    @property
    def pays(self) -> bool | None:
        """True if asynchrony is faster, and by at least 2 %.

        None if the interval with the model's error contains 1: it is undecided.
        """
        ratio = self.predicted_ratio
        if undecided(ratio.low, ratio.high):
            return None
        return ratio.value >= 1 + LEAST_GAIN

    @property
    def needs_seeds(self) -> bool:
        """True if the interval over the seeds alone contains a gain of 2 % and a loss."""
        ratio = self.ratio
        return math.isfinite(ratio.high) and ratio.low <= 1 < 1 + LEAST_GAIN <= ratio.high

    @property
    def _ratios(self) -> list[float]:
        pairs = zip(self.synchronous.trials, self.asynchronous.trials, strict=True)
        return [slow.step_s / fast.step_s for slow, fast in pairs]


LEAST_GAIN = 0.02
"""A smaller gain is no reason to train on stale responses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class End:
    """The finalists with one input at one end of its range."""

    value: str
    """The input's value, with its unit."""
    outcomes: tuple[Outcome, ...]
    """Outcomes of the finalists that can be simulated with it, in their order."""
    best: Outcome | None
    """The best of them; None if none is within the limits."""
    why_not: str = ""
    """Why the recommendation cannot be simulated with it; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Input:
    """One input, varied between the ends of its range."""

    name: str
    value: str
    """The assumed value."""
    source: str
    """Source of the range."""
    low: End
    high: End


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sensitivity:
    """Sensitivity of the recommendation to its inputs, one at a time; largest effect first."""

    base: Outcome
    """The recommendation, simulated with the seed of the sensitivity analysis."""
    finalists: int
    inputs: tuple[Input, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One of the clusters that the plan asks about, or of the staleness bounds or kinds on one."""

    name: str
    """The GPUs in words, the bound as `eta 4`, or a `Candidate.kind`."""
    outcome: Outcome | None
    """The best one that was simulated; None if all were excluded by their lower bounds."""
    seeds: int
    """Repetitions of its simulation; 0 without one."""
    least_hours: float
    """Lower bound of its hours in closed form."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The whole result of a search."""

    config: PlanConfig
    space: Space
    screened: tuple[Outcome, ...]
    """Simulated with one seed and few steps."""
    outcomes: tuple[Outcome, ...]
    """Simulated with all seeds."""
    front: tuple[Outcome, ...]
    """Outcomes that no other one beats in hours, money and GPUs; fewest GPUs first."""
    best: Outcome | None
    """The recommendation: the best by the objective, within the limits; None without one."""
    comparisons: tuple[Comparison, ...] = ()
    sensitivity: Sensitivity | None = None
    simulations: int = 0
    least_hours: Mapping[int, float] = field(default_factory=dict)
    """Lower bound of each candidate's hours by its number, in closed form."""
    errors: MeasuredErrors
    """Errors of predictions of measured runs, which the intervals contain."""
    waiting: frozenset[int] = frozenset()
    """Numbers of the candidates that the search had not reached when it was stopped."""
    stopped_in: str = ""
    """The stage in which it was stopped; empty if it is complete."""

    @property
    def bounded(self) -> int:
        """Candidates that are not simulated, because a simulated one beats their lower bound."""
        return len(self.space.possible) - len(self.screened) - len(self.waiting)

    @property
    def clusters(self) -> list[Option]:
        """One option per cluster that the plan asks about, dominated ones too."""
        by_cluster: dict[str, list[Candidate]] = {}
        for one in self.space.possible:
            by_cluster.setdefault(one.hardware, []).append(one)
        return [self._option(name, found) for name, found in by_cluster.items()]

    @property
    def etas(self) -> list[Option]:
        """One option per staleness bound on the recommended cluster; empty without one."""
        found = self._on_recommended(lambda one: one.eta)
        return [self._option(f"eta {eta:g}", found[eta]) for eta in sorted(found)]

    @property
    def kinds(self) -> list[Option]:
        """One option per way to share the GPUs of the recommended cluster between generation and
        training, each with its best layout; empty without a recommendation."""
        found = self._on_recommended(lambda one: one.kind)
        return [self._option(name, of_kind) for name, of_kind in found.items()]

    def _on_recommended(self, name: Callable[[Candidate], Named]) -> dict[Named, list[Candidate]]:
        """Candidates on the recommended cluster by a name; empty without a recommendation."""
        found: dict[Named, list[Candidate]] = {}
        for one in self.space.possible if self.best else ():
            if self.best and one.cluster == self.best.candidate.cluster:
                found.setdefault(name(one), []).append(one)
        return found

    def _option(self, name: str, candidates: Sequence[Candidate]) -> Option:
        numbers = {one.number for one in candidates}
        for found in (self.outcomes, self.screened):
            here = [one for one in found if one.candidate.number in numbers]
            if here:
                objective = self.config.objective
                kept = [one for one in here if one.meets(self.config.limits)] or here
                best = min(kept, key=lambda one: (one.rank(objective), one.ranked_hours))
                return Option(
                    name=name, outcome=best, seeds=len(best.trials), least_hours=best.hours.mean
                )
        least = min((self.least_hours.get(number, math.nan) for number in numbers), default=0.0)
        return Option(name=name, outcome=None, seeds=0, least_hours=least)

    def comparable_best(self, other: Outcome) -> Outcome:
        """The recommendation, simulated as the other one: few steps are biased while it fills."""
        assert self.best is not None
        if any(one is other for one in self.screened):
            number = self.best.candidate.number
            return next((one for one in self.screened if one.candidate.number == number), self.best)
        return self.best

    @property
    def settled(self) -> bool:
        """True if the front and the recommendation are final, though the search may be stopped."""
        return self.stopped_in in ("", "comparison", "sensitivity")

    @property
    def gentler(self) -> Outcome | None:
        """The least stale outcome on the same GPUs within 2 % of the recommendation."""
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
    """Hours, money and GPUs of a candidate that takes `hours`."""
    if hourly.dollars is None:
        cluster = candidate.config.cluster
        unit = f"GPU-hours of {cluster.gpu} {cluster.rollout_gpu}".rstrip()
        return Point(hours, hours * candidate.gpus, candidate.gpus, unit)
    return Point(hours, hours * hourly.dollars, candidate.gpus, DOLLARS)


def best_of(outcomes: Sequence[Outcome], objective: str, limits: LimitsConfig) -> Outcome | None:
    """The best outcome by the objective within the limits; among equals, the fastest."""
    kept = [one for one in outcomes if one.meets(limits) and math.isfinite(one.rank(objective))]
    return min(
        kept,
        key=lambda one: (
            one.rank(objective),
            one.ranked_hours,
            one.candidate.gpus,
            one.candidate.eta,
        ),
        default=None,
    )


def hourly_cost(candidate: Candidate, prices: Sequence[PriceEntry]) -> Cost:
    """One hour of a candidate's cluster; own prices come before the catalogue's."""
    cluster = candidate.config.cluster
    uses = [
        PoolUse(name=name, gpu=_priced(gpu, prices), gpus=gpus, seconds=HOUR_S, utilization=1.0)
        for name, gpu, gpus in _pools(candidate)
    ]
    return run_cost(uses, price_per_gpu_h=cluster.price_per_gpu_h, overhead=cluster.overhead)


def _pools(candidate: Candidate) -> list[tuple[str, GPU, int]]:
    """Name, type and number of GPUs of each pool that has some."""
    cluster = candidate.config.cluster
    trains, generates = find_gpu(cluster.gpu), find_gpu(cluster.generating_gpu)
    pools = (
        ("training", trains, cluster.training_gpus),
        ("rollout", generates, cluster.gpus - cluster.training_gpus),
    )
    return [pool for pool in pools if pool[2]]


class Nodes(NamedTuple):
    """Nodes of one type of GPU."""

    gpu: GPU
    nodes: float
    """A fraction if the last one is not used whole."""


def nodes_of(candidate: Candidate) -> dict[str, Nodes]:
    """Nodes of each type of GPU, by its name."""
    nodes: dict[str, Nodes] = {}
    for _, gpu, gpus in _pools(candidate):
        count = gpus / gpu.node_gpus + (nodes[gpu.name].nodes if gpu.name in nodes else 0)
        nodes[gpu.name] = Nodes(gpu, count)
    return nodes


class OtherPrice(NamedTuple):
    """A run at reserved or spot prices, as expected."""

    name: str
    """`reserved` or `spot`."""
    dollars: float
    factor: float
    """Time over that without interruptions."""
    interruptions_per_h: float
    """Interruptions of the whole cluster, in an hour of its time."""


def other_prices(one: Outcome, prices: Sequence[PriceEntry]) -> list[OtherPrice]:
    """Expected cost at the reserved and the spot prices of the plan file.

    A kind of price is left out unless every type of GPU of the candidate has one.
    """
    by_gpu = {find_gpu(entry.gpu).name: entry for entry in reversed(prices)}
    nodes, config = nodes_of(one.candidate), one.candidate.config
    found = []
    for name in ("reserved", "spot"):
        per_h: dict[str, float | None] = {
            gpu: getattr(by_gpu.get(gpu), name, None) for gpu in nodes
        }
        known = {gpu: price for gpu, price in per_h.items() if price is not None}
        if len(known) < len(nodes):
            continue
        hourly = sum(gpus * known[gpu.name] for _, gpu, gpus in _pools(one.candidate))
        hourly *= 1 + config.cluster.overhead
        rate, restart_h = 0.0, 0.0
        if name == "spot":
            taken = {
                gpu: by_gpu[gpu].interruptions_per_day / 24 * math.ceil(one_type.nodes - 1e-9)
                for gpu, one_type in nodes.items()
            }
            rate = sum(taken.values())
            if rate:
                restart_h = (
                    sum(taken[gpu] * (by_gpu[gpu].restart_s or 0.0) for gpu in nodes)
                    / rate
                    / HOUR_S
                )
        checkpoint_h = config.outside.checkpoint_steps * one.hours.mean / one.steps
        factor = interruption_factor(per_h=rate, checkpoint_h=checkpoint_h, restart_h=restart_h)
        found.append(OtherPrice(name, hourly * one.hours.mean * factor, factor, rate))
    return found


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


BOTH_FULL = "both sides full"
"""Bottleneck of a split whose engines are as busy as its trainer."""
_FULL = 0.9
"""Share of the engines' time from which they count as always busy, as of the trainer's."""


def limit_of(trials: Sequence[Trial]) -> str:
    """The bottleneck, from the mean shares over the seeds; `BOTH_FULL` if neither side waits."""
    limit = bottleneck({pool: _mean_shares(trials, pool) for pool in trials[0].busy})
    if limit == TRAIN_BOUND and engine_share(trials) >= _FULL:
        return BOTH_FULL
    return limit


class Memory(NamedTuple):
    """Bytes by part on the fullest GPU of one side, and how many the GPU has."""

    side: str
    """`training` or `generation`."""
    parts: Mapping[str, float]
    available: float

    @property
    def free(self) -> float:
        """Bytes that no part takes."""
        return self.available - sum(self.parts.values())


def memory_of(candidate: Candidate) -> list[Memory]:
    """Memory of both sides; without training if its step is given as seconds.

    An engine takes `rollout.memory_utilization` of a GPU: what its weights leave is the cache.
    """
    config = candidate.config
    cluster, model = config.cluster, find_model(config.model)
    longest, gpu = longest_tokens(config.workload), find_gpu(cluster.gpu)
    training = training_cost(
        part_trainer(config.trainer, config.batch_parts),
        model,
        gpu,
        cluster.training_gpus,
        longest_tokens=longest,
    )
    found = []
    if isinstance(training, TrainingCost):
        dynamic = config.trainer.dynamic_batching
        held = training.memory(config.trainer.micro_batch_tokens if dynamic else longest)
        parts = {name: getattr(held, name) for name in _TRAINING_PARTS}
        found.append(Memory("training", parts, gpu.memory_bytes))
    engines = engines_of(config)
    taken = config.rollout.memory_utilization * engines.gpu.memory_bytes
    weights = engines.weight_bytes
    parts = {"weights": weights, "cache": taken - weights}
    found.append(Memory("generation", parts, engines.gpu.memory_bytes))
    return found


_TRAINING_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "reserved")
"""Fields of `TrainingMemory` that add up to its total."""


def trainer_share(trials: Sequence[Trial]) -> float:
    """Share of time in which the training GPUs train."""
    pool = next(name for name in ("all", "training", "hybrid") if name in trials[0].busy)
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
    """Share of time in which the generating GPUs generate."""
    pool = next(name for name in ("all", "rollout", "hybrid") if name in trials[0].busy)
    busy = [sum(trial.busy[pool].get(name, 0.0) for name in GENERATING) for trial in trials]
    return sum(busy) / len(busy)


def _mean_shares(trials: Sequence[Trial], pool: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for trial in trials:
        for name, share in (*trial.busy[pool].items(), *trial.idle[pool].items()):
            shares[name] = shares.get(name, 0.0) + share / len(trials)
    return shares
