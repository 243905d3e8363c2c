"""The search of a plan: from a plan file to the front, the recommendation and its sensitivity.

    candidates --closed form--> lower bound of each one's hours
      --screen, most promising first--> one seed, few steps; skip candidates that cannot win
      --evaluate near the front--> all seeds --> front, recommendation
      --on the same GPUs--> best synchronous against best asynchronous
      --one input at a time--> sensitivity

All candidates have the same random numbers. Rounds have the same size for any number of processes,
so that the result does not depend on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from simulator.costs.economics import HOUR_S, Cost
from simulator.plan.bound import least_step_s
from simulator.plan.measured import check_measured
from simulator.plan.result import (
    Comparison,
    Outcome,
    Plan,
    best_of,
    hourly_cost,
    point_of,
)
from simulator.plan.schema import PlanConfig
from simulator.plan.sensitivity import sensitivity
from simulator.plan.space import Candidate, Space, expand
from simulator.plan.trial import Job, Progress, Run, Silent, Trial, run_here, shortened
from simulator.stats.pareto import dominates, front, most_promising_first

_ROUND: Final = 24
"""Candidates that are simulated before those that cannot win are skipped again."""
_RIVALS: Final = 4
"""The same for the search of the fastest candidate of one cluster."""
_BOUND_SLACK: Final = 0.97
"""Factor on the lower bound: the simulation may draw shorter lengths."""
_ALIKE: Final = 2
"""How many synchronous, and asynchronous, candidates of one cluster are evaluated."""

Bound = Callable[[Candidate], float]
"""Least seconds of a training step."""


def find_plan(
    config: PlanConfig,
    run: Run = run_here,
    *,
    progress: Progress | None = None,
    bound: Bound = lambda candidate: least_step_s(candidate.config),
) -> Plan:
    """Search the candidates of a plan file.

    Args:
        run: performs simulations; `simulator.plan.trial.workers` makes one that uses several
            processes.
        bound: least seconds of a candidate's training step.

    Raises:
        ValueError: the plan needs a price that is unknown, or candidates differ in something that a
            measured number of the base depends on.
    """
    search = _Search(config, run, progress or Silent(), bound)
    space = expand(config)
    check_measured(config, space.possible)
    _check_prices(config, [search.hourly(one) for one in space.possible], space)
    search.screen(space.possible)
    search.evaluate(_worth_evaluating(search.screened.values(), config))
    found = _without_duplicates(front([(one, one.point) for one in search.evaluated.values()]))
    found.sort(key=lambda one: (one.candidate.gpus, one.hours.mean, one.candidate.number))
    best = best_of(tuple(search.evaluated.values()), config.objective, config.limits)
    chosen = best or (found[0] if found else None)
    comparisons = search.compare(chosen, found, space.possible) if chosen else ()
    sensitive = None
    if best is not None and config.search.sensitivity:
        finalists = nearest_to(best, search.evaluated.values(), config.search.sensitivity)
        sensitive = sensitivity(config, best, finalists, search.run_jobs, search.progress)
    return Plan(
        config=config,
        space=space,
        screened=tuple(search.screened.values()),
        outcomes=tuple(search.evaluated.values()),
        front=tuple(found),
        best=best,
        comparisons=comparisons,
        sensitivity=sensitive,
        simulations=search.simulations,
    )


def nearest_to(best: Outcome, outcomes: Iterable[Outcome], count: int) -> list[Outcome]:
    """The recommendation, then the outcomes nearest to it in time and number of GPUs, by ratios."""

    def distance(one: Outcome) -> tuple[float, int]:
        hours = abs(math.log(one.hours.mean / best.hours.mean))
        return (
            hours + abs(math.log(one.candidate.gpus / best.candidate.gpus)),
            one.candidate.number,
        )

    others = sorted((one for one in outcomes if one is not best), key=distance)
    return [best, *others[: count - 1]]


class _Search:
    """Outcomes so far, by candidate number."""

    def __init__(self, config: PlanConfig, run: Run, progress: Progress, bound: Bound) -> None:
        self.progress = progress
        self.screened: dict[int, Outcome] = {}
        self.evaluated: dict[int, Outcome] = {}
        self.simulations = 0
        self._config = config
        self._run = run
        self._bound = bound
        self._hourly: dict[int, Cost] = {}
        self._least_h: dict[int, float] = {}

    def hourly(self, candidate: Candidate) -> Cost:
        """Cost of one hour of a candidate's cluster."""
        if candidate.number not in self._hourly:
            self._hourly[candidate.number] = hourly_cost(candidate, self._config.prices)
        return self._hourly[candidate.number]

    def least_hours(self, candidate: Candidate) -> float:
        """Lower bound for the whole run, by the closed form."""
        if candidate.number not in self._least_h:
            seconds = _BOUND_SLACK * self._bound(candidate) * self._config.steps
            self._least_h[candidate.number] = seconds / HOUR_S
        return self._least_h[candidate.number]

    def run_jobs(self, jobs: Sequence[Job]) -> Iterator[Trial]:
        """Perform jobs, and count them."""
        for trial in self._run(jobs):
            self.simulations += 1
            self.progress.advance()
            yield trial

    def screen(self, candidates: Sequence[Candidate]) -> None:
        """Simulate one seed and few steps of all candidates that may be on the front."""
        self.progress.stage("bounds", len(candidates))
        points = []
        for one in candidates:
            points.append((one, point_of(self.least_hours(one), one, self.hourly(one))))
            self.progress.advance()
        least = {one.number: point for one, point in points}
        left = most_promising_first(points)
        self.progress.stage("screening", len(left))
        while left:
            self._screen_some(left[:_ROUND])
            known = [one.point for one in self.screened.values()]
            before, left = (
                len(left[_ROUND:]),
                [
                    one
                    for one in left[_ROUND:]
                    if not any(dominates(point, least[one.number]) for point in known)
                ],
            )
            self.progress.advance(before - len(left))

    def evaluate(self, outcomes: Sequence[Outcome]) -> None:
        """Simulate all seeds and more steps."""
        new = [one for one in outcomes if one.candidate.number not in self.evaluated]
        base, search = self._config.base, self._config.search
        seeds = range(base.seed, base.seed + search.seeds)
        jobs = [
            self._job(one.candidate, seed, search.steps, search.warmup_steps)
            for one in new
            for seed in seeds
        ]
        if jobs:
            self.progress.stage("evaluation", len(jobs))
        trials = list(self.run_jobs(jobs))
        for place, one in enumerate(new):
            some = trials[place * len(seeds) : (place + 1) * len(seeds)]
            self.evaluated[one.candidate.number] = dataclasses.replace(one, trials=tuple(some))

    def compare(
        self, chosen: Outcome, found: Sequence[Outcome], candidates: Sequence[Candidate]
    ) -> tuple[Comparison, ...]:
        """Best synchronous and asynchronous: on the recommended, the fewest and the most GPUs."""
        clusters = dict.fromkeys(one.candidate.cluster for one in (chosen, found[0], found[-1]))
        pairs: list[tuple[Outcome, Outcome]] = []
        for cluster in clusters:
            here = [one for one in candidates if one.cluster == cluster]
            rivals = [
                self._fastest([one for one in here if one.stale is stale])
                for stale in (False, True)
            ]
            if rivals[0] is not None and rivals[1] is not None:
                pairs.append((rivals[0], rivals[1]))
        self.evaluate([one for pair in pairs for one in pair])
        return tuple(
            Comparison(
                synchronous=self._evaluated_best(pair[0]),
                asynchronous=self._evaluated_best(pair[1]),
            )
            for pair in pairs
        )

    def _evaluated_best(self, screened: Outcome) -> Outcome:
        """The fastest of its kind on its cluster, by all seeds."""
        candidate = screened.candidate
        alike = [
            one
            for one in self.evaluated.values()
            if one.candidate.cluster == candidate.cluster and one.candidate.stale == candidate.stale
        ]
        return min(alike, key=lambda one: (one.hours.mean, one.candidate.number))

    def _fastest(self, candidates: Sequence[Candidate]) -> Outcome | None:
        """The fastest candidate by screening; skips those whose lower bound is too slow."""
        left = sorted(candidates, key=lambda one: (self.least_hours(one), one.number))
        best: Outcome | None = None
        while left:
            now, left = left[:_RIVALS], left[_RIVALS:]
            new = [one for one in now if one.number not in self.screened]
            if new:
                self.progress.stage("comparison", len(new))
            self._screen_some(new)
            some = [self.screened[one.number] for one in now]
            best = min(
                [*some, *([best] if best else [])],
                key=lambda one: (one.hours.mean, one.candidate.number),
            )
            left = [one for one in left if self.least_hours(one) < best.hours.mean]
        return best

    def _screen_some(self, candidates: Sequence[Candidate]) -> None:
        search, seed = self._config.search, self._config.base.seed
        jobs = [
            self._job(one, seed, search.screening_steps, search.screening_warmup_steps)
            for one in candidates
        ]
        for one, trial in zip(candidates, self.run_jobs(jobs), strict=True):
            self.screened[one.number] = Outcome(
                candidate=one,
                trials=(trial,),
                steps=self._config.steps,
                hourly=self.hourly(one),
            )

    def _job(self, candidate: Candidate, seed: int, steps: int, warmup_steps: int) -> Job:
        return Job(config=shortened(candidate.config, steps, warmup_steps), seed=seed)


