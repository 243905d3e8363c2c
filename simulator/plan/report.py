"""Report a plan as one JSON object.

Hours, dollars, GPU-hours and the ratio are `{mean, low, high, seeds_low, seeds_high}`: a 90 %
interval that contains the model's error on measured runs, and the 95 % interval over the seeds
alone, null for a single seed. Money is null if no price is known.
"""

from __future__ import annotations

from typing import Any

from areal_lab.runlog.records import finite_json
from simulator.plan.result import Outcome, Plan
from simulator.plan.sensitivity import at_end, measure
from simulator.plan.summary import (
    counted,
    model_error_lines,
    plan_warnings,
    recommendation_lines,
    verdict,
)
from simulator.report.error_lines import change_record, record_of, step_record
from simulator.report.measured_errors import gpus_of


def plan_report(plan: Plan) -> dict[str, Any]:
    """The object that `areal-lab plan --json` prints."""
    return {
        "name": plan.config.name,
        "objective": plan.config.objective,
        "rank_by": plan.config.rank_by,
        "steps": plan.config.steps,
        "limits": finite_json(plan.config.limits.model_dump()),
        "candidates": {
            "combinations": plan.space.combinations,
            "merged": plan.space.merged,
            "impossible": counted(plan.space.impossible),
            "over_limits": counted(plan.space.over_limits),
            "left_out_by_bound": plan.bounded,
            "first_look": len(plan.screened),
            "second_look": len(plan.outcomes),
            "simulations": plan.simulations,
            **({"waiting": len(plan.waiting)} if plan.stopped_in else {}),
        },
        **({"stopped_in": plan.stopped_in} if plan.stopped_in else {}),
        "front": [_outcome(one, plan) for one in plan.front],
        "best": None if plan.best is None else _outcome(plan.best, plan),
        "answer": "\n".join(recommendation_lines(plan)),
        "asynchrony": [
            {
                **{"hardware": one.synchronous.candidate.hardware, "pays": one.pays},
                "undecided": one.pays is None,
                "ratio": record_of(one.predicted_ratio, one.ratio),
                "model_error": change_record("gain", one.asynchronous.known.gain),
                "synchronous": _outcome(one.synchronous, plan),
                "asynchronous": _outcome(one.asynchronous, plan),
                "says": verdict(one),
            }
            for one in plan.comparisons
        ],
        "model_error": {"says": list(model_error_lines(plan))},
        "sensitivity": _sensitivity(plan),
        "warnings": plan_warnings(plan),
    }


def _sensitivity(plan: Plan) -> dict[str, Any] | None:
    if plan.sensitivity is None:
        return None
    own, name = plan.sensitivity.base, measure(plan.config.objective)
    rows = []
    for one in plan.sensitivity.inputs:
        ends = {}
        for side, end in (("low", one.low), ("high", one.high)):
            there = at_end(end, own)
            ends[side] = {
                "input": end.value,
                name: None if there is None else there.value(name),
                "best": None if end.best is None else _candidate(end.best),
                "best_changes": end.best is None or end.best.candidate is not own.candidate,
            }
        rows.append({"input": one.name, "value": one.value, "source": one.source, **ends})
    return {
        "of": name,
        "value": own.value(name),
        "finalists": plan.sensitivity.finalists,
        "inputs": rows,
    }


def _outcome(one: Outcome, plan: Plan) -> dict[str, Any]:
    cheap, dear = one.hourly.low, one.hourly.high
    return {
        **_candidate(one),
        "hours": record_of(one.predicted_hours, one.hours),
        "dollars": _dollars(one),
        "dollars_at_low_price": None if cheap is None else cheap * one.hours.mean,
        "dollars_at_high_price": None if dear is None else dear * one.hours.mean,
        "gpu_hours": record_of(one.predicted_gpu_hours, one.gpu_hours),
        "limit": one.limit,
        "engine_share": one.engine_share,
        "trainer_share": one.trainer_share,
        "within_limits": one.meets(plan.config.limits),
        "model_error": step_record(one.known.step.kind, gpus_of(one.candidate.config), plan.errors),
    }


def _dollars(one: Outcome) -> dict[str, float | None] | None:
    if one.predicted_dollars is None or one.dollars is None:
        return None
    return record_of(one.predicted_dollars, one.dollars)


def _candidate(one: Outcome) -> dict[str, Any]:
    """The varied settings, by their names in `areal-lab simulate`."""
    config = one.candidate.config
    told = {
        "cluster.gpu": config.cluster.gpu,
        "cluster.gpus": config.cluster.gpus,
        "cluster.placement": config.cluster.placement,
        "cluster.rollout_gpus": config.cluster.rollout_gpus,
        "cluster.rollout_gpu": config.cluster.rollout_gpu,
        "schedule.name": config.schedule.name,
        "schedule.eta": config.schedule.eta,
        "rollout.tensor_parallel": config.rollout.tensor_parallel,
        "trainer.tensor_parallel": config.trainer.tensor_parallel,
        "trainer.pipeline_parallel": config.trainer.pipeline_parallel,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens,
    }
    return {"settings": finite_json(told), "hardware": one.candidate.hardware}
