"""Prefill: against measured kernels, by hand, and its properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.gpu import GPUS, find_gpu
from simulator.catalogue.models import MODELS, find_model
from simulator.costs.coefficients import kernel_coefficients
from simulator.costs.prefill import PrefillCost, activation_bytes, causal_pairs, prefill_cost
from tools.kernels.fit import mean_error, predict_prefills
from tools.kernels.points import PrefillPoint, read_points

MEASURED = ["H100", "H200", "A100-80"]


def cost(
    model: str = "Qwen2.5-7B", gpu: str = "H100", split: int = 1, **more: float
) -> PrefillCost:
    return prefill_cost(find_model(model), find_gpu(gpu), split, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MEASURED)
def test_prefills_match_the_kernel_tables_within_the_stated_error(name: str) -> None:
    points = [p for p in read_points(PrefillPoint) if p.gpu == name and not p.held_out]
    known = kernel_coefficients(find_gpu(name))
    error = mean_error(predict_prefills(points, known), [point.seconds for point in points])
    assert len(points) > 70
    assert error == pytest.approx(known.prefill_error, rel=0.01)
    assert error < 0.04


@pytest.mark.parametrize("name", MEASURED)
def test_models_that_the_fit_has_not_seen_are_predicted_almost_as_well(name: str) -> None:
    points = [p for p in read_points(PrefillPoint) if p.gpu == name and p.held_out]
    known = kernel_coefficients(find_gpu(name))
    assert mean_error(predict_prefills(points, known), [point.seconds for point in points]) < 0.06


def test_pairs_of_a_sequence_equal_the_count_of_a_loop() -> None:
    for new, cached in ((0, 5), (1, 0), (1, 7), (10, 0), (10, 100)):
        assert causal_pairs(new, cached) == sum(cached + token + 1 for token in range(new))


def test_a_short_prompt_takes_as_long_as_reading_the_weights() -> None:
    decode_s = 1.19 * 14.14e9 / 3.35e12  # e_w, weights of the 7B, bandwidth of the H100
    assert cost().seconds(16, 136) == pytest.approx(decode_s, rel=0.25)
    assert cost().seconds(64, 2080) < 1.05 * cost().seconds(1, 1)


def test_a_long_prompt_reaches_the_efficiency_of_large_products() -> None:
    """2 P n FLOPs at 75 % of 989 TFLOP/s; activations and attention take a fifth of the time."""
    tokens = 8192
    flops = 2 * 6.53e9 * tokens  # without the head, which only the last token passes
    ideal_s = flops / 989e12
    assert 0.55 < ideal_s / cost().seconds(tokens, causal_pairs(tokens)) < 0.65


def test_pairs_cost_their_flops_at_the_efficiency_of_attention() -> None:
    prefill, gpu = cost(), find_gpu("H100")
    pairs = causal_pairs(1000, 20_000)
    extra_s = prefill.seconds(1000, pairs) - prefill.seconds(1000, 0)
    flops = 4 * 28 * 28 * 128 * pairs
    assert extra_s == pytest.approx(
        flops / gpu.flops_per_s / prefill.coefficients.attention_efficiency
    )


def test_long_prefills_are_divided_into_chunks() -> None:
    prefill = cost(chunk_tokens=1000)
    assert prefill.seconds(2500, 0) == pytest.approx(
        2 * prefill.pass_s(1000) + prefill.pass_s(500), rel=1e-12
    )
    # Each chunk reads the weights.
    assert prefill.seconds(8000, 0) > cost(chunk_tokens=8000).seconds(8000, 0)


@given(st.sampled_from(sorted(GPUS)), st.sampled_from(sorted(MODELS)), st.integers(0, 40_000))
def test_more_tokens_never_take_less_time(gpu: str, model: str, tokens: int) -> None:
    prefill = cost(model, gpu)
    assert prefill.seconds(tokens + 1, 0) > prefill.seconds(tokens, 0) or tokens % 8192 == 0
    assert prefill.seconds(tokens + 1, 100) > prefill.seconds(tokens + 1, 0)


def test_a_prefill_without_tokens_takes_no_time() -> None:
    assert cost().seconds(0, 0) == 0


def test_a_straggler_takes_longer_by_its_factor() -> None:
    assert cost(slowdown=1.5).seconds(3000, 10**6) == pytest.approx(
        1.5 * cost().seconds(3000, 10**6), rel=1e-12
    )


def test_only_the_experts_that_a_token_uses_take_time() -> None:
    """3 of 30 B parameters: a prefill of the mixture is closer to a model of 3 B."""
    mixture = cost("Qwen3-30B-A3B").seconds(8192, 0)
    assert mixture < 0.3 * cost("Qwen3-32B").seconds(8192, 0)
    assert activation_bytes(find_model("Qwen3-30B-A3B"), 1) == 2 * 48 * (8 * 2048 + 3 * 8 * 768)
    assert cost("Qwen3-30B-A3B").error == 0.3


def test_tensor_parallelism_pays_for_its_messages() -> None:
    alone, split = cost("Qwen2.5-32B", "H100", 1), cost("Qwen2.5-32B", "H100", 8)
    assert alone.seconds(8192, 0) / 8 < split.seconds(8192, 0) < alone.seconds(8192, 0) / 4
    assert cost("Qwen2.5-32B", "H800", 8).seconds(8192, 0) > 1.3 * split.seconds(8192, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slowdown": 0.0}, "slowdown is 0.0, but must be a number > 0"),
        ({"slowdown": math.nan}, "slowdown is nan, but must be a number > 0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0, but must be >= 1"),
        ({"split": 3}, "tensor_parallel is 3, but must divide the 28 heads"),
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(**wrong)  # type: ignore[arg-type]
