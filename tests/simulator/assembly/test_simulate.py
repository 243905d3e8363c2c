"""Simulations of configs: real costs, small clusters, and the effect of settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from areal_lab.runlog.activity import idle_by_cause
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.records import Record, log_of, read_log
from areal_lab.runlog.replay import check_replay
from simulator.assembly import simulate as fit
from simulator.assembly.engines import engines_of
from simulator.assembly.simulate import build, replicate, simulate, simulated_log
from simulator.config.schema import SimulationConfig


def small(**values: Any) -> SimulationConfig:
    """8 GPUs, 16 x 4 responses of 500 tokens; `small(schedule__eta=2)` sets `schedule.eta`."""
    made = SimulationConfig(model="Qwen2.5-1.5B", seeds=2)
    made.cluster.gpu, made.cluster.gpus, made.cluster.rollout_gpus = "H100", 8, 6
    made.workload.prompts_per_batch, made.workload.samples_per_prompt = 16, 4
    made.workload.steps, made.workload.warmup_steps = 12, 4
    made.workload.answers.mean_tokens, made.workload.answers.max_tokens = 500, 2000
    return made.with_settings({name.replace("__", "."): one for name, one in values.items()})


def measured(**values: Any) -> SimulationConfig:
    """All times are given: 100 tokens of 10 ms, 0.5 s of training, almost no prompt."""
    return small(
        **{
            "workload__answers__kind": "constant",
            "workload__answers__mean_tokens": 100,
            "workload__prompt_tokens": 0,
            "rollout__decode_step_s": 0.01,
            "trainer__step_s": 0.5,
            "weights__update_s": 0.25,
            **values,
        }
    )


def test_a_synchronous_step_is_the_sum_of_its_measured_parts() -> None:
    result = simulate(measured(schedule__name="synchronous"))
    assert result.columns["step_s"][1:] == pytest.approx(1.0 + 0.5 + 0.25, rel=1e-9)


def test_a_step_of_one_step_overlap_is_the_longer_side_plus_the_broadcast() -> None:
    for train_s in (0.3, 3.0):
        config = measured(
            schedule__name="one_step_overlap", weights__backend="nccl", trainer__step_s=train_s
        )
        assert simulate(config).step_s == pytest.approx(max(1.0, train_s) + 0.25, rel=1e-9)


def test_a_colocated_step_is_the_sum_of_its_measured_parts() -> None:
    config = measured(
        schedule__name="synchronous",
        cluster__placement="colocated",
        weights__switch_s=0.7,
        outside__batch_s=0.0,
    )
    result = simulate(config)
    assert result.columns["step_s"][1:] == pytest.approx(1.0 + 0.5 + 0.7, rel=1e-9)
    assert list(result.pools) == ["all"]


def test_an_asynchronous_run_bound_by_training_takes_the_time_of_training() -> None:
    config = measured(trainer__step_s=9.0, weights__update_s=0.0)
    assert simulate(config).step_s == pytest.approx(9.0, rel=1e-9)


def test_only_trained_tokens_count() -> None:
    result = simulate(measured(schedule__name="synchronous"))
    assert (result.columns["tokens"] == 16 * 4 * 100).all()
    assert result.tokens_per_s == pytest.approx(6400 / 1.75, rel=1e-9)
    assert result.counts.generated_tokens == 6400 * 8


@pytest.mark.parametrize("name", ["synchronous", "one_step_overlap", "asynchronous"])
def test_a_simulated_log_with_real_costs_reads_like_a_runs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    result = simulate(small(schedule__name=name), log=path)
    with path.open() as file:
        log = read_log(file)
    assert check_replay(log).agrees
    batches = list(trained_batches(log))
    assert [batch.tokens for batch in batches] == result.columns["tokens"].tolist()
    assert [batch.done_s for batch in batches] == result.columns["end_s"].tolist()
    use = idle_by_cause(log)
    assert {"decode", "prefill"} <= set(use["engine 0"].busy_s)
    assert "forward/backward" in use["trainer"].busy_s


def test_idle_shares_with_real_engines_equal_those_of_the_log() -> None:
    records: list[Record] = []
    config = small(workload__warmup_steps=0, workload__steps=30)
    result = simulate(config, log=records.append)
    use = idle_by_cause(log_of(records))
    engines = [use[f"engine {number}"] for number in range(6)]
    idle = sum(one.idle_share for one in engines) / 6
    # A paused engine ends its step first: a few milliseconds per update.
    assert idle == pytest.approx(result.pools["rollout"].idle_share, abs=0.005)
    decode = sum(one.busy_s["decode"] / one.total_s for one in engines) / 6
    assert decode == pytest.approx(result.pools["rollout"].busy["decode"], abs=0.005)
    assert use["trainer"].idle_share == pytest.approx(result.pools["training"].idle_share, abs=1e-9)


def test_seeds_in_parallel_processes_equal_seeds_one_by_one() -> None:
    config = small(seeds=3, seed=5)
    told: list[int] = []
    many = replicate(config, processes=2, on_result=lambda result: told.append(result.seed))
    assert [result.seed for result in many.results] == [5, 6, 7] == sorted(told)
    alone = [simulate(config, seed=seed).to_json() for seed in (5, 6, 7)]
    assert [json.dumps(r.to_json()) for r in many.results] == [json.dumps(r) for r in alone]
    assert many.step_s.low < many.step_s.mean < many.step_s.high


def test_common_random_numbers_make_a_ratio_more_precise_than_its_parts() -> None:
    slow, fast = (
        replicate(small(schedule__name="synchronous", trainer__mfu=mfu, seeds=4), processes=1)
        for mfu in (0.1, 0.4)
    )
    ratio = fast.ratio(slow, lambda result: result.tokens_per_s)
    assert ratio.low > 1
    assert (
        ratio.half_width / ratio.mean < 0.5 * slow.tokens_per_s.half_width / slow.tokens_per_s.mean
    )


def test_eta_0_is_synchronous_with_real_costs_too() -> None:
    zero = simulate(small(schedule__eta=0.0))
    whole = simulate(small(schedule__name="synchronous"))
    assert zero.columns["end_s"].tolist() == whole.columns["end_s"].tolist()


def test_interrupted_contexts_are_prefilled_again_and_drained_ones_are_not() -> None:
    values = {"trainer__step_s": 1.0, "weights__update_s": 0.2}
    interrupted = simulate(small(**values))
    drained = simulate(small(**values, schedule__interruptible=False))
    assert interrupted.counts.interruptions > 0
    assert interrupted.counts.recomputed_tokens > 0
    assert drained.counts.interruptions == drained.counts.recomputed_tokens == 0
    assert max(drained.head_lags) >= 1


def test_stragglers_and_failures_cost_throughput() -> None:
    healthy = simulate(small()).tokens_per_s
    slow = simulate(small(faults__straggler_share=0.5, faults__straggler_slowdown=3.0))
    assert slow.tokens_per_s < healthy
    failing = simulate(
        small(
            faults__node_mtbf_h=0.003,
            faults__detection_s=1.0,
            faults__restart_s=5.0,
            workload__steps=40,
        )
    )
    assert failing.tokens_per_s < healthy
    assert failing.counts.trainer_restarts > 0


def test_scoring_and_tools_take_their_time() -> None:
    plain = simulate(measured(schedule__name="synchronous"))
    scored = simulate(measured(schedule__name="synchronous", workload__reward__mean_s=2.0))
    assert scored.step_s == pytest.approx(plain.step_s + 2.0, rel=1e-9)
    turns = simulate(
        measured(schedule__name="synchronous", workload__turns=4, workload__tool__mean_s=1.0)
    )
    assert turns.step_s == pytest.approx(plain.step_s + 3.0, rel=0.01)
    assert turns.pools["rollout"].idle["request on its way or at a tool"] > 0.4


def test_the_default_number_of_running_sequences_is_what_the_cache_holds() -> None:
    def running(**settings: Any) -> int:
        return engines_of(small(cluster__gpu="H100", **settings)).running

    assert running(model="Qwen2.5-1.5B") == 256
    assert running(model="Qwen2.5-1.5B", rollout__max_running=40) == 40
    long = {"workload__answers__max_tokens": 30_000, "workload__answers__mean_tokens": 10_000}
    assert 1 <= running(model="Qwen2.5-32B", **long) < 10
    assert build(small(rollout__max_running=40)).limits.max_in_flight == 6 * 40 // 4
    assert build(small(rollout__max_running=1)).limits.max_in_flight == 16
    assert build(small(schedule__max_concurrent_prompts=9)).limits.max_in_flight == 9


def test_an_engine_may_take_whole_nodes() -> None:
    """It exchanges over the network, and any of its nodes stops it."""
    settings = {"model": "Qwen3-32B", "cluster__gpus": 48, "cluster__rollout_gpus": 32}
    layout = {"trainer__tensor_parallel": 4, "trainer__pipeline_parallel": 2}
    near, far = (
        build(small(rollout__tensor_parallel=split, **settings, **layout)) for split in (8, 16)
    )
    assert (near.engines, near.engines_per_node, near.nodes_per_engine) == (4, 1, 1)
    assert (far.engines, far.engines_per_node, far.nodes_per_engine) == (2, 1, 2)


def test_placements_divide_the_gpus() -> None:
    system = build(small(rollout__tensor_parallel=2))
    assert (system.engines, system.rollout.tensor_parallel, system.training_gpus) == (3, 2, 2)
    assert system.engines_per_node == 4
    assert system.gpus == 8
    both = build(small(cluster__placement="colocated", schedule__name="synchronous"))
    assert (both.engines, both.training_gpus, both.gpus) == (8, 8, 8)
    assert build(small()).push_holds_trainer is False
    assert build(small(weights__backend="nccl")).push_holds_trainer is True


def test_order_and_schedule_are_those_of_the_config() -> None:
    limits = build(small(schedule__batch_order="bounded_lag")).limits
    assert (limits.order.name, limits.order.max_lag, limits.order.on_late) == (
        "bounded_lag",
        4,
        "wait",
    )
    with pytest.raises(ValueError, match=r"schedule.batch_order is bounded_lag, .* set max_lag"):
        build(small(schedule__batch_order="bounded_lag", schedule__eta=math.inf))
    limits = build(small(schedule__batch_order="strict_start_order")).limits
    assert limits.order.name == "strict_start_order"
    assert build(small(schedule__name="partial_rollout")).limits.schedule.carry_over
    assert build(small(schedule__interruptible=False)).limits.schedule.on_new_weights == "drain"


def test_an_impossible_config_is_refused_before_anything_runs() -> None:
    for call in (simulate, replicate, build):
        with pytest.raises(ValueError, match="rollout_gpus is 8"):
            call(small(cluster__rollout_gpus=8))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_seed_can_be_logged_and_changes_nothing(processes: int) -> None:
    config = small(seeds=3, seed=4)
    records: list[Record] = []
    logged = replicate(config, processes=processes, log=records.append)
    plain = replicate(config, processes=1)
    assert [result.seed for result in logged.results] == [4, 5, 6]
    assert logged.to_json() == plain.to_json()
    assert log_of(records) == simulated_log(config, seed=4)


def test_all_seeds_share_one_system(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[SimulationConfig] = []

    def counted(config: SimulationConfig) -> Any:
        built.append(config)
        return original(config)

    original = fit.built
    monkeypatch.setattr(fit, "built", counted)
    assert len(replicate(small(seeds=3), processes=1).results) == 3
    assert len(built) == 1
