"""Entropy bonus, its coefficient over a run, and the tokens of highest entropy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.aggregate import sequence_mean, token_mean
from areal_lab.functional.divergences.entropy import (
    adaptive_entropy_coefficient,
    entropy_bonus,
    linear_entropy_coefficient,
    top_entropy_mask,
)
from areal_lab.functional.masked import masked_quantiles
from tests.reference import aggregate as slow_aggregate
from tests.reference import proximal as reference

MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])


def entropies(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, 4, generator=generator, dtype=torch.double)


@pytest.mark.parametrize(
    ("aggregate", "slow"),
    [(token_mean, slow_aggregate.token_mean), (sequence_mean, slow_aggregate.sequence_mean)],
)
def test_the_bonus_is_minus_the_aggregated_entropy(aggregate, slow):
    entropy = entropies()
    term = entropy_bonus(entropy, MASK, coefficient=0.01, aggregate=aggregate)
    assert term.item() == pytest.approx(-0.01 * slow(entropy.tolist(), MASK.tolist()))


def test_the_bonus_has_a_gradient_in_entropy_only():
    entropy = entropies().requires_grad_()
    coefficient = torch.tensor(0.5, dtype=torch.double, requires_grad=True)
    entropy_bonus(entropy, MASK, coefficient=coefficient).backward()
    assert coefficient.grad is None
    torch.testing.assert_close(entropy.grad, torch.where(MASK, -0.5 / 4, 0.0).double())


def test_masked_entropies_do_not_matter():
    spoiled = torch.where(MASK, entropies(), torch.nan).requires_grad_()
    term = entropy_bonus(spoiled, MASK, coefficient=1.0)
    torch.testing.assert_close(term, entropy_bonus(entropies(), MASK, coefficient=1.0))
    assert torch.autograd.grad(term, spoiled)[0].isfinite().all()
    kept = top_entropy_mask(spoiled, MASK)
    assert torch.equal(kept, top_entropy_mask(entropies(), MASK))
    assert entropy_bonus(spoiled, torch.zeros_like(MASK), coefficient=1.0) == 0


def test_a_split_bonus_under_one_count_sums_to_the_whole():
    entropy = entropies()
    counted = partial(token_mean, token_count=4)
    parts = [
        entropy_bonus(entropy[i], MASK[i], coefficient=0.1, aggregate=counted) for i in range(3)
    ]
    torch.testing.assert_close(sum(parts), entropy_bonus(entropy, MASK, coefficient=0.1))


@pytest.mark.parametrize(
    ("coefficient", "entropy", "expected"),
    [
        (0.01, 0.1, 0.015),  # too little: more bonus
        (0.01, 0.2, 0.015),  # at the target too
        (0.01, 0.3, 0.005),
        (0.002, 0.3, 0.0),  # never below the minimum
        (0.998, 0.1, 1.0),  # nor above the maximum
        (0.01, float("nan"), 0.005),
    ],
)
def test_the_adaptive_coefficient_by_hand(coefficient, entropy, expected):
    result = adaptive_entropy_coefficient(torch.tensor(coefficient), torch.tensor(entropy))
    assert result.item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.double, torch.bfloat16])
def test_the_adaptive_coefficient_keeps_its_type(dtype):
    result = adaptive_entropy_coefficient(torch.tensor(0.25, dtype=dtype), torch.tensor(0.1))
    assert result.dtype == dtype
    assert result == torch.tensor(0.255, dtype=dtype)


def test_the_adaptive_coefficient_holds_a_target():
    """A toy policy whose entropy follows the coefficient, with a lag."""
    coefficient, entropy = torch.tensor(0.0), torch.tensor(0.0)
    history = []
    for _ in range(400):
        entropy = 0.9 * entropy + 0.1 * (8.0 * coefficient)
        coefficient = adaptive_entropy_coefficient(coefficient, entropy, target=0.5, step=0.001)
        history.append(entropy.item())
    assert sum(history[200:]) / 200 == pytest.approx(0.5, abs=0.05)


def test_an_adaptive_coefficient_carries_no_gradient():
    coefficient = torch.tensor(0.1, requires_grad=True)
    entropy = torch.tensor(0.1, requires_grad=True)
    result = adaptive_entropy_coefficient(coefficient, entropy, step=0.0)
    assert not result.requires_grad
    assert result == coefficient


def test_the_linear_coefficient_by_hand():
    schedule = partial(linear_entropy_coefficient, start=0.1, end=0.02, steps=4)
    assert [schedule(step) for step in (0, 1, 2, 4, 9)] == pytest.approx(
        [0.1, 0.08, 0.06, 0.02, 0.02]
    )


@settings(max_examples=30)
@given(
    values=st.lists(st.floats(0, 12), min_size=1, max_size=20),
    fraction=st.floats(0.01, 1.0),
)
def test_the_tokens_of_highest_entropy_equal_the_reference(values, fraction):
    entropy = torch.tensor(values, dtype=torch.double)
    kept = top_entropy_mask(entropy, torch.ones(len(values), dtype=torch.bool), fraction=fraction)
    ordered = sorted(values)
    expected = reference.top_entropy(values, fraction)
    position = (1 - fraction) * (len(values) - 1)
    between = ordered[int(position)], ordered[min(int(position) + 1, len(values) - 1)]
    for ours, slow, value in zip(kept.tolist(), expected, values, strict=True):
        # Rounding may decide otherwise where an entropy is the quantile up to the last digit.
        assert ours == slow or value == pytest.approx(between[0]) or value == between[1]


def test_the_tokens_of_highest_entropy_by_hand():
    entropy = torch.tensor([[0.1, 3.0, 0.2, 9.0], [0.3, 2.0, 0.5, 0.4]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, True]])
    kept = top_entropy_mask(entropy, mask, fraction=0.2)
    assert entropy[kept].tolist() == [3.0, 2.0]  # 2.0 is the 80 % quantile of six numbers itself
    assert torch.equal(top_entropy_mask(entropy, mask, fraction=1.0), mask)
    nothing = torch.zeros_like(mask)
    assert not top_entropy_mask(entropy, nothing).any()


def test_equal_entropies_are_all_kept():
    mask = torch.ones(5, dtype=torch.bool)
    assert top_entropy_mask(torch.ones(5), mask).all()


def test_the_threshold_of_the_whole_batch_gives_the_mask_in_parts():
    entropy = entropies()
    threshold = masked_quantiles(entropy, MASK, torch.tensor([0.5], dtype=torch.double))[0]
    parts = [top_entropy_mask(entropy[i], MASK[i], threshold=threshold) for i in range(3)]
    assert torch.equal(torch.stack(parts), top_entropy_mask(entropy, MASK, fraction=0.5))


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_entropy_settings_are_refused():
    entropy = entropies()
    with pytest.raises(ValueError, match=r"entropy has shape \(3, 3\)"):
        entropy_bonus(entropy[:, :3], MASK, coefficient=1.0)
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"fraction is {fraction}"):
            top_entropy_mask(entropy, MASK, fraction=fraction)
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"step is -1\.0"):
        adaptive_entropy_coefficient(one, one, step=-1.0)
    with pytest.raises(ValueError, match=r"minimum is 1\.0 and maximum 0\.5"):
        adaptive_entropy_coefficient(one, one, minimum=1.0, maximum=0.5)
    with pytest.raises(ValueError, match="step is -1 and steps 4"):
        linear_entropy_coefficient(-1, start=1.0, steps=4)
    with pytest.raises(ValueError, match="step is 1 and steps 0"):
        linear_entropy_coefficient(1, start=1.0, steps=0)


def test_the_adaptive_coefficient_starts_from_numbers():
    ours = adaptive_entropy_coefficient(0.01, 0.1, target=0.2, step=0.005)
    assert ours.item() == pytest.approx(0.015)
    again = adaptive_entropy_coefficient(ours, torch.tensor(0.3), target=0.2, step=0.005)
    assert again.item() == pytest.approx(0.01)
    assert adaptive_entropy_coefficient(0.0, torch.tensor(0.1).double(), step=0.5).item() == 0.5
