"""Engines in fp8: the fit of their kernels, a published server, bytes by hand, and refusals."""

from __future__ import annotations

import dataclasses

import pytest

from simulator.assembly.build import problems
from simulator.assembly.engines import engines_of
from simulator.assembly.simulate import build, simulate
from simulator.catalogue.gpu import GPUS, find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.costs.coefficients import fitted_coefficients
from simulator.costs.decode import decode_cost
from simulator.costs.engine_memory import cache_tokens
from simulator.costs.fp8_kernels import COEFFICIENTS, fitted_fp8, fp8_kernels, precise_coefficients
from simulator.costs.prefill import prefill_cost
from simulator.costs.switch import REFIT, SLEEP, refit_s, switch_cost
from simulator.costs.weight_bytes import BF16, FP8_WEIGHT_BYTES, EngineNumbers, sent_weights
from simulator.costs.weight_sync import sync_speed, weight_sync, weight_update
from simulator.report.to_json import warnings
from tools.kernels.fp8 import FP8, MEASURED, fit_fp8, held_out_fp8_errors

WEIGHTS = EngineNumbers(weights="fp8")
CACHE = EngineNumbers(cache="fp8")
QWEN3_8B = find_model("Qwen3-8B")
H100 = find_gpu("H100")


def test_the_shipped_fp8_coefficients_are_a_fit_to_the_shipped_points() -> None:
    found, shipped = fit_fp8("H100"), fitted_fp8()["H100"]
    for one in COEFFICIENTS:
        assert getattr(found, one) == pytest.approx(getattr(shipped, one), rel=2e-3), one


@pytest.mark.parametrize("name", MEASURED)
def test_fp8_kernels_reach_less_of_a_higher_peak_on_models_outside_the_fit_too(name: str) -> None:
    kernels, known = fitted_fp8()[name], fitted_coefficients()[name]
    assert 0.5 < kernels.matrix_efficiency / known.matrix_efficiency < 0.9
    assert kernels.cache_reading > known.cache_reading  # numbers are converted
    assert kernels.layer_s > known.layer_s  # inputs are quantized
    assert kernels.decode_error < 0.02
    decode, prefill = held_out_fp8_errors(name, kernels)
    assert decode < 0.025
    assert prefill < 0.06


@pytest.mark.parametrize(("users", "published_ms"), [(1, 4.796), (4, 5.319), (16, 7.217)])
def test_a_published_server_in_fp8_decodes_as_fast(users: int, published_ms: float) -> None:
    """Qwen3-8B on one H100, vLLM 0.30, weights in fp8, 2,048 tokens in and out: median time between
    tokens (tgarg01/silybench-data, derived/csv/perf_points.csv, run of 2026-09-24). The fit knows
    only kernels, and vLLM fuses some that quantize."""
    cost = decode_cost(QWEN3_8B, H100, overhead_s=1.33e-3, numbers=WEIGHTS)
    middle = users * (2048 + 1024)
    assert 1e3 * cost.step_s(users, middle) == pytest.approx(published_ms, rel=0.1)
    assert 1e3 * decode_cost(QWEN3_8B, H100).step_s(users, middle) > 1.15 * published_ms


def tokens_per_s(users: int, prompt: int, answer: int, numbers: EngineNumbers) -> float:
    """Of a server that always has this many users, prefills in between included."""
    step_s = decode_cost(
        QWEN3_8B, H100, overhead_s=1.33e-3, overhead_sequence_s=4e-6, numbers=numbers
    ).step_s(users, users * (prompt + answer / 2))
    chunk = prefill_cost(QWEN3_8B, H100, numbers=numbers).seconds(8192, 8192 * prompt / 2)
    return users * answer / (answer * step_s + users * prompt * chunk / 8192)


