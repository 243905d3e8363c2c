"""The JSON object of a simulation, its tables and its warnings."""

from __future__ import annotations

import json
import math
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_lab.config.record import value_of
from areal_lab.runlog.intervals import student_t
from simulator.assembly.simulate import replicate, simulate
from simulator.assembly.unused import ignored_overrides, ignored_settings
from simulator.catalogue.gpu import find_gpu
from simulator.config.load import load_simulation, presets
from simulator.config.schema import SimulationConfig
from simulator.costs.trainers import speed_error
from simulator.report.measured_errors import MeasuredErrors
from simulator.report.notes import limit_note, setting_lines
from simulator.report.step_parts import PARTS_OF_A_STEP, seconds_of
from simulator.report.tables import show_comparison, show_report
from simulator.report.to_json import comparison, cost_parts, report, warnings
from simulator.run.one_seed import IDLE_CAUSES
from simulator.run.result import Replicated
from simulator.stats.format import duration, duration_span, number, quantity, short_time, span
from tests.simulator.report.known_errors import EXACT, errors_of, row
from tools.pages.simulator import PAGE


@cache
def small(*overrides: str) -> tuple[SimulationConfig, Replicated]:
    config = load_simulation("small", ["seeds=3", *overrides])
    return config, replicate(config, processes=1)


def told(*overrides: str) -> dict[str, Any]:
    config, results = small(*overrides)
    return report(results, config)


def printed(*overrides: str) -> str:
    text = StringIO()
    show_report(Console(file=text, width=100), told(*overrides))
    return text.getvalue()


def ratios(
    first: tuple[str, ...], second: tuple[str, ...], errors: MeasuredErrors = EXACT
) -> dict[str, Any]:
    (one, runs), (other, others) = small(*first), small(*second)
    return comparison(runs, others, (one, other), errors)


def compared(
    first: tuple[str, ...], second: tuple[str, ...], errors: MeasuredErrors = EXACT
) -> str:
    text = StringIO()
    ratio = ratios(first, second, errors)
    console = Console(file=text, width=100)
    show_comparison(console, told(*first), told(*second), ratio)
    return text.getvalue()


def intervals(value: Any) -> list[dict[str, Any]]:
    """Every `{mean, low, high}` in an object."""
    if not isinstance(value, dict):
        return []
    if {"mean", "low", "high"} <= value.keys():
        return [value]
    return [found for inner in value.values() for found in intervals(inner)]


# --- JSON ----------------------------------------------------------------------------------------


def test_every_documented_number_has_its_interval() -> None:
    found = json.loads(json.dumps(told(), allow_nan=False))
    for name in ("step_s", "tokens_per_s", "utilisation", "idle", "lag", "cost", "energy"):
        inside = intervals(found[name]) or intervals({"": found[name]})
        assert inside, name
        assert all(one["low"] <= one["mean"] <= one["high"] for one in inside), name
    assert found["name"] == "small"
    assert found["seeds"] == [1, 2, 3]
    assert found["config"]["schedule"]["eta"] == 1
    assert found["config"]["trainer"]["step_s"] == 2
    assert set(found["utilisation"]) == {"rollout", "training"}


def numbers(value: Any) -> list[float]:
    """Every number in an object."""
    if isinstance(value, dict):
        return [found for inner in value.values() for found in numbers(inner)]
    return [] if value is None else [value]


def test_every_number_of_a_lag_has_its_interval() -> None:
    for found in (told()["lag"], told("eta=4")["lag"]):
        assert len(numbers(found)) == sum(map(len, intervals(found)))
        for kind in found.values():
            assert sum(one["mean"] for one in kind["histogram"].values()) == pytest.approx(1)


def test_the_lag_of_first_tokens_has_the_interval_of_the_balance() -> None:
    for name in ("mean", "p95"):
        one = told("eta=4")["lag"]["head"][name]
        assert one["low"] < one["seeds_low"] <= one["mean"] <= one["seeds_high"] <= one["high"]
        assert "seeds_low" not in told("eta=4")["lag"]["tail"][name]
    without = ("eta=4", "schedule.interruptible=false")
    assert "seeds_low" not in told(*without)["lag"]["head"]["mean"]
    shown = [printed(*overrides).count("90 % interval") for overrides in (("eta=4",), without)]
    assert shown[0] == shown[1] + 2


