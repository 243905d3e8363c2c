"""Colocated GPUs: each term against published seconds, sums against systems that no term is fitted
to, settings that replace terms."""

import dataclasses
import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest

from simulator.assembly.simulate import simulate
from simulator.assembly.unused import ignored_settings
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import OutsideConfig, SimulationConfig, TrainerConfig
from simulator.costs.host_copies import (
    PINNED_ERROR,
    copy_rate,
    pageable_rate,
    pinned_alone_share,
    pinned_shared_share,
    published,
    rows_of,
)
from simulator.costs.switch import (
    GRAPHS,
    OFFLOAD,
    OTHER,
    OTHER_SYSTEMS,
    REFIT,
    RELOAD,
    SLEEP,
    WAKE,
    SwitchCost,
    expert_matrices,
    move_s,
    move_start_s,
    offloaded_bytes,
    refit_s,
    refit_speed,
    sleep_or_wake_s,
    sleep_start,
    switch_cost,
)
from simulator.costs.training_timing import (
    BATCH,
    CHECKPOINT,
    HANDED_ERROR,
    HANDED_S,
    VALIDATION,
    outside_from,
)

A100, H100 = find_gpu("A100-80"), find_gpu("H100")
MODEL = find_model("Llama-3.1-8B")


def config(**settings: Any) -> SimulationConfig:
    values: dict[str, Any] = {
        "model": "Llama-3.1-8B",
        "cluster.gpu": "H100",
        "gpus": 16,
        "cluster.placement": "colocated",
        "schedule.name": "synchronous",
        "trainer.pipeline_parallel": 2,
    }
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return load_simulation(None, values | given)


def terms(cost: SwitchCost) -> Mapping[str, float]:
    return {**cost.to_training, **cost.to_generation}


def switch(**settings: Any) -> SwitchCost:
    return switch_cost(config(**settings), MODEL, H100)


# --- published seconds ---------------------------------------------------------------------------


def test_every_row_names_its_source_and_date() -> None:
    for row in published():
        assert row.source
        assert row.date[:2] == "20"
        assert 0 < row.low_s <= row.high_s
    with pytest.raises(ValueError, match="no published seconds of 'teleport'"):
        rows_of("teleport")


def test_pageable_copies_are_as_slow_as_published() -> None:
    for direction, least, most in (("to host", 1.8e9, 2.8e9), ("to gpu", 5.3e9, 5.8e9)):
        rate = pageable_rate(direction)
        assert least < rate.bytes_per_s < most
        errors = [abs(row.bytes / rate.bytes_per_s / row.seconds - 1) for row in rows_of(direction)]
        assert rate.error == pytest.approx(fmean(errors))
        assert max(errors) < 0.35


def test_pinned_copies_take_a_share_of_the_link() -> None:
    assert pinned_alone_share() == pytest.approx((55 / 64 + 26.2 / 32) / 2)
    assert 0.3 < pinned_shared_share() < 0.34  # 9.8 to 11.2 of 32 GB/s
    alone, shared = (copy_rate("to host", H100, pinned=True, gpus=n).bytes_per_s for n in (1, 8))
    assert alone == pytest.approx(0.839 * 64e9, rel=1e-3)
    assert shared / alone == pytest.approx(pinned_shared_share() / pinned_alone_share())
    pageable = copy_rate("to host", H100, pinned=False, gpus=8)
    assert pageable == pageable_rate("to host")
    # A slow link is not left behind by pageable memory.
    slow = dataclasses.replace(H100, pcie_bytes_per_s=4e9)
    assert copy_rate("to gpu", slow, pinned=False, gpus=8).bytes_per_s < 4e9 * 0.4


@pytest.mark.parametrize(
    "row", [*rows_of("engine wake"), *rows_of("engine sleep")], ids=lambda row: row.subject
)
def test_engines_sleep_and_wake_in_the_published_seconds(row) -> None:
    """The shared row of vLLM's article is the source of the shared rate; the others check it."""
    start = sleep_start().seconds
    share = pinned_alone_share() if row.copying == 1 else pinned_shared_share()
    assert start + row.bytes / (share * 32e9) == pytest.approx(row.seconds, rel=0.4)
    assert 0.1 < start < 0.3


