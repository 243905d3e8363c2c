"""The search of a plan: from a plan file to the front, the recommendation and its sensitivity.

    candidates --closed form--> lower bound of each one's hours                     bounds
      --most promising first--> one seed, few steps; skip those that cannot win     screening
      --near the front--> all seeds --> front, recommendation                       evaluation
      --on the same GPUs--> best synchronous against best asynchronous              comparison
      --one input at a time--> sensitivity                                          sensitivity

All candidates have the same random numbers. Rounds have the same size for any number of processes,
so that the result does not depend on it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from areal_lab.config.given import Source
from simulator.costs.economics import HOUR_S, Cost
from simulator.plan.bound import least_step_s
from simulator.plan.result import (
    Comparison,
    KnownErrors,
    Outcome,
    Plan,
    Sensitivity,
    best_of,
    dominates,
    front,
    hourly_cost,
    known_errors,
    most_promising_first,
    point_of,
)
from simulator.plan.schema import PlanConfig, plan_config
from simulator.plan.sensitivity import sensitivity
from simulator.plan.space import Candidate, Space, check_measured, expand
from simulator.plan.trial import Job, Progress, Run, Silent, Trial, run_here, shortened
from simulator.report.measured_errors import MeasuredErrors, measured_errors
from simulator.stats.statistics import prediction

_ROUND: Final = 24
"""Candidates that are simulated before those that cannot win are skipped again."""
_RIVALS: Final = 4
"""Candidates of the search of the fastest candidate of one cluster."""
_BOUND_SLACK: Final = 0.97
"""Factor on the lower bound: the simulation may have shorter lengths."""
_ALIKE: Final = 2
"""Synchronous, and asynchronous, candidates of one cluster that are evaluated."""

Bound = Callable[[Candidate], float]
"""Least seconds of a training step."""
Stage: TypeAlias = Literal["bounds", "screening", "evaluation", "comparison", "sensitivity"]


class Step(NamedTuple):
    """Progress of a search."""

    stage: Stage
    done: int
    """Trials of `total`; 0 starts the stage, or the next part of a comparison."""
    total: int
    """Candidates, or in later stages simulations."""
    waits: bool = False
    """The next trial was not there yet (`Run`): nothing has happened since the last step."""


def _least_s(candidate: Candidate) -> float:
    return least_step_s(candidate.config)


def find_plan(
    config: PlanConfig | Source,
    run: Run = run_here,
    *,
    progress: Progress | None = None,
    bound: Bound = _least_s,
    errors: MeasuredErrors | None = None,
) -> Plan:
    """Search the candidates of a plan file, to the end; `PlanSearch` can be stopped.

    Args:
        run: performs simulations; `simulator.plan.trial.workers` makes one that uses several
            processes.
        bound: least seconds of a candidate's training step.
        errors: of measured runs; None takes the packaged ones.

    Raises:
        ValueError: the plan needs a price that is unknown, or candidates differ in something that a
            measured number of the base depends on.
    """
    search = PlanSearch(config, run, bound=bound, errors=errors)
    follow(search, progress or Silent())
    return search.plan


def follow(search: PlanSearch, progress: Progress) -> None:
    """Search to the end. An exception, such as `KeyboardInterrupt`, leaves `search.plan`."""
    done = 0
    for step in search:
        if step.waits:
            continue
        if step.done:
            progress.advance(step.done - done)
        else:
            progress.stage(step.stage, step.total)
        done = step.done


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


class PlanSearch:
    """A search that performs one simulation at a time, and knows at any time what it has found.

        search = PlanSearch(config)
        for step in search:                             one simulation, or the start of a stage
            print(step.stage, step.done, step.total, search.plan.best)
            if enough():
                break                                   `search.plan` stays; `next(search)` resumes

    With processes (`simulator.plan.trial.workers`), those of a round are simulated ahead.

    Attributes:
        step: the latest one; None before the first.
    """

    def __init__(
        self,
        config: PlanConfig | Source,
        run: Run = run_here,
        *,
        bound: Bound = _least_s,
        errors: MeasuredErrors | None = None,
        reuse: PlanSearch | None = None,
    ) -> None:
        """List and check the candidates, a millisecond each; nothing is simulated yet.

        Args:
            run: performs simulations.
            bound: least seconds of a candidate's training step.
            errors: of measured runs; None takes the packaged ones.
            reuse: a search with the same `bound` and `errors`. Its candidates and their bounds are
                used again if the plans have the same `base`, `candidates`, `steps`, `limits.gpus`
                and `limits.eta`, as they have after another deadline, budget, objective or price.

        Raises:
            ValueError: as `find_plan`.
        """
        self._config = config = plan_config(config)
        self._run = run
        self._bound = bound
        self._errors = errors or measured_errors()
        self._hourly: dict[int, Cost] = {}
        self._known: dict[int, KnownErrors] = {}
        self._least_h: dict[int, float] = {}
        self._jobs: dict[tuple[object, ...], list[Job]] = {}
        """Jobs of candidates: their keys are known after the first search."""
        self._space: Space
        if reuse is not None and reuse._serves(self):
            self._space, self._known, self._least_h = reuse._space, reuse._known, reuse._least_h
            self._jobs = reuse._jobs
        else:
            self._space = expand(config)
            check_measured(config, self._space.possible)
        _check_prices(config, [self._cost(one) for one in self._space.possible], self._space)
        self._waiting = {one.number for one in self._space.possible}
        """Candidates that are neither screened nor skipped."""
        self._screened: dict[int, Outcome] = {}
        self._evaluated: dict[int, Outcome] = {}
        self._in_play: dict[int, Outcome] | None = None
        """Outcomes of which the front and the recommendation are chosen; None takes all screened
        ones."""
        self._comparisons: tuple[Comparison, ...] = ()
        self._so_far: Callable[[], Sensitivity | None] = lambda: None
        """The sensitivity by now; it is not put together before somebody looks."""
        self._simulations = 0
        self.step: Step | None = None
        self._complete = False
        self._steps = self._search()

    def __iter__(self) -> Self:
        """Return itself: a second loop continues the first."""
        return self

    def __next__(self) -> Step:
        """Perform one simulation, or start a stage."""
        self.step = next(self._steps)
        return self.step

    def advance(self, for_s: float = math.inf) -> bool:
        """Search for about so many seconds, or until a trial is not there yet.

        Args:
            for_s: seconds; the simulation that runs then is finished.

        Returns:
            Whether the search is complete.
        """
        until_s = time.monotonic() + for_s
        for step in self:
            if step.waits or time.monotonic() >= until_s:
                break
        return self._complete

    @property
    def plan(self) -> Plan:
        """The plan so far; a screened candidate that waits for evaluation has one seed.

        The sensitivity has the inputs that were simulated at both ends.
        """
        in_play = self._screened if self._in_play is None else self._in_play
        found = front([(one, one.point) for one in in_play.values()])
        return Plan(
            config=self._config,
            space=self._space,
            screened=tuple(self._screened.values()),
            outcomes=tuple(self._evaluated.values()),
            front=tuple(sorted(_without_duplicates(found), key=_fewest_gpus)),
            best=best_of(tuple(in_play.values()), self._config.objective, self._config.limits),
            comparisons=self._comparisons,
            sensitivity=self._so_far(),
            simulations=self._simulations,
            least_hours=dict(self._least_h),
            errors=self._errors,
            waiting=frozenset(self._waiting),
            stopped_in="" if self._complete else "bounds" if self.step is None else self.step.stage,
        )

    def _search(self) -> Generator[Step]:
        possible = self._space.possible
        yield from self._screen(possible)
        worth = _worth_evaluating(self._screened.values(), self._config)
        self._in_play = {one.candidate.number: one for one in worth}
        yield from self._evaluate(worth)
        plan = self.plan
        chosen = plan.best or (plan.front[0] if plan.front else None)
        if chosen is not None:
            yield from self._compare(chosen, plan.front, possible)
        best, finalists = plan.best, self._config.search.sensitivity
        if best is not None and finalists:
            some = nearest_to(best, self._evaluated.values(), finalists)
            yield from self._vary(best, some)
        self._complete = True

    def _serves(self, other: PlanSearch) -> bool:
        """Return whether another search has the same candidates, bounds and known errors."""
        one, two = self._config, other._config
        return (
            (one.limits.gpus, one.limits.eta) == (two.limits.gpus, two.limits.eta)
            and (one.steps, one.candidates, one.base) == (two.steps, two.candidates, two.base)
            and self._bound is other._bound
            and self._errors is other._errors
        )

    def _cost(self, candidate: Candidate) -> Cost:
        if candidate.number not in self._hourly:
            self._hourly[candidate.number] = hourly_cost(candidate, self._config.prices)
        return self._hourly[candidate.number]

    def _least_hours(self, candidate: Candidate) -> float:
        """Lower bound for the whole run, by the closed form."""
        if candidate.number not in self._least_h:
            seconds = _BOUND_SLACK * self._bound(candidate) * self._config.steps
            self._least_h[candidate.number] = seconds / HOUR_S
        return self._least_h[candidate.number]

    def _known_errors(self, candidate: Candidate) -> KnownErrors:
        """Return the known errors of the model on runs of a candidate's kind."""
        if candidate.number not in self._known:
            self._known[candidate.number] = known_errors(candidate, self._errors)
        return self._known[candidate.number]

    def _least_ranked_hours(self, candidate: Candidate) -> float:
        """Lower bound of the hours by which a candidate is ranked, as screened with one seed."""
        least_h = self._least_hours(candidate)
        if not self._pessimistic:
            return least_h
        return prediction([least_h], self._known_errors(candidate).step.error).high

    @property
    def _pessimistic(self) -> bool:
        return self._config.rank_by == "pessimistic"

    def _screen(self, candidates: Sequence[Candidate]) -> Generator[Step]:
        """Simulate one seed and few steps of all candidates that may be on the front."""
        yield Step("bounds", 0, len(candidates))
        points = []
        for one in candidates:
            points.append((one, point_of(self._least_ranked_hours(one), one, self._cost(one))))
            yield Step("bounds", len(points), len(candidates))
        least = {one.number: point for one, point in points}
        left = most_promising_first(points)
        done = 0
        yield Step("screening", 0, len(left))
        while left:
            now, left = left[:_ROUND], left[_ROUND:]
            for some in self._screen_some(now):
                done += some
                yield Step("screening", done, len(candidates), waits=not some)
            known = [one.point for one in self._screened.values()]
            cannot_win = {
                one.number
                for one in left
                if any(dominates(point, least[one.number]) for point in known)
            }
            if cannot_win:
                self._waiting -= cannot_win
                left = [one for one in left if one.number not in cannot_win]
                done += len(cannot_win)
                yield Step("screening", done, len(candidates))

    def _evaluate(self, outcomes: Sequence[Outcome]) -> Generator[Step]:
        new = [one for one in outcomes if one.candidate.number not in self._evaluated]
        seeds = self._config.search.seeds
        jobs = [job for one in new for job in self._jobs_of(one.candidate, evaluation_jobs)]
        if not jobs:
            return
        yield Step("evaluation", 0, len(jobs))
        trials: list[Trial] = []
        for trial in self._trials(jobs):
            if trial is not None:
                trials.append(trial)
                if len(trials) % seeds == 0:
                    one = new[len(trials) // seeds - 1]
                    self._keep(dataclasses.replace(one, trials=tuple(trials[-seeds:])))
            yield Step("evaluation", len(trials), len(jobs), waits=trial is None)

    def _keep(self, known: Outcome) -> None:
        """Keep an outcome of all seeds, which replaces that of the screening."""
        number = known.candidate.number
        self._evaluated[number] = known
        if self._in_play is not None and number in self._in_play:
            self._in_play[number] = known

    def _compare(
        self, chosen: Outcome, found: Sequence[Outcome], candidates: Sequence[Candidate]
    ) -> Generator[Step]:
        """Best synchronous and asynchronous: on the recommended, the fewest and the most GPUs."""
        clusters = dict.fromkeys(one.candidate.cluster for one in (chosen, found[0], found[-1]))
        pairs: list[tuple[Outcome, Outcome]] = []
        for cluster in clusters:
            here = [one for one in candidates if one.cluster == cluster]
            slow = yield from self._fastest([one for one in here if not one.stale])
            fast = yield from self._fastest([one for one in here if one.stale])
            if slow is not None and fast is not None:
                pairs.append((slow, fast))
        yield from self._evaluate([one for pair in pairs for one in pair])
        self._comparisons = tuple(
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
            for one in self._evaluated.values()
            if one.candidate.cluster == candidate.cluster and one.candidate.stale == candidate.stale
        ]
        return min(alike, key=lambda one: (one.hours.mean, one.candidate.number))

    def _fastest(self, candidates: Sequence[Candidate]) -> Generator[Step, None, Outcome | None]:
        """The fastest candidate by screening; skips those whose lower bound is too slow."""
        left = sorted(candidates, key=lambda one: (self._least_hours(one), one.number))
        best: Outcome | None = None
        while left:
            now, left = left[:_RIVALS], left[_RIVALS:]
            new = [one for one in now if one.number not in self._screened]
            if new:
                yield Step("comparison", 0, len(new))
            done = 0
            for count in self._screen_some(new):
                done += count
                yield Step("comparison", done, len(new), waits=not count)
            some = [self._screened[one.number] for one in now]
            best = min(
                [*some, *([best] if best else [])],
                key=lambda one: (one.hours.mean, one.candidate.number),
            )
            left = [one for one in left if self._least_hours(one) < best.hours.mean]
        return best

    def _vary(self, best: Outcome, finalists: Sequence[Outcome]) -> Generator[Step]:
        jobs, so_far = sensitivity(self._config, best, finalists)
        yield Step("sensitivity", 0, len(jobs))
        trials: list[Trial] = []
        self._so_far = lambda: so_far(trials) if trials else None
        for trial in self._trials(jobs):
            if trial is not None:
                trials.append(trial)
            yield Step("sensitivity", len(trials), len(jobs), waits=trial is None)

    def _screen_some(self, candidates: Sequence[Candidate]) -> Iterator[int]:
        left = list(reversed(candidates))
        jobs = [job for one in candidates for job in self._jobs_of(one, screening_jobs)]
        for trial in self._trials(jobs):
            if trial is None:
                yield 0
                continue
            one = left.pop()
            self._waiting.discard(one.number)
            self._screened[one.number] = Outcome(
                candidate=one,
                trials=(trial,),
                steps=self._config.steps,
                hourly=self._cost(one),
                known=self._known_errors(one),
                pessimistic=self._pessimistic,
            )
            yield 1

    def _jobs_of(
        self, candidate: Candidate, make: Callable[[PlanConfig, Candidate], list[Job]]
    ) -> list[Job]:
        search = self._config.search
        sizes = (search.screening_steps, search.screening_warmup_steps, search.steps)
        asked = (make, candidate.number, *sizes, search.warmup_steps, search.seeds)
        if asked not in self._jobs:
            self._jobs[asked] = make(self._config, candidate)
        return self._jobs[asked]

    def _trials(self, jobs: Sequence[Job]) -> Iterator[Trial | None]:
        for trial in self._run(jobs):
            self._simulations += trial is not None
            yield trial


def screening_job(plan: PlanConfig, candidate: Candidate) -> Job:
    """The simulation of a candidate with one seed and few steps."""
    search = plan.search
    config = shortened(candidate.config, search.screening_steps, search.screening_warmup_steps)
    return Job(config=config, seed=plan.base.seed)


def screening_jobs(plan: PlanConfig, candidate: Candidate) -> list[Job]:
    """The one job of the screening, as `evaluation_jobs`."""
    return [screening_job(plan, candidate)]


def evaluation_jobs(plan: PlanConfig, candidate: Candidate) -> list[Job]:
    """The simulations of a candidate with all seeds."""
    config = shortened(candidate.config, plan.search.steps, plan.search.warmup_steps)
    seeds = range(plan.base.seed, plan.base.seed + plan.search.seeds)
    return [Job(config=config, seed=seed) for seed in seeds]


def _fewest_gpus(one: Outcome) -> tuple[int, float, int]:
    return (one.candidate.gpus, one.ranked_hours, one.candidate.number)


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
        alike.sort(key=lambda one: (one.ranked_hours, one.candidate.number))
        chosen.update(one.candidate.number for one in alike[:_ALIKE])
    return [one for one, _ in points if one.candidate.number in chosen]


def _without_duplicates(found: Sequence[Outcome]) -> list[Outcome]:
    """Keep the outcome with the least staleness among those with equal needs."""
    ordered = sorted(found, key=lambda one: (one.candidate.eta, one.candidate.number))
    distinct: dict[object, Outcome] = {}
    for one in ordered:
        distinct.setdefault((one.point, one.candidate.cluster), one)
    return list(distinct.values())


def _check_prices(config: PlanConfig, hourly: Sequence[Cost], space: Space) -> None:
    asked = config.objective == "dollars" or math.isfinite(config.limits.budget_dollars)
    if not asked or not hourly or any(cost.dollars is not None for cost in hourly):
        return
    types = sorted({one.config.cluster.gpu for one in space.possible})
    raise ValueError(
        f"no published price of {' or '.join(types)}, so money is unknown; set prices in the plan "
        f"file: [{{gpu: {types[0]}, typical: 2.0}}] (dollars per GPU-hour), or use objective gpus "
        "or hours"
    )