def test_the_shares_of_a_pool_sum_to_1() -> None:
    for overrides in ((), ("schedule.name=synchronous", "cluster.placement=colocated")):
        found = told(*overrides)
        for pool in found["utilisation"]:
            shares = [*found["busy"][pool].values(), *found["idle"][pool].values()]
            assert sum(share["mean"] for share in shares) == pytest.approx(1, abs=1e-9)


def test_throughput_per_gpu_times_the_gpus_is_the_throughput() -> None:
    found = told()
    for name in ("mean", "low", "high"):
        per_gpu = found["tokens_per_s_per_gpu"][name]
        assert 4 * per_gpu == pytest.approx(found["tokens_per_s"][name])


def test_a_single_seed_has_no_interval_and_says_so() -> None:
    config = load_simulation("small", ["seeds=1"])
    found = json.loads(json.dumps(report(replicate(config), config), allow_nan=False))
    for one in intervals(found):
        if "seeds_low" in one:  # the model's error is known, with any number of seeds
            assert one["seeds_low"] is one["seeds_high"] is None
            assert one["low"] <= one["mean"] <= one["high"]
        else:
            assert one["low"] is one["high"] is None
    assert found["warnings"][-1].startswith("1 seed: no confidence intervals")


def test_infinite_eta_is_valid_json() -> None:
    config = load_simulation("small", ["seeds=1", "eta=inf"])
    assert '"eta": "inf"' in json.dumps(report(replicate(config), config), allow_nan=False)


def test_a_comparison_divides_seed_by_seed() -> None:
    first, second = small(), small("schedule.name=synchronous")
    ratio = ratios((), ("schedule.name=synchronous",))
    quotients = [
        b.tokens_per_s / a.tokens_per_s
        for a, b in zip(first[1].results, second[1].results, strict=True)
    ]
    assert ratio["tokens_per_s"]["mean"] == pytest.approx(sum(quotients) / 3)
    assert ratio["tokens_per_s"]["high"] < 1


def test_cost_and_energy_are_compared_seed_by_seed_with_an_interval() -> None:
    ratio = ratios((), ("schedule.name=synchronous",))
    assert ratio["gpu_hours_per_step"] == pytest.approx(ratio["step_s"])
    for name in ("gpu_hours_per_step", "dollars_per_step", "kwh_per_step"):
        one = ratio[name]
        assert one["low"] < one["mean"] < one["high"], name
    lines = compared((), ("schedule.name=synchronous",)).splitlines()
    for title in ("GPU-hours per step", "dollars per step", "kWh per step"):
        assert next(line for line in lines if line.startswith(title)).count("±") == 3


def test_costs_are_not_compared_without_a_price() -> None:
    ratio = ratios((), ("cluster.gpu=H800",))
    assert ratio["dollars_per_step"] is None
    assert ratio["gpu_hours_per_step"]["mean"] == pytest.approx(1)
    assert "dollars per step" not in compared((), ("cluster.gpu=H800",))


# --- provenance and warnings ---------------------------------------------------------------------


def test_given_times_have_no_error_and_fitted_ones_have_theirs() -> None:
    parts = {part.name: part for part in cost_parts(load_simulation("small"))}
    assert [parts[name].error for name in ("decode", "training", "weight update")] == [0, 0, 0]
    parts = {part.name: part for part in cost_parts(load_simulation(None))}
    for name in ("decode", "prefill", "training"):
        error = parts[name].error
        assert error is not None
        assert 0 < error < 0.15
    assert parts["engine CPU"].error is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.gpu=H800"], ["H800: not checked", "H800: no published price"]),
        (["cluster.gpu=H800", "cluster.price_per_gpu_h=2"], ["H800: not checked"]),
        (["cluster.gpu=H100"], []),
        (["cluster.gpu=H100", "cluster.rollout_gpu=MI300X"], ["decode: ", "prefill: ", "MI300X: "]),
        (["cluster.gpu=H100", "seeds=2"], ["2 seeds: wide confidence intervals"]),
        (
            ["cluster.gpu=MI300X", "cluster.rollout_gpu=H100"],
            ["training: not measured on MI300X", "MI300X: "],
        ),
    ],
)
def test_warnings_name_what_is_uncertain(overrides: list[str], expected: list[str]) -> None:
    config = load_simulation(None, overrides)
    found = warnings(config)
    for beginning in expected:
        assert any(line.startswith(beginning) for line in found), (beginning, found)
    assert all(any(line.startswith(one) for one in expected) for line in found), found


