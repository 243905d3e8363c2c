"""Numbers of a configuration within their bounds, whether they are used or not.

A line each, with the value, the bound and, where it is no matter of course, its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Final

from simulator.config.schema import SimulationConfig

YEAR_S: Final = 365 * 24 * 3600
MOST_ANSWERS: Final = 100_000_000
"""Of one seed. The presets simulate 100,000 to 500,000 in a second of one core (`docs/log.md`)."""
MOST_AT_ONCE: Final = 1_000_000
"""Answers of a batch, or in flight; the paper's batches have 8,192."""

_WHOLE_AND_POSITIVE: Final = (
    *("workload.prompts_per_batch", "workload.samples_per_prompt", "workload.minibatches"),
    *("workload.steps", "workload.turns", "cluster.gpus", "rollout.tensor_parallel"),
    *("trainer.tensor_parallel", "trainer.pipeline_parallel", "trainer.micro_batch_tokens"),
    *("trainer.micro_batches", "seeds"),
)
_WHOLE_OR_NONE: Final = (
    *("workload.prompt_tokens", "workload.warmup_steps", "workload.reward_workers"),
    *("rollout.max_running", "schedule.max_concurrent_prompts", "seed"),
)
_NOT_NEGATIVE: Final = (
    *("cluster.price_per_gpu_h", "cluster.overhead", "schedule.max_lag", "faults.node_mtbf_h"),
    *("calibration.decode_error", "calibration.prefill_error", "calibration.training_error"),
)
_SECONDS: Final = (
    *("rollout.engine_overhead_s", "rollout.decode_sequence_s", "rollout.decode_context_token_s"),
    *("rollout.prefill_pass_s", "rollout.prefill_token_s", "rollout.prefill_pair_s"),
    *("trainer.token_s", "weights.update_s", "weights.export_s", "weights.load_s"),
    *("weights.poll_s", "weights.switch_s", "faults.detection_s", "faults.restart_s"),
    *("workload.reward.mean_s", "workload.tool.mean_s"),
)
_POSITIVE_SECONDS: Final = ("rollout.decode_step_s", "trainer.step_s")
_ANSWERS: Final = (
    *("workload.prompts_per_batch", "workload.samples_per_prompt"),
    *("workload.turns", "workload.steps"),
)
_MOST: Final = MappingProxyType(
    {
        "cluster.gpus": (200_000, "each of their engines is simulated"),
        "seeds": (10_000, "intervals need some three to ten"),
    }
)
"""Setting to its largest value, and why there is one."""
_BETWEEN: Final = (
    ("trainer.mfu", lambda value: 0 < value <= 1, "in (0, 1]: a share, 0.3"),
    ("workload.reward.sigma", lambda value: 0 <= value <= 10, "from 0 to 10"),
    ("workload.tool.sigma", lambda value: 0 <= value <= 10, "from 0 to 10"),
    ("faults.straggler_share", lambda value: 0 <= value <= 1, "from 0 to 1: a share of engines"),
    (
        "faults.straggler_slowdown",
        lambda value: 1 <= value <= 1000,
        "from 1 to 1000; 1.5 is half as long again",
    ),
)
_OTHERS: Final = (
    *("workload.answers.mean_tokens", "workload.answers.sigma", "rollout.memory_utilization"),
    *("workload.answers.group_correlation", "workload.answers.drift_per_step"),
)
"""Judged with the lengths that they make, where those use them."""
_WITH: Final = (
    ("rollout.decode_step_s", ("rollout.decode_sequence_s", "rollout.decode_context_token_s")),
    ("rollout.prefill_pass_s", ("rollout.prefill_token_s", "rollout.prefill_pair_s")),
    ("trainer.step_s", ("trainer.token_s",)),
)
"""Measured seconds, and what adds to them."""


def wrong_numbers(config: SimulationConfig) -> Iterator[str]:
    """What is wrong with single numbers."""
    for name in _WHOLE_AND_POSITIVE:
        yield from _bound(config, name, lambda value: value >= 1, ">= 1")
    for name in _WHOLE_OR_NONE:
        yield from _bound(config, name, lambda value: value >= 0, ">= 0")
    for name in _NOT_NEGATIVE:
        yield from _bound(config, name, lambda value: value >= 0, "a number >= 0 and finite")
    year = f"at most {YEAR_S:,} (seconds of a year)"
    for name in _SECONDS:
        yield from _bound(config, name, lambda value: 0 <= value <= YEAR_S, f">= 0 and {year}")
    for name in _POSITIVE_SECONDS:
        yield from _bound(config, name, lambda value: 0 < value <= YEAR_S, f"> 0 and {year}")
    for name, holds, bound in _BETWEEN:
        yield from _bound(config, name, holds, bound)
    yield from _not_numbers(config)
    yield from _most(config)
    yield from _infinite_or_not(config)
    yield from _lonely(config)


def _most(config: SimulationConfig) -> Iterator[str]:
    """What would be simulated for days without a word."""
    for name, (most, why) in _MOST.items():
        value = _value(config, name)
        if isinstance(value, int) and value > most:
            yield f"{name} is {value:,}, but must be at most {most:,}: {why}"
    workload = config.workload
    if any(True for name in _ANSWERS for _ in _bound(config, name, lambda value: value >= 1, "")):
        return
    batch = workload.prompts_per_batch * workload.samples_per_prompt
    if batch > MOST_AT_ONCE:
        yield (
            f"workload.prompts_per_batch is {workload.prompts_per_batch:,}, but with "
            f"samples_per_prompt ({workload.samples_per_prompt}) a batch must have at most "
            f"{MOST_AT_ONCE:,} answers, which are held at once; lower one of them"
        )
    elif batch * workload.turns * workload.steps > MOST_ANSWERS:
        yield (
            f"workload.steps is {workload.steps:,}, but steps x prompts_per_batch x "
            f"samples_per_prompt x turns must be at most {MOST_ANSWERS:,} answers, all of "
            "which are simulated; take fewer steps, some ten show how it goes on"
        )


def _infinite_or_not(config: SimulationConfig) -> Iterator[str]:
    knee, eta = config.rollout.decode_knee, config.schedule.eta
    if math.isnan(knee) or knee < 1:
        yield f"rollout.decode_knee is {knee}, but must be >= 1; 1 adds, inf takes the larger"
    if math.isnan(eta) or eta < 0:
        yield (
            f"schedule.eta is {eta}, but a staleness bound is a number of versions >= 0; "
            "0 is synchronous, inf has no bound"
        )


def _lonely(config: SimulationConfig) -> Iterator[str]:
    """Measured seconds that nothing is added to: the cost model would hide them."""
    for first, others in _WITH:
        if _value(config, first) is None:
            for name in others:
                if _value(config, name) not in (None, 0):
                    yield f"{name} is {_value(config, name)}, but needs {first} beside it"


def _not_numbers(config: SimulationConfig) -> Iterator[str]:
    """What the other bounds leave out."""
    for name in _OTHERS:
        value = _value(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} is {value}, but must be a finite number"


def _value(config: SimulationConfig, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _bound(
    config: SimulationConfig, name: str, holds: Callable[[float], bool], bound: str
) -> Iterator[str]:
    value = _value(config, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield f"{name} is {value!r}, but must be a number {bound}"
    elif not math.isfinite(value) or not holds(value):
        yield f"{name} is {value}, but must be {bound}"