@pytest.mark.parametrize(
    ("prompt", "answer", "bf16", "fp8"),
    [
        (128, 1024, (396, 13_322.0), (472, 15_103.5)),
        (2048, 2048, (40, 2_814.7), (52, 3_653.1)),
        (128, 128, (512, 14_539.5), (512, 16_542.0)),
    ],
)
def test_a_published_server_gains_as_much_from_fp8(
    prompt: int, answer: int, bf16: tuple[int, float], fp8: tuple[int, float]
) -> None:
    """Tokens per second with the most users that the same two runs serve (capacity.csv). The
    server's own overheads are not in the prediction, which is up to a quarter too fast; the gain
    is within 5 %."""
    predicted = [
        tokens_per_s(users, prompt, answer, numbers)
        for (users, _), numbers in ((bf16, BF16), (fp8, WEIGHTS))
    ]
    for one, (_, published) in zip(predicted, (bf16, fp8), strict=True):
        assert 0.95 < one / published < 1.26
    assert predicted[1] / predicted[0] == pytest.approx(fp8[1] / bf16[1], rel=0.05)


def test_a_published_server_in_fp8_holds_as_many_tokens() -> None:
    """The same runs in bf16 and fp8: 327 and 373 users of 1,152 tokens fill the cache
    (derived/csv/capacity.csv). The memory for both follows from that in bf16."""
    users = 1152
    held = 327.5 * users * QWEN3_8B.cache_bytes_per_token() + QWEN3_8B.weight_bytes()
    share = held / H100.memory_bytes
    bf16, fp8 = (
        cache_tokens(QWEN3_8B, H100, utilization=share, numbers=one) / users
        for one in (BF16, WEIGHTS)
    )
    assert bf16 == pytest.approx(327.5, abs=0.1)
    assert fp8 == pytest.approx(373, rel=0.02)
    both = cache_tokens(QWEN3_8B, H100, utilization=share, numbers=FP8) / users
    assert both == pytest.approx(2 * fp8, rel=1e-5)


def test_bytes_by_hand() -> None:
    table = 151936 * 4096
    layers = QWEN3_8B.parameters - 2 * table
    assert WEIGHTS.weight_bytes(QWEN3_8B) == pytest.approx(layers * (1 + 4 / 16384) + 4 * table)
    assert WEIGHTS.decode_weight_bytes(QWEN3_8B, sequences=1) == pytest.approx(
        layers * FP8_WEIGHT_BYTES + 2 * table
    )
    tied = find_model("Qwen3-4B")
    layers = tied.parameters - tied.embedding_parameters
    assert WEIGHTS.weight_bytes(tied) == pytest.approx(
        layers * FP8_WEIGHT_BYTES + 2 * tied.embedding_parameters
    )
    assert CACHE.cache_bytes_per_token(QWEN3_8B) == QWEN3_8B.cache_bytes_per_token() / 2
    assert CACHE.weight_bytes(QWEN3_8B) == QWEN3_8B.weight_bytes()
    mixture = find_model("Qwen3-30B-A3B")
    few, many = (WEIGHTS.decode_weight_bytes(mixture, sequences=one) for one in (1, 1000))
    assert few < 0.2 * many
    assert many < 0.52 * mixture.decode_weight_bytes()


def test_bf16_changes_nothing() -> None:
    plain, named = decode_cost(QWEN3_8B, H100), decode_cost(QWEN3_8B, H100, numbers=BF16)
    assert plain == named
    assert plain.step_s(7, 7000) == named.step_s(7, 7000)
    for sequences in (1, 17, 300):
        assert BF16.decode_weight_bytes(QWEN3_8B, sequences=sequences) == (
            QWEN3_8B.decode_weight_bytes(sequences=sequences)
        )


def test_parts_sum_to_the_step_and_the_cache_alone_may_be_in_fp8() -> None:
    for numbers in (WEIGHTS, CACHE, FP8):
        cost = decode_cost(QWEN3_8B, H100, 2, numbers=numbers)
        assert sum(cost.parts(40, 120_000).values()) == pytest.approx(cost.step_s(40, 120_000))
    bf16, cached = decode_cost(QWEN3_8B, H100), decode_cost(QWEN3_8B, H100, numbers=CACHE)
    assert cached.base_s(8) == bf16.base_s(8)
    assert 0.5 < cached.context_token_s / bf16.context_token_s < 0.75