def test_the_error_of_training_equals_that_of_a_plan() -> None:
    for gpu in ("H100", "H200", "L40S", "MI300X"):
        parts = cost_parts(load_simulation(None, [f"cluster.gpu={gpu}"]))
        training = next(part for part in parts if part.name == "training")
        assert training.error == speed_error(find_gpu(gpu)).error
        assert (training.error == 0.3) is (gpu in {"L40S", "MI300X"})
        assert (f"not measured on {gpu}, about ±30%" in training.source) is (training.error == 0.3)


def test_caveats_of_a_model_are_warnings(tmp_path: Path) -> None:
    shape = {
        **{"model_type": "unheard_of", "hidden_size": 896, "intermediate_size": 4864},
        **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
        **{"vocab_size": 151936, "sliding_window": 1024, "max_position_embeddings": 32768},
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    config = load_simulation("small", [f"model={file}"])
    found = warnings(config)
    assert any("'unheard_of' is unknown: it is counted like Llama" in a for a in found)
    assert any("24 of its 24 layers attend to only a part of the context" in line for line in found)
    assert not any("Llama" in line for line in warnings(load_simulation("small")))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eta=8"], "lags still grow after the 2 steps of warm-up"),
        (["eta=8", "trainer.step_s=0.1"], "workload.warmup_steps is 2, but should be >= 9"),
        (["eta=8", "steps=80", "warmup_steps=50"], ""),
        (["eta=8", "workload.whole_run=true"], ""),
        (["eta=8", "schedule.name=synchronous"], ""),
        (["eta=inf"], ""),
        ([], ""),
    ],
)
def test_a_warm_up_that_is_too_short_has_a_warning(overrides: list[str], says: str) -> None:
    found = [line for line in told(*overrides)["warnings"] if "warm-up" in line or "warmup" in line]
    assert len(found) == (1 if says else 0)
    assert all(line.startswith(says) for line in found)


def test_lags_without_a_warning_are_stationary() -> None:
    early, late = told("eta=8"), told("eta=8", "steps=80", "warmup_steps=50")
    assert early["lag"]["token"]["mean"]["high"] < 5
    assert late["lag"]["token"]["mean"]["mean"] == pytest.approx(7.7, abs=0.1)


@pytest.mark.parametrize(
    "override",
    [
        *("schedule.max_lag=3", "schedule.on_late=drop", "weights.switch_s=2"),
        *("rollout.engine_overhead_s=0.1", "trainer.mfu=0.3", "weights.load_s=2"),
        *("weights.export_s=2", "workload.tool.mean_s=3", "schedule.require_batches=1"),
    ],
)
def test_a_setting_without_effect_has_a_warning(override: str) -> None:
    found = [
        line
        for line in warnings(load_simulation("small", [override]))
        if "effect" in line or "proportion" in line
    ]
    assert len(found) == 1
    assert found[0].startswith(override.replace("=", " is "))


