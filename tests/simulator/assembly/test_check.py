"""Every problem of a config is one line, with the bound and a fix."""

from __future__ import annotations

import math
from typing import Any

import pytest

from areal_lab.config.problem import ConfigError
from simulator.assembly import build
from simulator.assembly.build import check_config
from simulator.config.schema import SimulationConfig


def config(**values: Any) -> SimulationConfig:
    """`config(cluster__gpus=8)` sets `cluster.gpus`."""
    return SimulationConfig().with_settings(
        {name.replace("__", "."): value for name, value in values.items()}
    )


def problems(made: SimulationConfig) -> list[str]:
    """As people read them."""
    return [str(one) for one in build.problems(made)]


def refused(**values: Any) -> list[str]:
    """What is wrong with values, or with their combination."""
    try:
        return problems(config(**values))
    except ConfigError as error:
        return [str(one) for one in error.problems]


def test_the_defaults_can_be_simulated() -> None:
    assert problems(SimulationConfig()) == []
    check_config(SimulationConfig())


@pytest.mark.parametrize(
    ("values", "bound", "fix"),
    [
        # --- sizes
        (
            {"workload__prompts_per_batch": 0},
            "prompts_per_batch is 0, but must be an integer >= 1",
            "",
        ),
        ({"workload__samples_per_prompt": -3}, "samples_per_prompt is -3", ">= 1"),
        ({"workload__steps": 0}, "workload.steps is 0", ">= 1"),
        ({"seeds": 0}, "seeds is 0", "from 1 to 10,000"),
        ({"rollout__tensor_parallel": 0}, "rollout.tensor_parallel is 0", ">= 1"),
        ({"workload__prompt_tokens": -1}, "prompt_tokens is -1", ">= 0"),
        ({"weights__poll_s": -1.0}, "weights.poll_s is -1.0", "from 0 to 31,536,000, in seconds"),
        (
            {"weights__update_s": math.nan},
            "weights.update_s is nan",
            "from 0 to 31,536,000, in seconds, or null",
        ),
        ({"trainer__step_s": 0.0}, "trainer.step_s is 0.0", "> 0"),
        ({"rollout__decode_step_s": -0.1}, "decode_step_s is -0.1", "> 0"),
        ({"cluster__gpus": "many"}, "cluster.gpus is 'many'", "an integer"),
        ({"workload__warmup_steps": 40}, "warmup_steps is 40", "raise steps"),
        (
            {"workload__minibatches": 100, "workload__prompts_per_batch": 2},
            "minibatches is 100, but a batch has only 32 sequences",
            "",
        ),
        # --- overflow, or endless runs
        ({"trainer__step_s": 1e308}, "step_s is 1e+308", "> 0 and <= 31,536,000, in seconds"),
        ({"trainer__step_s": math.inf}, "step_s is inf", "> 0 and <= 31,536,000"),
        ({"weights__poll_s": math.inf}, "poll_s is inf", "from 0 to 31,536,000"),
        ({"workload__tool__mean_s": 1e300}, "tool.mean_s is 1e+300", "at most a year"),
        ({"cluster__overhead": math.inf}, "overhead is inf", "a finite number >= 0"),
        ({"faults__node_mtbf_h": math.inf}, "node_mtbf_h is inf", "a finite number >= 0, in hours"),
        (
            {"cluster__gpus": 10**8},
            "cluster.gpus is 100000000",
            "from 1 to 200,000; each of their engines",
        ),
        ({"seeds": 10**6}, "seeds is 1000000", "to 10,000"),
        ({"workload__steps": 10**8}, "steps is 100,000,000", "at most 100,000,000 responses"),
        (
            {"workload__turns": 4, "workload__turns_most": 3},
            "workload.turns_most is 3, but must be at least workload.turns (4), the mean",
            "0 gives every response",
        ),
        (
            {"workload__turns": 4, "workload__turns_most": 40, "workload__tool_tokens": 10_000},
            "prompt and response may have",
            "",
        ),
        (
            {"workload__turns": 10**8},
            "x turns must be at most 100,000,000 responses",
            "fewer steps",
        ),
        ({"workload__prompts_per_batch": 10**8}, "a batch must have at most 1,000,000", "lower"),
        (
            {
                **{"cluster__gpus": 80_000, "cluster__rollout_gpus": 60_000},
                **{"schedule__eta": math.inf, "rollout__max_running": 50},
                "trainer__step_s": 150.0,
            },
            "3,000,000 responses would be generated at once, but at most 1,000,000",
            "lower schedule.max_concurrent_prompts",
        ),
        (
            {"faults__node_mtbf_h": 0.01, "trainer__step_s": 150.0},
            "a training step of 150 s on 4 nodes then has 16.7 failures and hardly ever ends",
            "raise it to at least 0.0333",
        ),
        (
            {"faults__node_mtbf_h": 0.01, "trainer__step_s": 1.0, "rollout__decode_step_s": 0.1},
            "a response of 27,648 tokens in 2,765 s on 1 node then has 76.8 failures",
            "raise it to at least 0.154",
        ),
        # --- unused settings
        ({"trainer__mfu": math.nan, "trainer__step_s": 2.0}, "trainer.mfu is nan", "> 0 and <= 1"),
        ({"trainer__mfu": 0.0, "trainer__step_s": 2.0}, "trainer.mfu is 0.0", "> 0 and <= 1"),
        ({"workload__reward__sigma": math.nan}, "reward.sigma is nan", "from 0 to 10"),
        ({"workload__tool__sigma": math.nan}, "tool.sigma is nan", "from 0 to 10"),
        ({"faults__straggler_slowdown": math.nan}, "straggler_slowdown is nan", "from 1 to 1,000"),
        ({"faults__straggler_share": 1.5}, "straggler_share is 1.5", "from 0 to 1"),
        (
            {"workload__answers__kind": "constant", "workload__answers__sigma": math.nan},
            "answers.sigma is nan",
            "a number > 0 and <= 10",
        ),
        # --- staleness
        ({"schedule__eta": -1.0}, "schedule.eta is -1.0", "0 is synchronous"),
        ({"schedule__eta": math.nan}, "schedule.eta is nan", ">= 0"),
        (
            {"schedule__batch_order": "bounded_lag", "schedule__max_lag": 2.0},
            "max_lag is 2 (whole versions), but eta 4 starts groups up to 4 versions ahead",
            "raise max_lag to 4, lower eta, or set on_late to drop or recycle",
        ),
        # --- minibatches streamed to the trainer
        (
            {"schedule__require_batches": 3},
            "require_batches is 3, but must divide workload.minibatches (4)",
            "0 waits for the whole batch",
        ),
        ({"schedule__require_batches": 8}, "must divide workload.minibatches (4)", "0 waits"),
        ({"schedule__require_batches": -1}, "require_batches is -1", ">= 0"),
        (
            {"schedule__require_batches": 1, "workload__prompts_per_batch": 510},
            "prompts_per_batch is 510, but must be a multiple of 4, the parts in which",
            "use 508 or 512",
        ),
        (
            {
                **{"cluster__placement": "colocated", "schedule__name": "synchronous"},
                "schedule__require_batches": 1,
            },
            "require_batches is 1, which generates while it trains, but colocated GPUs",
            "placement: disaggregated, or 0",
        ),
        (
            {"schedule__name": "partial_rollout", "schedule__require_batches": 2},
            "require_batches is 2, but schedule partial_rollout pauses generation",
            "use schedule asynchronous, or 0",
        ),
        (
            {
                **{"schedule__require_batches": 1, "faults__node_mtbf_h": 0.01},
                "trainer__step_s": 150.0,
            },
            "a training step of 150 s on 4 nodes then has 16.7 failures and hardly ever ends",
            "raise it to at least 0.0333",
        ),
        # --- hybrid GPUs
        (
            {"cluster__hybrid_gpus": 100},
            "hybrid_gpus is 100, but must be at most cluster.rollout_gpus (96)",
            "",
        ),
        (
            {"cluster__hybrid_gpus": 128, "cluster__rollout_gpus": 128},
            "hybrid_gpus is 128, all GPUs, which then alternate",
            "placement: colocated, with schedule synchronous or partial_rollout",
        ),
        (
            {"cluster__hybrid_gpus": 8, "cluster__rollout_gpus": 129},
            "rollout_gpus is 129, but must be from 1 to 128",
            "",
        ),
        (
            {"cluster__hybrid_gpus": 6, "rollout__tensor_parallel": 4},
            "hybrid_gpus is 6, but must be a multiple of rollout.tensor_parallel (4)",
            "use 4 or 8",
        ),
        (
            {"cluster__hybrid_gpus": 8, "cluster__rollout_gpu": "H20"},
            "rollout_gpu is 'H20', but hybrid GPUs (cluster.hybrid_gpus) generate and train",
            "or set cluster.hybrid_gpus to 0",
        ),
        (
            {"cluster__hybrid_gpus": 8, "schedule__interruptible": False},
            "hybrid_gpus is 8, but this schedule waits for responses to end before an update",
            "use schedule asynchronous with interruptible: true, or 0",
        ),
        (
            {"cluster__hybrid_gpus": 8, "schedule__name": "one_step_overlap"},
            "hybrid_gpus is 8, but this schedule waits for responses to end before an update",
            "or 0",
        ),
        (
            {"cluster__hybrid_gpus": 8, "schedule__require_batches": 1},
            "require_batches is 1, but hybrid GPUs generate the responses of all",
            "set it or cluster.hybrid_gpus to 0",
        ),
        (
            {"cluster__hybrid_gpus": 8, "faults__node_mtbf_h": 1000.0},
            "node_mtbf_h is 1000, but failures of hybrid GPUs are not simulated",
            "set it or cluster.hybrid_gpus to 0",
        ),
        # They train with the 32 others.
        (
            {"cluster__hybrid_gpus": 8, "trainer__tensor_parallel": 16},
            "40 training GPUs",
            "multiple of 16",
        ),
        # --- names
        ({"cluster__gpu": "H10"}, "unknown GPU 'H10'", "H100"),
        ({"cluster__rollout_gpu": "A10"}, "unknown GPU 'A10'", "A100"),
        ({"model": "Qwen2.5-8B"}, "Qwen2.5-8B", "Qwen2.5-7B"),
        ({"schedule__name": "asynchronous_rl"}, "'asynchronous_rl'", "'asynchronous'"),
        ({"schedule__batch_order": "oldest"}, "'oldest'", "oldest_finished_first"),
        ({"cluster__placement": "collocated"}, "'collocated'", "'colocated'"),
        ({"weights__backend": "disc"}, "'disc'", "'disk'"),
        ({"workload__answers__kind": "normal"}, "'normal'", "lognormal"),
        ({"workload__reward__kind": "const"}, "'const'", "constant"),
        # --- placement
        (
            {"cluster__rollout_gpus": 128},
            "rollout_gpus is 128, but must be from 1 to 127",
            "trains",
        ),
        ({"cluster__rollout_gpus": 0}, "rollout_gpus is 0", "colocated"),
        ({"cluster__rollout_gpus": 200}, "rollout_gpus is 200", "cluster.gpus (128)"),
        (
            {"cluster__rollout_gpus": 90, "rollout__tensor_parallel": 4},
            "rollout_gpus is 90, but must be a multiple of rollout.tensor_parallel (4)",
            "use 88 or 92",
        ),
        (
            {"cluster__placement": "colocated"},
            "generates while it trains",
            "placement: disaggregated, or schedule synchronous",
        ),
        (
            {
                "cluster__placement": "colocated",
                "schedule__name": "synchronous",
                "cluster__rollout_gpu": "H100",
            },
            "colocated GPUs generate and train",
            "leave it empty",
        ),
        (
            {"rollout__tensor_parallel": 12, "model": "Qwen2.5-1.5B"},
            "a node of H800 has 8 GPUs",
            "use 8 or 16",
        ),
        # --- memory
        (
            {
                "model": "Qwen2.5-32B",
                "trainer__tensor_parallel": 8,
                "cluster__rollout_gpu": "A100-40",
            },
            "Qwen2.5-32B does not fit",
            "tensor_parallel=2",
        ),
        (
            {"rollout__memory_utilization": 0.045},
            "a sequence of 27904 tokens does not fit",
            "tensor_parallel=2",
        ),
        ({"rollout__memory_utilization": 1.5}, "memory_utilization is 1.5", "> 0 and <= 1"),
        (
            {"trainer__micro_batch_tokens": 8192},
            "micro_batch_tokens is 8192, but prompt and response may have 27904 tokens",
            "raise it to at least that",
        ),
        # --- trainer
        ({"trainer__tensor_parallel": 3}, "32 training GPUs", "multiple of 3"),
        ({"trainer__tensor_parallel": 3, "trainer__step_s": 2.0}, "32 training", "multiple of 3"),
        ({"trainer__mfu": 1.5}, "mfu is 1.5", "> 0 and <= 1"),
        # --- lengths
        ({"workload__answers__mean_tokens": 30_000.0}, "30000", "max_tokens"),
        ({"workload__answers__sigma": -1.0}, "sigma is -1.0", "> 0"),
        ({"workload__answers__kind": "trace"}, "trace", ""),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_every_problem_is_one_line_with_its_bound_and_a_fix(
    values: dict[str, Any], bound: str, fix: str
) -> None:
    found = refused(**values)
    assert len(found) == 1, found
    assert "\n" not in found[0]
    assert bound in found[0]
    assert fix in found[0]


def test_a_model_that_fits_nowhere_is_a_problem_of_both_sides() -> None:
    found = problems(config(model="Qwen2.5-72B"))
    assert [line.split(":")[0] for line in found] == ["rollout", "trainer"]
    assert all("tensor_parallel" in line and "\n" not in line for line in found)


def test_a_measured_step_has_no_token_budget() -> None:
    settings = {"trainer__micro_batch_tokens": 8192, "trainer__dynamic_batching": True}
    assert problems(config(**settings, trainer__step_s=150.0)) == []
    assert len(problems(config(**settings))) == 1


def test_all_problems_are_listed_at_once() -> None:
    wrong = refused(workload__steps=0, seeds=-1, schedule__eta=-2.0, workload__turns=2.5)
    assert len(wrong) == 4
    broken = config(cluster__gpu="H10", workload__steps=1, model="Q", trainer__token_s=1.0)
    found = problems(broken)
    assert len(found) == 4
    with pytest.raises(ConfigError, match=r"unknown GPU 'H10'") as told:
        check_config(broken)
    assert str(told.value).split("\n") == found
    # The workload beside the placement and the schedule.
    settings = {"cluster__rollout_gpus": 0, "schedule__max_lag": 1.0}
    bound = {"schedule__batch_order": "bounded_lag"}
    assert len(problems(config(workload__steps=1, **settings, **bound))) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"cluster__placement": "colocated", "schedule__name": "synchronous"},
        {"cluster__placement": "colocated", "schedule__name": "partial_rollout"},
        {"cluster__placement": "colocated", "schedule__eta": 0.0},
        {"schedule__eta": math.inf},
        {"schedule__require_batches": 1},
        {"cluster__hybrid_gpus": 32},
        {"cluster__hybrid_gpus": 96, "schedule__name": "synchronous"},
        {"cluster__hybrid_gpus": 32, "schedule__name": "partial_rollout"},
        {"cluster__hybrid_gpus": 32, "cluster__rollout_gpus": 128},
        # Ignored.
        {
            **{"cluster__placement": "colocated", "schedule__name": "synchronous"},
            "cluster__hybrid_gpus": 500,
        },
        {"schedule__name": "synchronous", "schedule__require_batches": 2},
        {"schedule__name": "one_step_overlap", "schedule__require_batches": 2},
        # All of them at once are a whole batch.
        {
            **{"cluster__placement": "colocated", "schedule__name": "synchronous"},
            "schedule__require_batches": 4,
        },
        {"schedule__batch_order": "bounded_lag"},
        {
            "schedule__batch_order": "bounded_lag",
            "schedule__max_lag": 1.0,
            "schedule__on_late": "drop",
        },
        {"cluster__rollout_gpu": "H20"},
        # 72 GPUs are connected, though not to those that train.
        {
            **{"cluster__rollout_gpu": "GB200", "rollout__tensor_parallel": 16},
            **{"model": "Qwen2.5-72B", "trainer__step_s": 150.0},
        },
        {
            **{"cluster__rollout_gpu": "GB300", "rollout__tensor_parallel": 16},
            **{"model": "Qwen2.5-72B", "trainer__step_s": 150.0},
        },
        {"faults__node_mtbf_h": 5.0, "trainer__step_s": 150.0},
        {"workload__answers__kind": "constant"},
    ],
    ids=str,
)
def test_possible_configs_are_not_refused(values: dict[str, Any]) -> None:
    assert problems(config(**values)) == []