def test_prefill_in_fp8_gains_less_than_twice_the_peak_suggests() -> None:
    bf16, fp8 = (
        prefill_cost(QWEN3_8B, H100, numbers=one).seconds(8192, 8192 * 4096)
        for one in (BF16, WEIGHTS)
    )
    assert 1.2 < bf16 / fp8 < 1.6


def test_every_gpu_with_fp8_units_has_coefficients() -> None:
    for gpu in GPUS.values():
        if not gpu.fp8_flops_per_s:
            continue
        kernels = fp8_kernels(gpu)
        measured = gpu.name in (*MEASURED, "H800", "H100-PCIe")
        assert (kernels.decode_error < 0.03) == measured
        assert gpu.fp8_flops_per_s == 2 * gpu.flops_per_s
        cost = decode_cost(QWEN3_8B, gpu, numbers=WEIGHTS)
        assert cost.error == pytest.approx(
            max(kernels.decode_error, decode_cost(QWEN3_8B, gpu).error)
        )
        assert "fp8" in cost.provenance
        # What is read dominates with few sequences, whatever the kernels cost in addition.
        assert cost.base_s(1) < 1.1 * decode_cost(QWEN3_8B, gpu).base_s(1)


def test_impossible_kernels_are_refused() -> None:
    for wrong in ({"matrix_efficiency": 1.5}, {"knee": 0.5}):
        with pytest.raises(ValueError, match="must be in"):
            dataclasses.replace(fitted_fp8()["H100"], **wrong)


def test_updates_send_half_if_quantized_before_sending() -> None:
    config = load_simulation("small").weights
    config.update_s = config.export_s = config.load_s = None
    config.backend = "nccl"
    plain = weight_sync(config, QWEN3_8B, H100).seconds
    half = weight_sync(config, QWEN3_8B, H100, WEIGHTS).seconds
    saved = QWEN3_8B.weight_bytes() - WEIGHTS.weight_bytes(QWEN3_8B)
    rate = sync_speed("nccl", mixture=False).bytes_per_s
    assert plain - half == pytest.approx(saved / rate)
    assert refit_s("packed", QWEN3_8B, WEIGHTS) < refit_s("packed", QWEN3_8B)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["gpu=A100-80", "rollout.weight_precision=fp8"], "A100-80 has no fp8 matrix units"),
        (["weights.quantize_before_sending=true"], "rollout.weight_precision is auto; set it"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes: list[str], message: str) -> None:
    (said,) = problems(load_simulation("small", changes))
    assert message in said.message
    assert "\n" not in said.message


def test_colocated_engines_in_fp8_sleep_and_refit_faster() -> None:
    changes = ["cluster.placement=colocated", "schedule.name=synchronous", "model=Qwen3-8B"]
    config = load_simulation("small", [*changes, "rollout.weight_precision=fp8"])
    bf16 = switch_cost(load_simulation("small", changes), QWEN3_8B, H100)
    fp8 = switch_cost(config, QWEN3_8B, H100)
    assert fp8.to_training[SLEEP] < bf16.to_training[SLEEP]
    assert fp8.to_generation[REFIT] == bf16.to_generation[REFIT]
    config.weights.quantize_before_sending = True
    assert switch_cost(config, QWEN3_8B, H100).to_generation[REFIT] < bf16.to_generation[REFIT]


def test_a_run_sends_what_is_quantized_or_adapted() -> None:
    changes = ["weights.update_s=null", "model=Qwen3-8B", "gpus=8", "cluster.rollout_gpus=4"]
    changes += ["rollout.weight_precision=fp8", "trainer.step_s=20"]

    def update(*more: str) -> float:
        return build(load_simulation("small", [*changes, *more])).weights.seconds

    assert update("weights.quantize_before_sending=true") < update()
    assert update("trainer.lora_rank=8") < 0.5 * update()


def test_a_run_in_fp8_generates_faster() -> None:
    config = ["rollout.decode_step_s=null", "model=Qwen3-8B", "weights.update_s=1", "seeds=1"]
    bf16 = simulate(load_simulation("small", config))
    fp8 = simulate(
        load_simulation(
            "small", [*config, "rollout.weight_precision=fp8", "rollout.kv_cache_precision=fp8"]
        )
    )
    assert fp8.step_s < bf16.step_s