COLOCATED = ("cluster.placement=colocated", "schedule.name=synchronous", "weights.update_s=null")
LORA = ("trainer.lora_rank=8", "weights.merge_adapters=true")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("trainer.precision", ("trainer.precision=fp8",)),
        ("trainer.precision", ("trainer.step_s=null", "trainer.mfu=0.3", "trainer.precision=fp8")),
        ("trainer.lora_rank", LORA),
        ("trainer.balance", ("trainer.balance=batch",)),
        ("trainer.kind", ("trainer.kind=fsdp2",)),
        ("trainer.pipeline_chunks", ("trainer.pipeline_chunks=2",)),
        ("trainer.expert_imbalance", ("trainer.expert_imbalance=2",)),
        ("rollout.engine_overlap", ("rollout.engine_overlap=false",)),
        ("weights.update_s", (*COLOCATED[:2], "weights.update_s=2")),
        ("weights.load_s", (*COLOCATED, "weights.load_s=2")),
        ("weights.update_s", ("cluster.hybrid_gpus=2", "weights.update_s=2")),
        ("weights.merge_adapters", (*COLOCATED, *LORA, "colocation.refit_s=2")),
        ("colocation.pinned", (*COLOCATED, "colocation.pinned=true", "colocation.offload=none")),
        (
            "colocation.pinned",
            (
                *(*COLOCATED, "colocation.pinned=true"),
                *("colocation.offload_s=1", "colocation.reload_s=1"),
            ),
        ),
        (
            "colocation.sleep",
            (
                *(*COLOCATED, "colocation.sleep=discard"),
                *("colocation.sleep_s=1", "colocation.wake_s=1"),
            ),
        ),
        (
            "colocation.offload",
            (
                *(*COLOCATED, "colocation.offload=optimizer"),
                *("colocation.offload_s=1", "colocation.reload_s=1"),
            ),
        ),
        (
            "colocation.refit",
            (*COLOCATED, "colocation.refit=by_tensor", "colocation.refit_s=1"),
        ),
        ("outside.validation_steps", ("outside.validation_steps=5",)),
        ("outside.checkpoint_steps", ("outside.checkpoint_steps=5",)),
    ],
)
def test_a_setting_that_another_one_replaces_has_a_warning(
    name: str, overrides: tuple[str, ...]
) -> None:
    """And changes nothing: without it, the times are the same."""
    config = load_simulation("small", overrides)
    (found,) = ignored_settings(config)
    assert found.startswith(f"{name} is ")
    assert "has no effect: " in found
    without = {name: value_of(load_simulation(None), name)}
    if name == "trainer.lora_rank":
        without["weights.merge_adapters"] = False
    assert simulate(config).step_s == simulate(config.with_settings(without)).step_s


@pytest.mark.parametrize(
    "overrides",
    [
        # A measured step of adapters, which travel alone.
        ("trainer.lora_rank=8", "weights.update_s=null"),
        # Adapters are a part of the weights that a refit brings.
        (*COLOCATED, *LORA),
        # Without it, engines would never get the weights that they drop.
        (*COLOCATED, *LORA, "colocation.sleep=discard", "colocation.refit_s=2"),
        # What is moved to main memory depends on the trainer.
        (*COLOCATED, *LORA, "trainer.kind=fsdp2"),
        (*COLOCATED, "colocation.sleep=discard", "colocation.sleep_s=1"),
        (*COLOCATED, "colocation.pinned=true", "colocation.offload_s=1"),
        ("outside.validation_steps=5", "outside.validation_s=3"),
        ("weights.update_s=null", "weights.load_s=2"),
        ("cluster.hybrid_gpus=1", "weights.update_s=2"),
        # They change the cache, too.
        ("rollout.weight_precision=fp8", "cluster.gpu=H100"),
    ],
)
def test_a_setting_that_is_only_partly_replaced_has_no_warning(overrides: tuple[str, ...]) -> None:
    assert not list(ignored_settings(load_simulation("small", overrides)))


def test_minibatches_that_are_streamed_are_named_with_the_schedule() -> None:
    streamed = ["workload.minibatches=4", "schedule.require_batches=2"]
    lines = setting_lines(told(*streamed))
    assert any("eta 1, trains on 2 of 4 minibatches as they finish" in line for line in lines)
    assert not list(ignored_settings(load_simulation("small", streamed)))
    assert not any("as they finish" in line for line in setting_lines(told()))


def test_hybrid_gpus_have_a_column_of_their_own_and_are_named_with_the_gpus() -> None:
    joined = ["cluster.hybrid_gpus=1", "workload.steps=6", "workload.warmup_steps=2"]
    lines = setting_lines(told(*joined))
    assert any(
        "2 generate (2 engines of TP 1), 1 of which join training, 3" in one for one in lines
    )
    text = printed(*joined)
    assert "rollout" in text.split("GPU time")[1].split("\n")[0]
    for part in ("hybrid", "waiting for hybrid GPUs", "refit weights", "switching", "update"):
        assert part in text, part
    assert not list(ignored_settings(load_simulation("small", joined)))
    all_of_them = told("cluster.hybrid_gpus=2", *joined[1:])
    assert set(all_of_them["utilisation"]) == {"hybrid", "training"}
    assert limit_note(all_of_them)
    for pool in ("hybrid", "training"):
        shares = [*all_of_them["busy"][pool].values(), *all_of_them["idle"][pool].values()]
        assert sum(one["mean"] for one in shares) == pytest.approx(1)


