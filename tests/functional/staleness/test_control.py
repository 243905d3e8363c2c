"""Controls of an optimizer step by staleness: slow references, limits, what must not matter."""

from __future__ import annotations

import math
import random

import pytest
import torch

from areal_lab.functional.corrections.rejection import mask_binary_kl, reject, veto_suffix_mask
from areal_lab.functional.corrections.sequence import max_of_sequence
from areal_lab.functional.corrections.weights import behavior_weight
from areal_lab.functional.divergences.kl import k3
from areal_lab.functional.divergences.sampled import binary_kl
from areal_lab.functional.segments import Segments
from areal_lab.functional.staleness.control import (
    age_weights,
    aligned_part,
    learning_rate_scale,
    weight_deviation,
)


def test_a_weight_halves_with_each_half_life():
    lag = torch.tensor([0.0, 3.0, 6.0, 1.5])
    expected = torch.tensor([1.0, 0.5, 0.25, 2**-0.5])
    torch.testing.assert_close(age_weights(lag, half_life=3.0), expected)
    assert age_weights(torch.tensor([0, 2]), half_life=2.0).tolist() == [1.0, 0.5]
    assert age_weights(lag, half_life=math.inf).tolist() == [1.0] * 4
    # The sampler cannot be ahead of the trainer.
    assert age_weights(torch.tensor([-5.0]), half_life=1.0).item() == 1.0


def test_the_learning_rate_scale_equals_the_formula():
    rng = random.Random(1)
    logs = [rng.gauss(0, 1.5) for _ in range(20)]
    weights = [math.exp(one) for one in logs]
    share = sum(weights) ** 2 / sum(w * w for w in weights) / 20
    for on_policy in (1.0, 0.5, share / 2):
        found = learning_rate_scale(
            torch.tensor(logs), torch.ones(20).bool(), on_policy_share=on_policy
        )
        assert found.effective_share.item() == pytest.approx(share, rel=1e-5)
        assert found.factor.item() == pytest.approx(math.sqrt(min(1, share / on_policy)), rel=1e-5)


def test_equal_weights_keep_the_learning_rate_whatever_their_size():
    everyone = torch.ones(8).bool()
    for log_weight in (0.0, 500.0, -500.0):
        scale = learning_rate_scale(torch.full((8,), log_weight), everyone)
        assert (scale.factor.item(), scale.effective_share.item()) == (1.0, 1.0)
    none = learning_rate_scale(torch.zeros(8), ~everyone)
    assert none.factor.item() == 1.0


def test_one_heavy_response_of_many_leaves_its_share():
    logs = torch.zeros(100)
    logs[3] = 200.0
    scale = learning_rate_scale(logs, torch.ones(100).bool())
    assert scale.effective_share.item() == pytest.approx(0.01)
    assert scale.factor.item() == pytest.approx(0.1)
    # Responses that are not in the batch do not count.
    mask = torch.arange(100) != 3
    assert learning_rate_scale(logs, mask).factor.item() == 1.0


def part_of(gradient, previous, threshold):
    return aligned_part(gradient @ previous, gradient.norm(), previous.norm(), threshold=threshold)


def test_what_is_left_of_an_aligned_gradient_is_orthogonal_to_the_last_one():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        previous = torch.randn(30, generator=generator, dtype=torch.double)
        gradient = 0.5 * previous + torch.randn(30, generator=generator, dtype=torch.double)
        part = part_of(gradient, previous, 0.1)
        assert part.beyond
        left = gradient - part.coefficient * previous
        assert (left @ previous).item() == pytest.approx(0, abs=1e-9)
        assert left.norm().item() == pytest.approx(part.norm.item())
        # A descent direction still: never against the gradient.
        assert left @ gradient >= 0
        assert part.cosine.item() == pytest.approx(
            torch.cosine_similarity(gradient, previous, dim=0).item()
        )


def test_gradients_below_the_threshold_stay():
    generator = torch.Generator().manual_seed(1)
    previous, gradient = torch.randn(2, 30, generator=generator)
    for other in (previous, -gradient):
        part = part_of(gradient, other, 0.9)
        assert not part.beyond
        assert (part.coefficient.item(), part.norm.item()) == (0.0, gradient.norm().item())
    assert not part_of(gradient, gradient, 1.0).beyond


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e18])
def test_the_cosine_does_not_depend_on_the_size_of_gradients(scale):
    gradient = torch.tensor([3.0, 4.0])
    part = part_of(gradient, torch.tensor([5.0, 0.0]) * scale, 0.5)
    assert part.cosine.item() == pytest.approx(0.6)
    assert part.coefficient.item() * 5.0 * scale == pytest.approx(3.0)
    assert part.norm.item() == pytest.approx(4.0)


def test_a_gradient_of_zero_is_not_aligned():
    zero, one = torch.zeros(2), torch.ones(2)
    for gradient, previous in ((zero, one), (one, zero), (zero, zero)):
        part = part_of(gradient, previous, 0.0)
        assert (part.cosine.item(), part.coefficient.item(), bool(part.beyond)) == (0, 0, False)


