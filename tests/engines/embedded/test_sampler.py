"""Draws follow the distribution asked for and depend on seed and position only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.engines.embedded.sampler import sample_tokens, uniform
from areal_lab.engines.protocol import SamplingParams

LOGITS = torch.tensor([2.0, -1.0, 0.5, float("-inf"), 1.5, 0.0])


def params(seed: int = 0, **values: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, seed=seed, **values)  # type: ignore[arg-type]


def frequencies(count: int, **values: float) -> torch.Tensor:
    rows = LOGITS.expand(count, -1)
    tokens = sample_tokens(
        rows, [params(seed, **values) for seed in range(count)], [7] * count
    ).tokens
    return torch.bincount(tokens, minlength=len(LOGITS)) / count


@given(st.integers(0, 2**63), st.integers(0, 2**20))
def test_uniforms_are_below_one_and_repeat(seed: int, position: int) -> None:
    value = uniform(seed, position)
    assert 0 <= value < 1
    assert value == uniform(seed, position)


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    """Kolmogorov-Smirnov distance below the 0.1 % level, and no correlation of neighbors."""
    count = 20_000
    for values in (
        np.array([uniform(seed, 40) for seed in range(count)]),
        np.array([uniform(40, position) for position in range(count)]),
    ):
        distance = np.abs(np.sort(values) - np.arange(count) / count).max()
        assert distance < 1.95 / np.sqrt(count)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(count)


@pytest.mark.parametrize(
    ("options", "kept", "temperature"),
    [
        ({}, [0, 1, 2, 4, 5], 1.0),
        ({"temperature": 0.5}, [0, 1, 2, 4, 5], 0.5),
        ({"top_k": 2}, [0, 4], 1.0),
        ({"top_p": 0.75}, [0, 4], 1.0),
        ({"top_p": 0.8}, [0, 2, 4], 1.0),
        ({"top_k": 3, "top_p": 0.5}, [0], 1.0),
        ({"temperature": 2.0, "top_k": 4}, [0, 2, 4, 5], 2.0),
        ({"top_k": 50}, [0, 1, 2, 4, 5], 1.0),
    ],
)
def test_samples_follow_the_distribution(
    options: dict[str, float], kept: list[int], temperature: float
) -> None:
    count = 20_000
    expected = torch.zeros(len(LOGITS))
    expected[kept] = torch.softmax(LOGITS[kept] / temperature, -1)
    error = (frequencies(count, **options) - expected).abs().max()
    assert error < 4 * 0.5 / count**0.5


def test_logprobs_are_of_the_whole_vocabulary() -> None:
    options = {"temperature": 0.7, "top_k": 2, "top_p": 0.9}
    sampled = sample_tokens(LOGITS[None], [params(**options)], [3])
    expected = torch.log_softmax(LOGITS / 0.7, -1)[sampled.tokens]
    torch.testing.assert_close(sampled.logprobs, expected)


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    sampled = sample_tokens(LOGITS[None], [params(temperature=0.0)], [3])
    assert sampled.tokens.tolist() == [0]
    torch.testing.assert_close(sampled.logprobs, torch.log_softmax(LOGITS, -1)[:1])


@given(st.permutations(range(8)), st.integers(1, 8))
def test_a_row_samples_the_same_tokens_in_any_batch(order: list[int], size: int) -> None:
    kinds: list[dict[str, float]] = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.8}]
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    sampling = [params(seed, **kinds[seed % 4]) for seed in range(8)]
    positions = list(range(10, 18))
    alone = [
        int(sample_tokens(logits[i : i + 1], [sampling[i]], [positions[i]]).tokens)
        for i in range(8)
    ]
    some = order[:size]
    together = sample_tokens(
        logits[some], [sampling[i] for i in some], [positions[i] for i in some]
    )
    assert together.tokens.tolist() == [alone[i] for i in some]


def test_bfloat16_logits_are_computed_with_in_float32() -> None:
    sampled = sample_tokens(LOGITS.bfloat16()[None], [params()], [3])
    assert sampled.logprobs.dtype == torch.float32