def test_sleeping_copies_the_weights_or_discards_them_or_does_nothing() -> None:
    def seconds(sleep: str, tensor_parallel: int = 1) -> float:
        return sleep_or_wake_s(sleep, MODEL, A100, tensor_parallel=tensor_parallel, gpus=8)

    assert seconds("none") == 0
    assert seconds("discard") == sleep_start().seconds
    copied_s = MODEL.weight_bytes() / (pinned_shared_share() * 32e9)
    assert seconds("to_host") - seconds("discard") == pytest.approx(copied_s)
    assert seconds("to_host", 2) - seconds("discard") == pytest.approx(copied_s / 2)


def test_the_offload_of_a_megatron_trainer_on_one_h100_takes_as_long_as_published() -> None:
    """NeMo-RL issue 3976 (2026-09-17): 3.76 s for Qwen2.5-0.5B; state of 5.9 GB by our count."""
    model = find_model("Qwen2.5-0.5B")
    taken = move_s("to host", "optimizer", TrainerConfig(), model, H100, gpus=1, pinned=False)
    assert offloaded_bytes("optimizer", TrainerConfig(), model, gpus=1) == pytest.approx(
        5.93e9, rel=0.01
    )
    assert taken == pytest.approx(3.76, rel=0.05)


def test_a_move_has_a_start_and_moves_each_gpus_share() -> None:
    layout = TrainerConfig(tensor_parallel=2, pipeline_parallel=2)
    size = MODEL.parameters
    assert offloaded_bytes("all", layout, MODEL, gpus=16) == pytest.approx(
        12 * size / 16 + 2 * size / 4
    )
    assert offloaded_bytes("optimizer", layout, MODEL, gpus=16) == pytest.approx(12 * size / 16)
    assert offloaded_bytes("none", layout, MODEL, gpus=16) == 0
    assert move_s("to host", "none", layout, MODEL, H100, gpus=16, pinned=True) == 0
    pinned, pageable = (
        move_s("to host", "all", layout, MODEL, H100, gpus=16, pinned=one) for one in (True, False)
    )
    assert move_start_s() < pinned < pageable
    assert 1.0 < move_start_s() < 1.4


@pytest.mark.parametrize(
    "row",
    [*rows_of("refit dense"), *rows_of("refit packed"), *rows_of("refit by tensor")],
    ids=lambda row: f"{row.term} {row.subject} {row.low_s}",
)
def test_refits_take_the_published_seconds(row) -> None:
    mixture = row.tensors > 0
    speed = refit_speed("by_tensor" if "tensor" in row.term else "packed", mixture=mixture)
    assert speed.seconds(row.bytes, row.tensors) == pytest.approx(row.seconds, rel=0.5)


def test_errors_of_refits_are_those_of_the_rows() -> None:
    assert refit_speed("packed", mixture=False).error == pytest.approx(0.276, abs=0.01)
    assert refit_speed("packed", mixture=True).error == pytest.approx(0.18, abs=0.01)
    assert refit_speed("by_tensor", mixture=True).error == pytest.approx(0.085, abs=0.01)


def test_packing_pays_for_experts_only() -> None:
    mixture = find_model("Qwen3-30B-A3B")
    assert expert_matrices(mixture) == 48 * 128 * 3
    assert expert_matrices(MODEL) == 0
    assert refit_s("by_tensor", mixture) > 5 * refit_s("packed", mixture)
    assert refit_s("by_tensor", MODEL) == refit_s("packed", MODEL)


# --- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_sums_of_systems_that_are_not_fitted_are_as_far_off_as_stated(tensor_parallel: int) -> None:
    """They do not state their parallelism; their GPUs have PCIe 4, as the A100."""
    errors = []
    for row in (row for row in published() if row.term == "whole"):
        name = "Qwen3-0.6B" if "0.6B" in row.subject else "Qwen3-4B"
        given = config(
            model=name,
            gpus=row.copying,
            trainer__pipeline_parallel=1,
            trainer__tensor_parallel=1 if row.copying == 1 else tensor_parallel,
            colocation__sleep="none",
        )
        errors.append(switch_cost(given, find_model(name), A100).seconds / row.seconds - 1)
    assert len(errors) == 3
    assert min(errors) < 0 < max(errors)
    assert abs(fmean(map(abs, errors)) - OTHER_SYSTEMS) < 0.09


