"""Per-sample gradients: spread by lag."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from areal_lab.functional import decoupled_ppo
from areal_lab.functional.staleness.gradient_spread import (
    gradient_alignment_by_lag,
    gradient_spread_by_lag,
)


def draw(samples=12, parameters=5):
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(samples, parameters, generator=generator, dtype=torch.double)
    return gradients, torch.arange(samples) % 4


def test_spread_equals_the_covariance_of_each_lag():
    gradients, lag = draw()
    spread = gradient_spread_by_lag(gradients, lag, bins=4)
    for k in range(4):
        chosen = gradients[lag == k]
        assert spread.samples[k] == len(chosen) > 1
        torch.testing.assert_close(spread.norm[k], chosen.mean(0).norm())
        torch.testing.assert_close(spread.variance[k], torch.cov(chosen.T).trace())


def test_the_last_bin_holds_all_that_is_older_and_empty_bins_are_zero():
    gradients, lag = draw()
    two = gradient_spread_by_lag(gradients, lag, bins=2)
    chosen = gradients[lag >= 1]
    torch.testing.assert_close(two.variance[1], torch.cov(chosen.T).trace())
    many = gradient_spread_by_lag(gradients, lag, bins=6)
    assert many.samples[5] == many.norm[5] == many.variance[5] == 0


def test_a_constant_added_to_all_gradients_moves_the_mean_only():
    gradients, lag = draw()
    before = gradient_spread_by_lag(gradients, lag, bins=4)
    after = gradient_spread_by_lag(gradients + 1e6, lag, bins=4)
    torch.testing.assert_close(after.variance, before.variance, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        after.norm, torch.full((4,), 5**0.5 * 1e6).double(), rtol=1e-5, atol=0
    )


def test_the_mean_of_per_sample_gradients_is_the_gradient_of_the_mean():
    torch.manual_seed(0)
    batch = (*(0.3 * torch.randn(4, 6, 7, dtype=torch.double)), torch.rand(6, 7) > 0.2)
    each = vmap(grad(lambda *row: decoupled_ppo(*row).loss))(*batch)
    spread = gradient_spread_by_lag(each, torch.zeros(6, dtype=torch.long), bins=1)
    whole = grad(lambda lp: vmap(lambda *row: decoupled_ppo(*row).loss)(lp, *batch[1:]).mean())
    # d(mean of losses)/d(logprobs) has one row per sample; per-sample gradients live on their own.
    torch.testing.assert_close(whole(batch[0]) * 6, each)
    assert spread.samples.tolist() == [6]


def test_alignment_is_the_cosine_with_the_mean_of_each_lag():
    gradients, lag = draw()
    reference = torch.arange(5, dtype=torch.double) - 1
    found = gradient_alignment_by_lag(gradients, lag, reference, bins=5)
    for k in range(4):
        mean = gradients[lag == k].mean(0)
        torch.testing.assert_close(found[k], mean @ reference / mean.norm() / reference.norm())
    assert found[4] == 0  # no samples
    third = gradients[lag == 3].mean(0)
    assert gradient_alignment_by_lag(gradients, lag, -2 * third, bins=5)[3] == pytest.approx(-1)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("reference", [torch.zeros(4), torch.zeros(1, 5)])
def test_a_reference_of_another_size_is_refused(reference):
    with pytest.raises(ValueError, match="reference has shape"):
        gradient_alignment_by_lag(*draw(), reference, bins=2)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("gradients", "lag", "bins", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.long), 2, r"gradients has shape \(3,\)"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.long), 2, r"lag \(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3), 2, "lag has dtype torch.float32"),
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), 0, "bins is 0"),
    ],
)
def test_bad_input_is_refused(gradients, lag, bins, message):
    with pytest.raises(ValueError, match=message):
        gradient_spread_by_lag(gradients, lag, bins=bins)