def test_trainers_that_generate_meanwhile_are_gpus_that_alternate() -> None:
    joined = ["cluster.rollout_gpus=4", "cluster.hybrid_gpus=2", "workload.steps=6"]
    alternate = told(*joined, "workload.warmup_steps=2")
    assert set(alternate["utilisation"]) == {"rollout", "hybrid"}
    assert "of the time of the hybrid GPUs, which alternate" in limit_note(alternate)
    assert any("2 of which join training, 2 train" in line for line in setting_lines(alternate))


def test_parts_of_a_step_are_those_of_the_hybrid_gpus_if_no_others_train() -> None:
    joined = ["cluster.rollout_gpus=4", "cluster.hybrid_gpus=2", "workload.steps=6", "seeds=1"]
    run = replicate(load_simulation("small", [*joined, "workload.warmup_steps=2"]), processes=1)
    seconds = seconds_of(run.results[0])
    assert sum(seconds[name] for name in PARTS_OF_A_STEP) == pytest.approx(seconds["step"])
    assert seconds["generation"] == 0
    assert seconds["update"] > 0
    assert seconds["moving"] > 0


def test_hybrid_gpus_are_ignored_when_colocated() -> None:
    found = list(ignored_settings(load_simulation("small", [*COLOCATED, "cluster.hybrid_gpus=1"])))
    assert len(found) == 1
    assert found[0].startswith(
        "cluster.hybrid_gpus is 1, but has no effect: all GPUs are colocated"
    )


@pytest.mark.parametrize(("other_s", "warned"), [(0.1, False), (100.0, True)])
def test_a_large_rest_of_a_step_has_a_warning_with_its_cause(
    other_s: float, *, warned: bool
) -> None:
    changes = [f"colocation.other_s={other_s}", "weights.update_s=null", "seeds=1"]
    lines = [line for line in told(*COLOCATED, *changes)["warnings"] if "other_s is" in line]
    assert bool(lines) is warned
    assert all("most likely generation is simulated too fast" in line for line in lines)
    assert not any(
        "other_s is" in line and "of the step" in line for line in told(*changes)["warnings"]
    )  # not colocated


def test_a_setting_with_an_effect_has_no_warning() -> None:
    for preset in presets():
        assert not list(ignored_settings(load_simulation(preset)))
    effective = [
        *("schedule.batch_order=bounded_lag", "schedule.max_lag=3", "schedule.on_late=drop"),
        *("cluster.placement=colocated", "schedule.name=synchronous", "weights.switch_s=2"),
        *("rollout.decode_step_s=null", "rollout.engine_overhead_s=0.1", "trainer.step_s=null"),
        *("trainer.mfu=0.3", "weights.update_s=null", "workload.turns=2", "workload.tool.mean_s=3"),
    ]
    assert not list(ignored_settings(load_simulation("small", effective)))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["schedule.name=synchronous", "eta=4"], True),
        (["schedule.name=one_step_overlap", "schedule.eta=4"], True),
        (["schedule.name=one_step_overlap", "max_staleness=1"], False),
        (["schedule.name=synchronous"], False),
        (["eta=4"], False),
        (["schedule.name=partial_rollout", "eta=4"], False),
    ],
)
def test_an_eta_that_the_schedule_ignores_has_a_warning(
    overrides: list[str], *, says: bool
) -> None:
    found = list(ignored_overrides(load_simulation("small", overrides), overrides))
    assert bool(found) is says
    assert all("use schedule.name=asynchronous" in line for line in found)