def test_the_deviation_of_weights_equals_the_formula():
    logs = torch.tensor([0.0, 0.1, -0.3, 2.0, math.nan])
    mask = torch.tensor([True, True, True, True, False])
    expected = (0 + math.expm1(0.1) - math.expm1(-0.3) + 1.0) / 4
    assert weight_deviation(logs, mask).item() == pytest.approx(expected)
    assert weight_deviation(logs, mask, cap=math.inf).item() == pytest.approx(
        expected + (math.exp(2.0) - 2) / 4
    )
    assert weight_deviation(logs, ~mask & False).item() == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: age_weights(torch.zeros(1), half_life=0.0), "half_life is 0.0"),
        (
            lambda: learning_rate_scale(torch.zeros(1), torch.ones(1).bool(), on_policy_share=0.0),
            "on_policy_share is 0.0",
        ),
        (lambda: part_of(torch.ones(1), torch.ones(1), 1.5), "threshold is 1.5"),
        (lambda: weight_deviation(torch.zeros(1), torch.ones(1).bool(), cap=0.0), "cap is 0.0"),
    ],
)
def test_numbers_without_a_meaning_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- masks by divergence, and by what came before


def test_the_binary_divergence_equals_that_of_two_outcomes():
    p, q = torch.tensor([0.5, 0.01, 0.99]), torch.tensor([0.25, 0.3, 0.9])
    expected = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(binary_kl(p.log(), q.log()), expected)
    assert binary_kl(q.log(), q.log()).tolist() == pytest.approx([0.0] * 3, abs=1e-7)


def test_the_binary_divergence_at_certainty():
    sure, half, never = torch.tensor(0.0), torch.tensor(0.5).log(), torch.tensor(-math.inf)
    assert binary_kl(sure, sure).item() == 0.0
    assert binary_kl(sure, half).item() == pytest.approx(math.log(2))
    assert binary_kl(half, sure).item() == math.inf
    assert binary_kl(never, half).item() == pytest.approx(math.log(2))
    assert binary_kl(half, never).item() == math.inf
    assert binary_kl(never, never).item() == 0.0


def test_a_merged_divergence_is_at_most_the_whole_one():
    generator = torch.Generator().manual_seed(3)
    first, second = torch.randn(2, 50, 6, generator=generator).log_softmax(-1)
    whole = (first.exp() * (first - second)).sum(-1)
    for token in range(6):
        assert (binary_kl(first[:, token], second[:, token]) <= whole + 1e-6).all()


def test_kpop_sees_probabilities_where_a_ratio_does_not():
    """The same ratio of 1.3 for a rare token and for a likely one."""
    behavior = torch.tensor([1e-5, 0.7]).log()
    proximal = behavior + math.log(1.3)
    weight = mask_binary_kl(0.05)(behavior_weight(proximal, behavior, torch.ones(2).bool())).weight
    assert weight[0].item() == pytest.approx(1.3)
    assert weight[1].item() == 0.0


def test_a_token_of_large_divergence_drops_its_sequence():
    proximal = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    behavior = torch.tensor([[-1.0, -2.0, -1.0], [-1.1, -0.9, -1.0]])
    mask = torch.tensor([[True, True, True], [True, True, True]])
    correct = reject(k3, high=0.1, statistic=max_of_sequence)
    kept = correct(behavior_weight(proximal, behavior, mask)).weight > 0
    assert kept.tolist() == [[False] * 3, [True] * 3]
    # A masked token is no reason.
    mask[0, 1] = False
    assert (correct(behavior_weight(proximal, behavior, mask)).weight > 0).all()


def vetoed(logprobs, advantages, mask, threshold=1.5, sequences=None):
    behavior = torch.zeros_like(logprobs)
    stay = veto_suffix_mask(
        logprobs, behavior, advantages, mask, threshold=threshold, sequences=sequences
    )
    return (mask & ~stay).tolist()


def test_a_veto_drops_what_follows_it_where_the_advantage_is_negative():
    logs = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.0, 0.5, 0.0, 0.0], [0.0, 0.3, 0.4, 0.3]])
    advantages = torch.tensor([-1.0, 1.0, -1.0])[:, None].expand(3, 4)
    mask = torch.ones(3, 4).bool()
    # The first row has its trigger at the second token, which stays.
    assert vetoed(logs, advantages, mask) == [
        [False, False, True, True],
        [False] * 4,
        [False] * 4,
    ]
    mask[0, 1] = False  # a masked token is no trigger, and the next one is the last
    assert vetoed(logs, advantages, mask)[0] == [False] * 4


def test_a_veto_stays_within_its_sequence_of_a_packed_batch():
    logs = torch.tensor([0.0, 0.9, 0.0, 0.0, 0.0, 0.9])
    ids = Segments(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    everyone = torch.ones(6).bool()
    found = vetoed(logs, -torch.ones(6), everyone, sequences=ids)
    assert found == [False, False, True, False, False, False]
    assert vetoed(logs, -torch.ones(6), everyone, threshold=math.inf, sequences=ids) == [False] * 6
