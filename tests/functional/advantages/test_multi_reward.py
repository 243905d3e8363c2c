"""Several rewards per sample: what is normalized first, and who then has a say."""

from __future__ import annotations

import pytest
import torch

from areal_lab.functional.advantages.group import group_advantages, no_scale
from areal_lab.functional.advantages.multi_reward import (
    component_advantages,
    gdpo_advantages,
    normalize_then_sum,
    sum_then_normalize,
)
from areal_lab.functional.advantages.named import dr_grpo_advantages, grpo_advantages
from areal_lab.functional.advantages.whitening import spread_to_tokens, whiten
from tests.reference import advantages as reference

REWARDS = torch.tensor(
    [[1.0, 0.2], [0.0, 0.9], [1.0, 0.4], [0.0, 0.1], [0.0, 0.5], [1.0, 0.5]], dtype=torch.double
)
GROUPS = torch.tensor([3, 3, 3, 3, 1, 1])
WEIGHTS = (1.0, 0.25)


@pytest.mark.parametrize("name", ["normalize_then_sum", "sum_then_normalize", "gdpo_advantages"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_equals_the_reference(name, weights):
    functions = {
        "normalize_then_sum": (normalize_then_sum, reference.normalize_then_sum),
        "sum_then_normalize": (sum_then_normalize, reference.sum_then_normalize),
        "gdpo_advantages": (gdpo_advantages, reference.gdpo),
    }
    ours, slow = functions[name]
    expected = slow(REWARDS.tolist(), GROUPS.tolist(), weights or (1.0, 1.0), 1e-6)
    torch.testing.assert_close(
        ours(REWARDS, GROUPS, weights=weights), torch.tensor(expected, dtype=torch.double)
    )


def test_each_component_is_normalized_by_itself():
    ours = component_advantages(REWARDS, GROUPS)
    for k in range(2):
        torch.testing.assert_close(ours[:, k], grpo_advantages(REWARDS[:, k], GROUPS))
    assert (ours[4:, 1] == 0).all()  # equal rewards there


def test_one_component_is_grpo():
    for function in (normalize_then_sum, sum_then_normalize):
        torch.testing.assert_close(
            function(REWARDS[:, :1], GROUPS), grpo_advantages(REWARDS[:, 0], GROUPS)
        )


def test_the_unit_of_a_component_matters_only_before_normalization():
    unit = torch.tensor([1.0, 100.0], dtype=torch.double)
    torch.testing.assert_close(
        normalize_then_sum(REWARDS * unit, GROUPS, eps=0.0),
        normalize_then_sum(REWARDS, GROUPS, eps=0.0),
    )
    summed = sum_then_normalize(REWARDS * unit, GROUPS, eps=0.0)
    assert not torch.allclose(summed, sum_then_normalize(REWARDS, GROUPS, eps=0.0))


def test_gdpo_tells_apart_what_a_sum_confuses():
    """Two binary rewards, two samples: (0, 1) and (0, 2) right have the same GRPO advantage."""
    group = torch.zeros(2).long()
    one = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    both = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(
        sum_then_normalize(one, group), sum_then_normalize(both, group), rtol=1e-5, atol=1e-5
    )
    ratio = normalize_then_sum(both, group) / normalize_then_sum(one, group)
    torch.testing.assert_close(ratio, torch.tensor([2.0, 2.0]))


def test_gdpo_has_mean_zero_and_deviation_one_over_the_batch():
    ours = gdpo_advantages(REWARDS, GROUPS, weights=WEIGHTS)
    assert ours.mean().abs() < 1e-12
    assert ours.std().item() == pytest.approx(1, abs=1e-5)


def test_gdpo_over_tokens_is_a_composition():
    mask = torch.arange(3) < torch.tensor([1, 2, 3, 1, 2, 3])[:, None]
    summed = normalize_then_sum(REWARDS, GROUPS, weights=WEIGHTS)
    ours = whiten(spread_to_tokens(summed, mask), mask)
    assert ours[mask].mean().abs() < 1e-12
    assert ours[mask].std().item() == pytest.approx(1, abs=1e-5)


def test_equal_rewards_in_all_components_give_zero():
    equal = torch.full((4, 2), 0.1)
    assert gdpo_advantages(equal, torch.zeros(4).long()).tolist() == [0.0] * 4


def test_without_scale_order_of_sum_and_centering_does_not_matter():
    summed = sum_then_normalize(REWARDS, GROUPS, weights=WEIGHTS, scale=no_scale)
    torch.testing.assert_close(
        normalize_then_sum(REWARDS, GROUPS, weights=WEIGHTS, scale=no_scale), summed
    )
    total = (REWARDS * torch.tensor(WEIGHTS).double()).sum(1)
    torch.testing.assert_close(summed, dr_grpo_advantages(total, GROUPS))
    torch.testing.assert_close(
        sum_then_normalize(REWARDS, GROUPS, weights=torch.tensor(WEIGHTS), unbiased=False),
        group_advantages(total, GROUPS, unbiased=False),
    )


def test_weights_get_no_gradient():
    weights = torch.tensor(WEIGHTS, requires_grad=True)
    rewards = REWARDS.clone().requires_grad_()
    gdpo_advantages(rewards, GROUPS, weights=weights).square().sum().backward()
    assert rewards.grad is not None
    assert weights.grad is None


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("function", [normalize_then_sum, sum_then_normalize, gdpo_advantages])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": REWARDS[:, 0]}, r"rewards has shape \(6,\), but must be \[samples, compon"),
        ({"rewards": REWARDS[:, :0]}, "at least one component"),
        ({"weights": (1.0,)}, "weights has 1 entries"),
        ({"rewards": REWARDS / 0}, "NaN or infinite"),
        ({"groups": GROUPS[:3]}, r"groups has shape \(3,\) and rewards \(6,\)"),
    ],
)
def test_bad_inputs_are_refused(function, change, message):
    with pytest.raises(ValueError, match=message):
        function(**{"rewards": REWARDS, "groups": GROUPS, **change})