def test_a_given_step_that_exceeds_the_memory_has_a_warning() -> None:
    def told(*overrides: str) -> list[str]:
        found = warnings(load_simulation("small", ["rollout.tensor_parallel=2", *overrides]))
        return [line for line in found if line.startswith("training: memory is not checked")]

    (line,) = told("model=Qwen2.5-72B", "trainer.tensor_parallel=2")
    # 18 bytes for each of 72.7 billion parameters, on two GPUs.
    assert line.endswith("take 609.4 GiB on each of 2 GPUs, but H100 has 80.0")
    assert told() == told("model=Qwen2.5-7B", "gpus=6") == []


def test_a_given_price_silences_the_warning_about_an_unverified_one() -> None:
    unverified = load_simulation(None, ["cluster.gpu=A100-40"])
    assert any("its price is" in line for line in warnings(unverified))
    own = unverified.with_settings({"cluster.price_per_gpu_h": 1.0})
    assert not any("price" in line for line in warnings(own))


# --- tables --------------------------------------------------------------------------------------


def test_the_report_shows_the_main_results() -> None:
    text = printed()
    for part in (
        "2 generate (2 engines of TP 1), 2 train",
        "asynchronous, eta 1",
        "step time",
        "tokens/s",
        "idle: waiting for a batch",
        "utilization",
        "samples, first token",
        "GPU-hours",
        "kWh",
        "a step of 2 s, given",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 100


def test_lags_beyond_eta_are_explained_and_others_are_not() -> None:
    assert "Lags exceed eta (1), which bounds the number of started prompts" in " ".join(
        printed().split()
    )
    assert "Lags exceed eta" not in printed("schedule.batch_order=strict_start_order")
    assert "Lags exceed eta" not in printed("schedule.name=synchronous")


def test_lags_are_printed_with_their_intervals_and_the_largest_are_summed() -> None:
    row = next(line for line in printed().splitlines() if line.startswith("  1 "))
    assert row.count("±") == 3
    many = printed("eta=12", "trainer.step_s=60", "steps=30")
    assert "  9 or more" in many


def test_the_bottleneck_is_named() -> None:
    assert "Training limits this run" in printed("trainer.step_s=30")
    assert "Generation limits this run" in printed("trainer.step_s=0.1", "weights.update_s=0.01")
    assert "Both sides wait" in printed("schedule.name=synchronous")
    assert "limits this run" not in printed(
        "schedule.name=synchronous", "cluster.placement=colocated"
    )


@pytest.mark.parametrize(
    ("overrides", "limit", "helps"),
    [
        (
            ["workload.reward.mean_s=10", "workload.reward_workers=4"],
            "Rewards limit this run",
            "More workload.reward_workers would help",
        ),
        (["workload.reward.mean_s=10"], "Rewards limit this run", "Faster rewards"),
        (["workload.turns=4", "workload.tool.mean_s=5"], "Tools limit this run", "Faster tools"),
        (["weights.update_s=20"], "Weight updates limit this run", "A faster weights.backend"),
        (
            ["faults.node_mtbf_h=0.01", "faults.restart_s=60"],
            "Failures limit this run",
            "faults.node_mtbf_h",
        ),
        (
            ["schedule.name=synchronous", "cluster.placement=colocated", "weights.switch_s=1"],
            "Generation takes the largest share",
            "alternate between generation and training",
        ),
    ],
)
def test_neither_side_is_the_bottleneck_if_both_wait_for_something_else(
    overrides: list[str], limit: str, helps: str
) -> None:
    text = " ".join(printed(*overrides).split())
    assert limit in text
    assert helps in text
    assert "More GPUs for generation" not in text
    assert "More GPUs for training" not in text


def test_waits_inside_a_training_step_are_listed_below_the_utilization() -> None:
    brief = ["workload.steps=3", "workload.warmup_steps=1", "workload.prompts_per_batch=16"]
    config = load_simulation("figure_6a_32b", ["seeds=1", "trainer.dynamic_batching=false", *brief])
    found = report(replicate(config), config)
    text = StringIO()
    show_report(Console(file=text, width=100), found)
    bubble = found["busy"]["training"]["pipeline bubble"]["mean"]
    assert bubble > 0.01
    lines = text.getvalue().splitlines()
    row = next(line for line in lines if line.startswith("  including pipeline bubble"))
    assert f"{100 * bubble:.1f} %" in row
    assert "including" not in printed()


def test_every_cause_of_idleness_is_explained_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [cause for cause in IDLE_CAUSES if f"\n| {cause} |" not in page]
    assert missing == []


def test_a_measured_training_step_has_one_name() -> None:
    assert "train" in told()["busy"]["training"]
    assert "\ntrain " in printed()


def test_a_missing_price_is_shown_as_unknown() -> None:
    assert "unknown price" in printed("cluster.gpu=H800")


def test_a_comparison_names_the_faster_run_and_the_factor() -> None:
    text = compared((), ("schedule.name=synchronous",))
    assert "A trains" in text
    assert "times as fast as B" in text
    assert "GPU-hours." not in text
    backwards = compared(("schedule.name=synchronous",), ())
    assert "B trains" in backwards


def test_a_comparison_with_itself_finds_no_difference() -> None:
    assert "no significant difference in speed" in compared((), ())


def test_a_comparison_shows_that_fewer_gpus_at_the_same_speed_are_cheaper() -> None:
    many = ("trainer.step_s=60", "gpus=6", "rollout_gpus=4")
    few = ("trainer.step_s=60",)
    text = " ".join(compared(many, few).split())
    assert "B takes 0.667 times the GPU-hours" in text


def test_a_gain_within_the_model_s_error_is_undecided_and_says_by_how_much_it_is_off() -> None:
    synchronous = ("schedule.name=synchronous",)
    ratio = ratios((), synchronous, errors_of(1.0))
    assert ratio["undecided"]
    assert ratio["undecided_by"] == "model"
    assert ratio["model_error"]["of"] == "gain"
    text = " ".join(compared((), synchronous, errors_of(1.0)).split())
    assert "Undecided: A is simulated" in text
    assert "interval (0.37 to" not in text  # of the better one over the other
    assert "contains 1" in text
    assert "gains of asynchrony were predicted wrong by a factor of 2.72 in the median" in text
    decided = ratios((), synchronous)
    assert not decided["undecided"]
    assert decided["undecided_by"] is None


def test_a_gain_has_the_errors_of_gains_and_a_change_those_of_ratios() -> None:
    steps = (0.5, 0.5, 0.5)
    errors = MeasuredErrors([row(one, group=group, gain=1.0) for group in "abc" for one in steps])
    gain = ratios((), ("schedule.name=synchronous",), errors)["step_s"]
    half = student_t(3, 0.9) * 1.0
    assert math.log(gain["high"] / gain["mean"]) == pytest.approx(half, rel=0.01)
    change = ratios((), ("workload.steps=11",), errors)["step_s"]
    assert change["low"] < change["mean"] < change["high"]
    assert change["high"] < 1.5


def test_a_comparison_with_itself_is_undecided_by_the_seeds() -> None:
    for errors in (EXACT, errors_of(0.3)):
        assert ratios((), (), errors)["undecided_by"] == "seeds"


def test_what_no_measured_pair_has_makes_the_errors_independent() -> None:
    alike = ratios((), ("workload.steps=11",), errors_of(0.2))
    other = ratios((), ("cluster.gpu=H200",), errors_of(0.2))
    assert alike["model_error"]["of"] == "change"
    assert other["model_error"]["of"] == "both"
    assert other["model_error"]["spread"] == pytest.approx(math.sqrt(2) * 0.2)
    assert "No measured pair of runs differs like A and B" in other["model_error"]["says"][0]


def test_headline_numbers_have_both_intervals() -> None:
    config, results = small()
    found = report(results, config, errors_of(0.5))
    exact = report(results, config, EXACT)
    for path in (
        ("step_s",),
        ("tokens_per_s",),
        ("tokens_per_s_per_gpu",),
        ("cost", "gpu_hours_per_step"),
        ("cost", "dollars_per_step", "typical"),
        ("cost", "dollars_per_million_tokens", "high"),
    ):
        one, sure = found, exact
        for name in path:
            one, sure = one[name], sure[name]
        assert one["low"] < one["seeds_low"] < one["mean"] < one["seeds_high"] < one["high"], path
        assert {name: one[name] for name in ("mean", "seeds_low", "seeds_high")} == {
            name: sure[name] for name in ("mean", "seeds_low", "seeds_high")
        }
        assert one["low"] < sure["low"] < sure["mean"] < sure["high"] < one["high"]
        assert sure["high"] / sure["mean"] == pytest.approx(sure["mean"] / sure["low"])
    step, cost = found["step_s"], found["cost"]["gpu_hours_per_step"]
    assert cost["high"] / cost["mean"] == pytest.approx(step["high"] / step["mean"])


def test_free_gpus_cost_nothing_with_any_error() -> None:
    config, results = small("cluster.price_per_gpu_h=0")
    typical = report(results, config, errors_of(0.5))["cost"]["dollars_per_step"]["typical"]
    assert set(typical.values()) == {0.0}


def test_the_report_shows_the_interval_and_how_far_predictions_were_off() -> None:
    config, results = small()
    text = StringIO()
    show_report(Console(file=text, width=100), report(results, config, errors_of(0.5)))
    lines = text.getvalue().splitlines()
    step = next(line for line in lines if line.startswith("step time"))
    found = report(results, config, errors_of(0.5))["step_s"]
    assert span(found, "s") in step
    flat = " ".join(" ".join(lines).split())
    assert (
        "The 90 % interval has the model's error on 12 measured runs (6 systems and models)" in flat
    )
    assert "wrong by a factor of 1.65 in the median, 1.65 at most, 6 of 12 too long" in flat
    assert "Such intervals contained 12 of these 12." in flat
    assert "Never compared with a measured run" not in flat
    assert max(map(len, lines)) <= 100


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "half", "shown"),
    [
        (213.14159, 1.234, "213.1 ± 1.2 s"),
        (213.14159, 12.34, "213 ± 12 s"),
        (213.14159, 0.0, "213.1 s"),
        (213.14159, 1e-12, "213.1 s"),
        (356612.3, 1234.5, "356,612 ± 1,234 s"),
        (0.5, 0.0, "0.5 s"),
        (0.0, 0.0, "0 s"),
        (0.0012345, 0.00012, "0.00123 ± 0.00012 s"),
        (1234567.0, 0.0, "1,235,000 s"),
    ],
)
def test_numbers_have_only_significant_digits(mean: float, half: float, shown: str) -> None:
    assert quantity({"mean": mean, "low": mean - half, "high": mean + half}, "s") == shown