def test_the_switch_is_the_sum_of_its_terms() -> None:
    cost = switch()
    assert list(cost.to_training) == [SLEEP, RELOAD]
    assert list(cost.to_generation) == [OFFLOAD, WAKE, REFIT, GRAPHS, OTHER]
    assert cost.seconds == pytest.approx(sum(terms(cost).values()))
    assert 10 < cost.seconds < 25
    assert OTHER_SYSTEMS <= cost.error < 0.4
    assert terms(cost)[GRAPHS] == terms(cost)[OTHER] == 0


def test_a_system_that_keeps_everything_on_the_gpu_only_refits() -> None:
    cost = switch(colocation__sleep="none", colocation__offload="none")
    assert cost.seconds == pytest.approx(refit_s("packed", MODEL))


@pytest.mark.parametrize(
    ("setting", "term"),
    [
        *(("sleep_s", SLEEP), ("reload_s", RELOAD), ("offload_s", OFFLOAD), ("wake_s", WAKE)),
        *(("refit_s", REFIT), ("graphs_s", GRAPHS), ("other_s", OTHER)),
    ],
)
def test_a_measured_term_replaces_its_own(setting: str, term: str) -> None:
    before, after = terms(switch()), terms(switch(**{f"colocation__{setting}": 9.0}))
    assert after == {**before, term: 9.0}


def test_given_terms_have_no_error() -> None:
    names = ("sleep_s", "wake_s", "offload_s", "reload_s", "refit_s")
    all_given = switch(**{f"colocation__{name}": 2.0 for name in names})
    assert (all_given.seconds, all_given.error) == (10.0, 0.0)
    assert all_given.provenance.endswith("given")
    some = switch(colocation__offload_s=100.0)
    assert some.error < 0.1
    assert "colocation.offload_s, given; published" in some.provenance
    assert "larger ones were longer by what no term names (colocation.other_s)" in some.provenance
    assert switch(colocation__pinned=True, colocation__sleep="discard").error < PINNED_ERROR


def test_a_measured_switch_is_the_sum_of_both_ways() -> None:
    plain, measured = switch(), switch(weights__switch_s=12.0)
    assert measured.seconds == pytest.approx(12)
    assert measured.to_training_s / 12 == pytest.approx(plain.to_training_s / plain.seconds)
    assert measured.error == 0
    nothing = {f"colocation__{name}": 0.0 for name in ("sleep_s", "wake_s", "refit_s")}
    nothing["colocation__offload"] = "none"
    assert switch(**nothing).seconds == 0
    assert switch(**nothing, weights__switch_s=3.0).seconds == 3


def test_impossible_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"refit weights takes -1\.0 s"):
        SwitchCost(to_training={}, to_generation={REFIT: -1.0})


# --- what a step does besides --------------------------------------------------------------------


def test_colocated_steps_have_the_published_time_of_a_batch() -> None:
    """vime issue 442 (2026-09-19): 13.5 ms for 16 responses, 124.9 ms for 256."""
    cost = outside_from(OutsideConfig(), colocated=True)
    assert cost is not None
    assert cost.before_training(16)[BATCH] == pytest.approx(0.0135)
    assert cost.before_training(256)[BATCH] == pytest.approx(0.1249)
    assert cost.error is None
    assert outside_from(OutsideConfig(), colocated=False) is None
    assert outside_from(OutsideConfig(batch_s=0), colocated=True) is None


VERL = TrainerConfig(kind="fsdp2")