GPT_OSS = find_model("gpt-oss-120b")
AUTO = EngineNumbers(weights="auto")


def configured(*changes: str) -> SimulationConfig:
    """gpt-oss-120b on H100s, with nothing measured."""
    model = ("model=gpt-oss-120b", "weights.update_s=null", "weights.backend=nccl")
    engine = ("rollout.decode_step_s=null", "gpus=72", "cluster.rollout_gpus=8")
    return load_simulation("small", [*model, *engine, *changes])


def test_engines_hold_the_checkpoint_unless_told_otherwise() -> None:
    assert AUTO.weight_bytes(GPT_OSS) == GPT_OSS.checkpoint_bytes()
    assert BF16.weight_bytes(GPT_OSS) == 2 * GPT_OSS.parameters
    dense = find_model("Qwen3-8B")
    assert AUTO.weight_bytes(dense) == BF16.weight_bytes(dense)
    for sequences in (1, 100):
        few = AUTO.decode_weight_bytes(GPT_OSS, sequences=sequences)
        assert few == GPT_OSS.decode_checkpoint_bytes(sequences=sequences)


def test_the_larger_one_fits_on_one_gpu_as_its_model_card_says() -> None:
    """ "Fit on a single 80 GB GPU" (arXiv:2508.10925, section 2.1)."""
    assert cache_tokens(GPT_OSS, H100, numbers=AUTO, utilization=0.9) > 50_000
    with pytest.raises(ValueError, match="does not fit on H100 with tensor_parallel=1"):
        cache_tokens(GPT_OSS, H100, utilization=0.9)
    assert not [one for one in problems(configured()) if "does not fit" in one.message]


def test_decode_steps_are_shorter_by_the_bytes() -> None:
    steps = []
    for precision in ("auto", "bf16"):
        config = configured(f"rollout.weight_precision={precision}", "rollout.tensor_parallel=8")
        steps.append(engines_of(config).decode().parts(200, 200_000))
    quantized, plain = steps
    read = GPT_OSS.decode_checkpoint_bytes(sequences=200) / GPT_OSS.decode_weight_bytes(
        sequences=200
    )
    assert quantized["reading weights"] == pytest.approx(read * plain["reading weights"])
    for same in ("layers", "reading cache", "all-reduce"):
        assert quantized[same] == plain[same]


def test_kernels_stay_those_of_bf16() -> None:
    assert precise_coefficients(H100, AUTO) == precise_coefficients(H100, BF16)


def test_updates_send_what_engines_hold() -> None:
    auto, plain = configured(), configured("rollout.weight_precision=bf16")
    assert sent_weights(auto).weight_bytes(GPT_OSS) == GPT_OSS.checkpoint_bytes()
    assert sent_weights(plain).weight_bytes(GPT_OSS) == GPT_OSS.weight_bytes()
    quotient = (
        weight_update(auto, GPT_OSS, H100).seconds / weight_update(plain, GPT_OSS, H100).seconds
    )
    assert quotient == pytest.approx(GPT_OSS.checkpoint_bytes() / GPT_OSS.weight_bytes())
    assert sent_weights(configured("rollout.weight_precision=fp8")) == BF16


def test_the_trainer_holds_bf16_whatever_engines_do() -> None:
    """So a layout that is too small for bf16 is refused."""
    told = []
    for precision in ("auto", "bf16"):
        few = ("gpus=16", "trainer.step_s=null", "rollout.tensor_parallel=8")
        config = configured(f"rollout.weight_precision={precision}", *few)
        told.append([one.message for one in problems(config)])
    assert told[0] == told[1]
    assert any(line.startswith("trainer: training gpt-oss-120b takes") for line in told[0]), told


def test_a_report_says_that_the_kernels_were_not_measured() -> None:
    said = [line for line in warnings(configured()) if "MXFP4" in line]
    assert len(said) == 1
    assert not [
        line for line in warnings(configured("rollout.weight_precision=bf16")) if "MXFP4" in line
    ]