def test_one_seed_shows_the_mean_alone() -> None:
    assert quantity({"mean": 2.5, "low": None, "high": None}, "s") == "2.5 s"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(40.1, "40.1 s"), (179, "179 s"), (600, "10 min"), (53280, "14.8 h"), (864000, "10 days")],
)
def test_durations_have_a_readable_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0843, "84.3 ms"),
        (0.0371, "37.1 ms"),
        (2.44e-6, "2.44 us"),
        (3.1e-9, "3.1 ns"),
        (0.9996, "1,000 ms"),
        (1.5, "1.5 s"),
        (0.0, "0 s"),
        (4e-12, "0.004 ns"),
    ],
)
def test_short_times_have_a_readable_unit(seconds: float, shown: str) -> None:
    assert short_time(seconds) == shown


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (1.42, 7.93, "1.4 to 7.9 s"),
        (0.751, 4.68, "0.75 to 4.7 s"),
        (4905.0, 15811.0, "4,900 to 15,800 s"),
        (0.005, 0.0261, "0.0050 to 0.026 s"),
        (100.0, 105.0, "100.0 to 105.0 s"),
        (0.0, 3.0, "0.0 to 3.0 s"),
        (2.0, 2.0, ""),
        (None, None, ""),
        (1.0, math.inf, ""),
    ],
)
def test_an_interval_has_the_digits_of_its_width(
    low: float | None, high: float | None, shown: str
) -> None:
    assert span({"low": low, "high": high}, "s") == shown


def test_an_interval_of_a_duration_has_the_unit_of_its_high_end() -> None:
    assert duration_span(60, 170) == "60 to 170 s"
    assert duration_span(60, 600) == "1.0 to 10.0 min"


def test_infinity_is_shown_as_inf() -> None:
    assert number(math.inf) == "inf"
