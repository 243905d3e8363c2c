"""Sensitivity of the recommendation to its inputs, varied one at a time between their error bounds.

    (recommendation and nearest outcomes) x {low, high} of each input --simulate--> a new best?

The range of an input is the stated error of its fit, if there is one; otherwise it is assumed,
which the source says. All simulations use the same seed, so random differences cancel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from simulator.assembly.build import problems
from simulator.assembly.engines import engines_of
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.decode import decode_cost
from simulator.costs.economics import Cost
from simulator.costs.switch import switch_cost
from simulator.costs.trainers import trainer_error
from simulator.costs.weight_sync import weight_update
from simulator.plan.result import End, Input, Outcome, Sensitivity, best_of
from simulator.plan.schema import PlanConfig
from simulator.plan.trial import Job, Trial, shortened
from simulator.stats.format import number
from simulator.workload.lengths import lengths_from, sigma_from

ENGINE_ENDS_S: Final = (1.0e-3, 2.4e-3)
"""CPU time per decode step: the smallest difference between Qwen2.5's published speeds and kernel
times, and the largest of Qwen3-0.6B's (`simulator.costs.measured_engine.ENGINE_S`)."""
GIVEN: Final = 0.1
"""Assumed relative error of values given by the user."""
LENGTH_MEAN: Final = 0.2
LENGTH_SIGMA: Final = 0.2
"""Assumed relative errors of the workload's lengths, which change by that much within a run."""
UPDATE: Final = 0.3
"""Assumed relative error of a weight update if its fit has none."""
CLEARLY: Final = 0.005
"""Share by which another candidate must be better with one seed to become the best."""