def test_a_streamed_trainer_waits_as_long_as_published_for_batches_that_have_finished() -> None:
    """verl, Qwen2.5-Math-7B on H20 (2026): waits less 5.8 s of weights, or generation and these."""
    waits = [(25.6 - 5.8, 8192), (26.3 - 5.8, 8192), (30.9 - 5.8, 8192), (45 - 27.7, 6144)]
    each = [seconds / responses for seconds, responses in waits]
    assert fmean(each) == pytest.approx(HANDED_S, rel=0.01)
    others = [abs(math.log((sum(each) - one) / 3 / one)) for one in each]
    assert fmean(others) == pytest.approx(HANDED_ERROR, abs=0.01)
    cost = outside_from(OutsideConfig(), colocated=False, trainer=VERL)
    assert cost is not None
    assert cost.before_training(8192)[BATCH] == pytest.approx(22.1, abs=0.1)
    assert cost.error == HANDED_ERROR
    assert outside_from(OutsideConfig(batch_s=0), colocated=False, trainer=VERL) is None
    measured = TrainerConfig(kind="fsdp2", step_s=9)
    assert outside_from(OutsideConfig(), colocated=False, trainer=measured) is None
    colocated = outside_from(OutsideConfig(), colocated=True, trainer=VERL)
    assert colocated == outside_from(OutsideConfig(), colocated=True)


def test_a_refit_on_more_gpus_than_published_fits_into_the_measured_step() -> None:
    """DeepSeek-V3 on 256 and 512 H100 (NeMo-RL 0.6): steps of 134 and 111 s leave 48 and 41."""
    model = find_model("DeepSeek-V3")
    assert refit_s("packed", model, gpus=256) < 1.1 * 48
    assert refit_s("packed", model, gpus=512) < 41
    assert refit_s("packed", model, gpus=8) == refit_s("packed", model, gpus=128) > 80


def test_validation_and_checkpoints_come_every_so_many_steps() -> None:
    settings = OutsideConfig(
        batch_s=3, validation_s=5, validation_steps=2, checkpoint_s=7, checkpoint_steps=3
    )
    cost = outside_from(settings, colocated=False)
    assert cost is not None
    assert cost.before_training(99) == {BATCH: 3}
    after = [cost.after_training(step) for step in range(1, 7)]
    assert after == [
        {},
        {VALIDATION: 5},
        {CHECKPOINT: 7},
        {VALIDATION: 5},
        {},
        {VALIDATION: 5, CHECKPOINT: 7},
    ]


def test_a_colocated_run_shows_each_term() -> None:
    given = config(
        workload__prompts_per_batch=16,
        workload__samples_per_prompt=2,
        workload__steps=5,
        workload__warmup_steps=1,
        workload__answers__max_tokens=2000,
        workload__answers__mean_tokens=500,
        colocation__graphs_s=4.0,
        colocation__other_s=3.0,
        outside__batch_s=2.0,
        outside__validation_s=6.0,
        outside__validation_steps=2,
        trainer__step_s=10.0,
        seeds=1,
    )
    cost, result = switch_cost(given, MODEL, H100), simulate(given)
    busy = result.pools["all"].busy
    for name, seconds in (terms(cost) | {BATCH: 2.0, VALIDATION: 3.0}).items():
        assert busy[name] * result.step_s == pytest.approx(seconds), name
    assert result.mean("outside_s") == pytest.approx(5)
    assert result.mean("export_s") == pytest.approx(cost.to_training_s)
    known = result.mean("generate_s") + 10 + cost.seconds + 5
    assert (
        result.pools["all"].utilization * result.step_s <= result.step_s - cost.seconds - 5 + 1e-6
    )
    assert result.step_s >= known - 1e-6


def test_an_asynchronous_trainer_does_outside_work_too() -> None:
    given = load_simulation("small", {"outside.batch_s": 0.25, "outside.checkpoint_s": 1.5})
    with_both = given.with_settings({"outside.checkpoint_steps": 1})
    assert simulate(with_both).mean("outside_s") == pytest.approx(1.75)
    assert [line for line in ignored_settings(given) if "checkpoint" in line]
    assert not list(ignored_settings(with_both))


def test_settings_of_colocated_gpus_that_change_nothing_are_named() -> None:
    apart = load_simulation(None, {"colocation.pinned": True})
    assert [
        line for line in ignored_settings(apart) if "colocation.pinned is true, but has no" in line
    ]
    both = config(colocation__refit_s=2.0, weights__switch_s=9.0)
    assert [line for line in ignored_settings(both) if "only changes the proportion" in line]
    assert not list(ignored_settings(config(colocation__refit_s=2.0)))
