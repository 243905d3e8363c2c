"""How alike answers to one prompt are: the estimate, and the value that is in use."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reproductions.calibration import GROUP_CORRELATION
from reproductions.within_prompt import (
    Prompt,
    correlation_among,
    correlation_in_all,
    measured,
    variances,
    with_interval,
)


def drawn(prompts: int, answers: int, correlation: float, sigma: float) -> list[Prompt]:
    generator = np.random.default_rng(3)
    common = generator.standard_normal((prompts, 1)) * math.sqrt(correlation)
    own = generator.standard_normal((prompts, answers)) * math.sqrt(1 - correlation)
    ln_tokens = 9 + sigma * (common + own)
    return [Prompt(answers, float(line.mean()), float(line.std(ddof=1))) for line in ln_tokens]


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8])
def test_a_known_correlation_is_found(correlation: float) -> None:
    prompts = drawn(4000, 8, correlation, 0.5)
    assert correlation_among(prompts) == pytest.approx(correlation, abs=0.02)
    assert correlation_in_all(prompts, 0.5) == pytest.approx(correlation, abs=0.02)
    between, within = variances(prompts)
    assert between + within == pytest.approx(0.25, rel=0.04)


def test_a_wider_set_of_prompts_makes_answers_to_one_more_alike() -> None:
    prompts = drawn(500, 8, 0.5, 0.4)
    assert correlation_in_all(prompts, 0.8) > correlation_in_all(prompts, 0.4)


def test_groups_of_different_size_count_by_their_size() -> None:
    alike = Prompt(3, 8.0, 0.1)
    many = [Prompt(9, 9.0, 0.3), alike]
    within = (8 * 0.3**2 + 2 * 0.1**2) / 10
    assert variances(many)[1] == pytest.approx(within)


def test_the_value_in_use_is_the_measured_one() -> None:
    prompts = measured()
    assert len(prompts) == 37
    assert sum(prompt.answers for prompt in prompts) == 288
    found = with_interval(prompts)
    assert GROUP_CORRELATION.value == round(found.mean, 3)
    assert found.low < found.mean < found.high
    assert f"{math.sqrt(variances(prompts)[1]):.3f}" in GROUP_CORRELATION.source
    assert f"{found.low:.2f} to {found.high:.2f}" in GROUP_CORRELATION.source