Change: TypeAlias = Callable[[Job], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Varied:
    name: str
    value: str
    source: str
    ends: tuple[tuple[str, Change], tuple[str, Change]]


def sensitivity(
    plan: PlanConfig, best: Outcome, finalists: Sequence[Outcome]
) -> tuple[list[Job], Callable[[Sequence[Trial]], Sensitivity]]:
    """Prepare simulations of the finalists with every input at both ends.

    Args:
        best: the recommendation, one of the finalists.
        finalists: outcomes that might become the best, with all seeds; the first seed is varied.

    Returns:
        The jobs, and a function of the trials of the first of them: the sensitivity to those inputs
        whose trials are complete.
    """
    tried = list(_inputs(best.candidate.config))
    steps, warmup = plan.search.steps, plan.search.warmup_steps
    as_they_are = [
        Job(config=shortened(one.candidate.config, steps, warmup), seed=plan.base.seed)
        for one in finalists
    ]
    jobs: dict[tuple[int, int, int], Job] = {}
    why: dict[tuple[int, int], str] = {}
    for which, one in enumerate(tried):
        for side, (_, change) in enumerate(one.ends):
            for place, job in enumerate(as_they_are):
                changed = change(job)
                wrong = problems(changed.config)
                if not wrong:
                    jobs[which, side, place] = changed
                elif finalists[place] is best:
                    why[which, side] = wrong[0].message
    # The evaluation has simulated them as they are, with the same seed and steps.
    base = [dataclasses.replace(one, trials=one.trials[:1]) for one in finalists]
    own = next(one for one in base if one.candidate is best.candidate)
    price = _price(own, base, plan)

    def so_far(trials: Sequence[Trial]) -> Sensitivity:
        by_job = dict(zip(jobs, trials, strict=False))
        unknown = {which for which, _, _ in list(jobs)[len(trials) :]}

        def end(which: int, side: int) -> End:
            outcomes = tuple(
                dataclasses.replace(one, trials=(by_job[which, side, place],))
                for place, one in enumerate(base)
                if (which, side, place) in by_job
            )
            return End(
                value=tried[which].ends[side][0],
                outcomes=outcomes,
                best=_best_then(outcomes, best, plan),
                why_not=why.get((which, side), ""),
            )

        inputs = [
            Input(name=one.name, value=one.value, source=one.source, low=end(k, 0), high=end(k, 1))
            for k, one in enumerate(tried)
            if k not in unknown
        ]
        if price:
            inputs.append(price)
        inputs.sort(key=lambda one: -swing(one, own, measure(plan.objective)))
        return Sensitivity(base=own, finalists=len(base), inputs=tuple(inputs))

    return list(jobs.values()), so_far


def _best_then(outcomes: Sequence[Outcome], own: Outcome, plan: PlanConfig) -> Outcome | None:
    """The best of them; the recommendation stays unless another one is clearly better."""
    best = best_of(outcomes, plan.objective, plan.limits)
    stays = next((one for one in outcomes if one.candidate is own.candidate), None)
    if best is None or stays is None or not stays.meets(plan.limits):
        return best
    clearly = best.rank(plan.objective) < stays.rank(plan.objective) * (1 - CLEARLY)
    return best if clearly else stays


def measure(objective: str) -> str:
    """The measure of sensitivity: the objective, or hours for gpus, as hours decide if they do."""
    return "hours" if objective == "gpus" else objective


def at_end(end: End, own: Outcome) -> Outcome | None:
    """The recommendation at this end; None if it cannot be simulated with it."""
    return next((one for one in end.outcomes if one.candidate is own.candidate), None)


def swing(one: Input, own: Outcome, name: str) -> float:
    """Largest relative change of the recommendation's hours or dollars."""
    ends = [at_end(end, own) for end in (one.low, one.high)]
    return max((abs(end.value(name) / own.value(name) - 1) for end in ends if end), default=0.0)


def _inputs(config: SimulationConfig) -> Iterator[_Varied]:
    if config.rollout.decode_step_s is None:
        yield _engine_overhead(config)
        yield _memory_bandwidth(config)
    if config.trainer.step_s is None:
        yield _training_speed(config)
    yield _weight_update(config)
    yield _length_mean(config)
    if config.workload.answers.kind == "lognormal":
        yield _length_sigma(config)


def _engine_overhead(config: SimulationConfig) -> _Varied:
    engine = engines_of(config).cpu
    taken = engine.step_s
    if config.rollout.engine_overhead_s is not None:
        error, source = GIVEN, f"given: ±{GIVEN:.0%}"
    elif engine.error is not None:
        error, source = engine.error, f"{config.rollout.engine}: ±{engine.error:.0%}"
    else:
        error, source = None, "published speeds of one sequence"
    ends = ENGINE_ENDS_S if error is None else (taken * (1 - error), taken * (1 + error))

    def change(seconds: float) -> Change:
        sequence_s = engine.sequence_s * seconds / taken if taken else engine.sequence_s
        settings = {"rollout.engine_overhead_s": seconds}
        if sequence_s:
            settings["rollout.engine_sequence_s"] = sequence_s
        return lambda job: _with_settings(job, settings)

    low, high = ((f"{1e3 * one:.3g} ms", change(one)) for one in ends)
    return _Varied(
        name="engine overhead", value=f"{1e3 * taken:.3g} ms", source=source, ends=(low, high)
    )


def _memory_bandwidth(config: SimulationConfig) -> _Varied:
    gpu = find_gpu(config.cluster.generating_gpu)
    cost = decode_cost(find_model(config.model), gpu, config.rollout.tensor_parallel)
    at = cost.coefficients
    taken = 1 / at.cache_reading

    def end(error: float) -> tuple[str, Change]:
        # Reading takes longer if less of the bandwidth is reached.
        slowdown = 1 / (1 + error)
        return (
            f"{taken / slowdown:.0%}",
            lambda job: dataclasses.replace(job, memory_slowdown=slowdown),
        )

    return _Varied(
        name="GPU memory bandwidth reached",
        value=f"{taken:.0%}",
        source=f"fit of the decode kernels: ±{cost.error:.1%}",
        ends=(end(-cost.error), end(cost.error)),
    )


def _training_speed(config: SimulationConfig) -> _Varied:
    if config.trainer.mfu is not None:
        error, source = GIVEN, f"given: ±{GIVEN:.0%}"
    else:
        gpu, model = find_gpu(config.cluster.gpu), find_model(config.model)
        known = trainer_error(config.trainer, gpu, model)
        error, source = known.span, f"{known.source}: ±{known.span:.0%}"

    def end(change: float) -> tuple[str, Change]:
        slowdown = 1 / (1 + change)
        return (
            f"{change:+.1%}",
            lambda job: dataclasses.replace(job, training_slowdown=slowdown),
        )

    return _Varied(
        name="MFU of training", value="as fitted", source=source, ends=(end(-error), end(error))
    )


def _weight_update(config: SimulationConfig) -> _Varied:
    model, gpu = find_model(config.model), find_gpu(config.cluster.gpu)
    sends = config.cluster.sends_weights
    if not sends:
        switch = switch_cost(config, model, gpu)
        taken, error = switch.seconds, switch.error
        given = config.weights.switch_s is not None
    else:
        sync = weight_update(config, model, gpu)
        measured = (config.weights.update_s, config.weights.export_s, config.weights.load_s)
        taken, given, error = sync.seconds, set(measured) != {None}, sync.error
    if given:
        error, source = GIVEN, f"given: ±{GIVEN:.0%}"
    elif not error:
        error, source = UPDATE, f"assumed: ±{UPDATE:.0%}"
    else:
        source = f"fit of published updates: ±{error:.0%}"

    def end(factor: float) -> tuple[str, Change]:
        return (f"{taken * factor:.3g} s", lambda job: _with_update(job, factor))

    return _Varied(
        name="weight update" if sends else "switch and weight update",
        value=f"{taken:.3g} s",
        source=source,
        ends=(end(max(0.0, 1 - error)), end(1 + error)),
    )


def _with_update(job: Job, factor: float) -> Job:
    config = job.config
    model, gpu = find_model(config.model), find_gpu(config.cluster.gpu)
    switch_s = switch_cost(config, model, gpu).seconds * factor
    update_s = weight_update(config, model, gpu).seconds * factor
    return _with_settings(job, {"weights.update_s": update_s, "weights.switch_s": switch_s})


def _length_mean(config: SimulationConfig) -> _Varied:
    taken = lengths_from(config.workload.answers).mean_tokens()
    most = float(config.workload.answers.max_tokens)
    ends = (max(1.0, taken * (1 - LENGTH_MEAN)), min(taken * (1 + LENGTH_MEAN), 0.98 * most))
    low, high = (
        (
            f"{one:,.0f} tokens",
            # The spread stays as it is, also where the mean determines it.
            _answers(mean_tokens=one, **_spread(config)),
        )
        for one in ends
    )
    return _Varied(
        name="mean length",
        value=f"{taken:,.0f} tokens",
        source=f"assumed: ±{LENGTH_MEAN:.0%}",
        ends=(low, high),
    )


def _length_sigma(config: SimulationConfig) -> _Varied:
    taken = sigma_from(config.workload.answers)
    low, high = (
        (f"{one:.3g}", _answers(**{**_spread(config), "sigma": one}))
        for one in (taken * (1 - LENGTH_SIGMA), taken * (1 + LENGTH_SIGMA))
    )
    return _Varied(
        name="spread of ln(length)",
        value=f"{taken:.3g}",
        source=f"assumed: ±{LENGTH_SIGMA:.0%}",
        ends=(low, high),
    )


def _spread(config: SimulationConfig) -> dict[str, Any]:
    """Settings of the spread as a number; none if it is one."""
    answers = config.workload.answers
    if answers.kind != "lognormal" or (not answers.tail and answers.truncated_share is None):
        return {}
    return {"sigma": sigma_from(answers), "tail": "", "truncated_share": None}


def _answers(**changed: Any) -> Change:
    settings = {f"workload.answers.{name}": value for name, value in changed.items()}
    return partial(_with_settings, settings=settings)


def _with_settings(job: Job, settings: Mapping[str, Any]) -> Job:
    return dataclasses.replace(job, config=job.config.with_settings(settings))


def _price(own: Outcome, base: Sequence[Outcome], plan: PlanConfig) -> Input | None:
    """The price as an input, which needs no simulation: money is hours times the price."""
    cost = own.hourly
    if cost.dollars is None or cost.low is None or cost.high is None:
        return None
    given = cost.low == cost.high
    source = f"given: ±{GIVEN:.0%}" if given else "low and high of the price's source"
    gpus = own.candidate.gpus

    def end(name: str, factor: float) -> End:
        outcomes = tuple(
            dataclasses.replace(one, hourly=_at_price(one.hourly, name, factor, given=given))
            for one in base
        )
        at = next(one for one in outcomes if one.candidate is own.candidate)
        assert at.hourly.dollars is not None
        return End(
            value=f"${number(at.hourly.dollars / gpus)}",
            outcomes=outcomes,
            best=_best_then(outcomes, own, plan),
        )

    return Input(
        name="price of a GPU-hour",
        value=f"${number(cost.dollars / gpus)}",
        source=source,
        low=end("low", 1 - GIVEN),
        high=end("high", 1 + GIVEN),
    )


def _at_price(cost: Cost, name: str, factor: float, *, given: bool) -> Cost:
    if cost.dollars is None:
        return cost
    dollars = cost.dollars * factor if given else getattr(cost, name)
    return dataclasses.replace(cost, dollars=dollars)