def _worth_evaluating(outcomes: Iterable[Outcome], config: PlanConfig) -> list[Outcome]:
    """Outcomes near the front: the fastest of each cluster, synchronous and asynchronous.

    Deadline and budget are ignored here, so that raising them never loses an outcome.
    """
    points = [(one, one.point) for one in outcomes]
    on_front = {one.candidate.number for one in front(points)}
    near = front(points, slack=config.search.near) if config.search.near else []
    by_kind: dict[tuple[object, ...], list[Outcome]] = {}
    for one in near:
        by_kind.setdefault((*one.candidate.cluster, one.candidate.stale), []).append(one)
    chosen = set(on_front)
    for alike in by_kind.values():
        alike.sort(key=lambda one: (one.hours.mean, one.candidate.number))
        chosen.update(one.candidate.number for one in alike[:_ALIKE])
    return [one for one, _ in points if one.candidate.number in chosen]


def _without_duplicates(found: Sequence[Outcome]) -> list[Outcome]:
    """Of outcomes with equal needs, keep the one with the least staleness."""
    ordered = sorted(found, key=lambda one: (one.candidate.eta, one.candidate.number))
    distinct: dict[object, Outcome] = {}
    for one in ordered:
        distinct.setdefault((one.point, one.candidate.cluster), one)
    return list(distinct.values())


def _check_prices(config: PlanConfig, hourly: Sequence[Cost], space: Space) -> None:
    """Refuse to compare unknown money.

    Raises:
        ValueError: no candidate has a price, but the objective or a limit is about money.
    """
    asked = config.objective == "dollars" or math.isfinite(config.limits.budget_dollars)
    if not asked or not hourly or any(cost.dollars is not None for cost in hourly):
        return
    types = sorted({one.config.cluster.gpu for one in space.possible})
    raise ValueError(
        f"no published price of {' or '.join(types)}, so money is unknown; set prices in the plan "
        f"file: [{{gpu: {types[0]}, typical: 2.0}}] (dollars per GPU-hour), or use objective gpus "
        "or hours"
    )
