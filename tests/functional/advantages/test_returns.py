"""Returns and advantages per token: references, limits, holes, and what lies beyond the end."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.gae import (
    gae,
    gae_advantages,
    lambda_returns,
    length_adaptive_lambda,
)
from areal_lab.functional.advantages.returns import (
    carry_over_holes,
    discounted_returns,
    last_unmasked,
    reinforce_plus_plus_returns,
    restart_at_holes,
    terminal_rewards,
    turn_returns,
)
from areal_lab.functional.advantages.token_baseline import optimal_token_baseline
from areal_lab.functional.advantages.v_trace import leaky_vtrace, vtrace
from areal_lab.functional.segments import Segments, packed_sequences, unmasked_runs
from tests.reference import returns as reference

EXACT = {"rtol": 1e-12, "atol": 1e-12}
HOLES = {carry_over_holes: False, restart_at_holes: True}

masks = st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=5)


class Batch:
    """Ragged sequences of normal values with the same content padded, packed and as lists."""

    def __init__(self, masks, seed=0):
        width = max(1, *map(len, masks))
        self.lengths = [len(mask) for mask in masks]
        self.exists = torch.arange(width) < torch.tensor(self.lengths)[:, None]
        self.mask = torch.tensor([[*mask, *[False] * (width - len(mask))] for mask in masks])
        self.sequences = packed_sequences(
            torch.tensor([0, *self.lengths]).cumsum(0), sum(self.lengths)
        )
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self):
        """[N, T] with NaN on the padding."""
        values = torch.randn(self.exists.shape, generator=self.generator, dtype=torch.double)
        return torch.where(self.exists, values, torch.nan)

    def draw_per_sequence(self):
        return torch.randn(len(self.lengths), generator=self.generator, dtype=torch.double)

    def lists(self, tokens):
        return [row[:n].tolist() for row, n in zip(tokens, self.lengths, strict=True)]

    def padded(self, rows):
        """Lists to [N, T], 0 on the padding."""
        out = torch.zeros(self.exists.shape, dtype=torch.double)
        for i, row in enumerate(rows):
            out[i, : len(row)] = torch.tensor(row, dtype=torch.double)
        return out

    def pack(self, tokens):
        return tokens[self.exists]


def full(row, value):
    return [value] * len(row)


@settings(max_examples=12)
@given(masks, st.sampled_from(list(HOLES)), st.booleans(), st.integers(0, 9))
@pytest.mark.parametrize("gammas", [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0), (0.0, 0.7)])
def test_gae_equals_the_reference_padded_and_packed(gammas, masks, holes, cut_off, seed):
    gamma, lambda_ = gammas
    batch = Batch(masks, seed)
    rewards, values = batch.draw(), batch.draw()
    beyond = batch.draw_per_sequence() if cut_off else None
    keywords = {"gamma": gamma, "lambda_": lambda_, "bootstrap_values": beyond, "holes": holes}
    padded = gae(rewards, values, batch.mask, **keywords)
    expected = batch.padded(
        reference.gae(
            r,
            v,
            m,
            gammas=full(r, gamma),
            lambdas=full(r, lambda_),
            bootstrap=beyond[i].item() if cut_off else 0.0,
            restart=HOLES[holes],
        )
        for i, (r, v, m) in enumerate(
            zip(*map(batch.lists, (rewards, values, batch.mask)), strict=True)
        )
    )
    torch.testing.assert_close(padded.advantages, expected, **EXACT)
    targets = torch.where(batch.mask, expected + values, 0.0)
    torch.testing.assert_close(padded.returns, targets, **EXACT)

    packed = gae(
        *map(batch.pack, (rewards, values, batch.mask)), sequences=batch.sequences, **keywords
    )
    torch.testing.assert_close(packed.advantages, batch.pack(expected), **EXACT)
    torch.testing.assert_close(packed.returns, batch.pack(targets), **EXACT)


@settings(max_examples=20)
@given(masks, st.integers(0, 9))
def test_gae_takes_gamma_and_lambda_per_token(masks, seed):
    batch = Batch(masks, seed)
    rewards, values = batch.draw(), batch.draw()
    gamma, lambda_ = batch.draw().sigmoid(), batch.draw().sigmoid()
    ours = gae(rewards, values, batch.mask, gamma=gamma, lambda_=lambda_)
    columns = zip(*map(batch.lists, (rewards, values, batch.mask, gamma, lambda_)), strict=True)
    expected = [reference.gae(r, v, m, gammas=g, lambdas=x) for r, v, m, g, x in columns]
    torch.testing.assert_close(ours.advantages, batch.padded(expected), **EXACT)


@settings(max_examples=20)
@given(st.integers(1, 12), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_lambda_returns_are_the_mixture_of_n_step_returns(tokens, gamma, lambda_, seed):
    batch = Batch([[True] * tokens], seed)
    rewards, values, beyond = batch.draw()[0], batch.draw()[0], batch.draw_per_sequence()[0]
    ours = lambda_returns(
        rewards,
        values,
        batch.mask[0],
        gamma=gamma,
        lambda_=lambda_,
        bootstrap_values=beyond,
    )
    expected = reference.n_step_mixture(
        rewards.tolist(), values.tolist(), gamma=gamma, lam=lambda_, bootstrap=beyond.item()
    )
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.double), **EXACT)


def test_gae_by_hand():
    """Two tokens, gamma 1/2, lambda 1/2: deltas are -1/2 and 3/4 + 1."""
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    mask = torch.ones(2, dtype=torch.bool)
    cut_off = gae(rewards, values, mask, gamma=0.5, lambda_=0.5, bootstrap_values=torch.tensor(3.5))
    assert cut_off.advantages.tolist() == [-0.5 + 0.25 * 1.75, 1.75]
    ended = gae(rewards, values, mask, gamma=0.5, lambda_=0.5)
    assert ended.advantages.tolist() == [-0.5, 0.0]
    assert ended.returns.tolist() == [0.5, 1.0]


@settings(max_examples=20)
@given(masks, st.sampled_from(list(HOLES)), st.integers(0, 9))
def test_limits_of_lambda(masks, holes, seed):
    """1 is the return less the value; 0 looks one token ahead."""
    batch = Batch(masks, seed)
    rewards, values, beyond = batch.draw(), batch.draw(), batch.draw_per_sequence()
    keywords = {"gamma": 0.9, "bootstrap_values": beyond, "holes": holes}
    whole = gae(rewards, values, batch.mask, lambda_=1.0, **keywords)
    returns = discounted_returns(rewards, batch.mask, **keywords)
    torch.testing.assert_close(whole.returns, returns, **EXACT)
    torch.testing.assert_close(
        whole.advantages, torch.where(batch.mask, returns - values, 0.0), **EXACT
    )
    # The true values have no advantage, whatever lambda.
    for lambda_ in (0.0, 0.6, 1.0):
        right = gae(rewards, returns, batch.mask, lambda_=lambda_, **keywords)
        torch.testing.assert_close(right.advantages, torch.zeros_like(returns), **EXACT)


@settings(max_examples=20)
@given(masks, st.floats(-5, 5), st.integers(0, 9))
def test_potential_based_shaping_moves_values_and_not_advantages(masks, shift, seed):
    """A constant c on all values and beyond, and r + (1 - gamma) c: the same advantages."""
    batch = Batch(masks, seed)
    rewards, values, beyond = batch.draw(), batch.draw(), batch.draw_per_sequence()

    def advantages(c):
        return gae(
            rewards + (1 - 0.9) * c,
            values + c,
            batch.mask,
            gamma=0.9,
            lambda_=0.7,
            bootstrap_values=beyond + c,
        ).advantages

    torch.testing.assert_close(advantages(shift), advantages(0.0), rtol=1e-10, atol=1e-10)


@settings(max_examples=20)
@given(masks, st.integers(0, 9))
def test_a_hole_that_is_carried_over_is_not_there(masks, seed):
    """Equal to the unmasked tokens by themselves."""
    batch = Batch(masks, seed)
    rewards, values, beyond = batch.draw(), batch.draw(), batch.draw_per_sequence()
    ours = gae(rewards, values, batch.mask, gamma=0.9, lambda_=0.7, bootstrap_values=beyond)
    for i, mask in enumerate(batch.mask):
        alone = gae(
            rewards[i, mask],
            values[i, mask],
            mask[mask],
            gamma=0.9,
            lambda_=0.7,
            bootstrap_values=beyond[i],
        )
        torch.testing.assert_close(ours.advantages[i, mask], alone.advantages, **EXACT)
        assert (ours.advantages[i, ~mask] == 0).all()
        assert (ours.returns[i, ~mask] == 0).all()


def test_three_things_to_do_at_a_hole():
    """Two turns around a masked token whose critic says 100; a reward of 1 at the end."""
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
    values = torch.tensor([0.25, 0.5, 100.0, 0.75])
    mask = torch.tensor([True, True, False, True])
    one_step = {"gamma": 1.0, "lambda_": 0.0}
    carried = gae(rewards, values, mask, **one_step).advantages
    assert carried.tolist() == [0.25, 0.25, 0.0, 0.25]
    apart = gae(rewards, values, mask, **one_step, holes=restart_at_holes).advantages
    assert apart.tolist() == [0.25, -0.5, 0.0, 0.25]
    # As frameworks that walk through holes: let the mask have none, and mask afterwards.
    through = gae(rewards, values, torch.ones_like(mask), **one_step).advantages
    assert (through * mask).tolist() == [0.25, 99.5, 0.0, 0.25]


@pytest.mark.parametrize("holes", HOLES)
def test_padding_after_the_last_token_is_no_hole(holes):
    """What lies beyond the sequence counts however much padding follows."""
    rewards, values = torch.zeros(2, 5), torch.ones(2, 5)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]) > 0
    beyond = torch.tensor([3.0, 3.0])
    ours = gae(rewards, values, mask, lambda_=0.0, bootstrap_values=beyond, holes=holes)
    assert ours.advantages.tolist() == [[0, 2, 0, 0, 0], [0, 0, 0, 0, 2]]


@settings(max_examples=20)
@given(masks, st.floats(0, 1), st.sampled_from([None, 0.95]), st.integers(0, 9))
def test_advantages_of_a_critic_equal_the_reference(masks, lambda_, value_lambda, seed):
    """One reward at the last chosen token, a penalty at each, then GAE, then whitened."""
    batch = Batch(masks, seed)
    penalties, values = batch.draw(), batch.draw()
    rewards, beyond = batch.draw_per_sequence(), batch.draw_per_sequence()
    ours = gae_advantages(
        rewards,
        values,
        batch.mask,
        token_rewards=penalties,
        bootstrap_values=beyond,
        gamma=0.9,
        lambda_=lambda_,
        value_lambda=value_lambda,
    )
    total = torch.where(batch.mask, penalties, 0.0) + terminal_rewards(rewards, batch.mask)

    def slowly(weight):
        columns = zip(*map(batch.lists, (total, values, batch.mask)), beyond.tolist(), strict=True)
        return batch.padded(
            [
                reference.gae(r, v, m, gammas=full(r, 0.9), lambdas=full(r, weight), bootstrap=b)
                for r, v, m, b in columns
            ]
        )

    advantages = slowly(lambda_)
    returns = slowly(lambda_ if value_lambda is None else value_lambda)
    returns = returns + torch.where(batch.mask, values, 0.0)
    torch.testing.assert_close(ours.returns, returns, **EXACT)
    chosen = advantages[batch.mask]
    if len(chosen) > 1:
        scale = (chosen.var() + 1e-8).sqrt()
        torch.testing.assert_close(ours.advantages[batch.mask], (chosen - chosen.mean()) / scale)
    assert (ours.advantages[~batch.mask] == 0).all()


def test_advantages_of_a_critic_with_a_lambda_by_length():
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards, values = torch.tensor([1.0, 0.0]), torch.rand(2, 3)
    ours = gae_advantages(rewards, values, mask, length_alpha=0.5, whitened=False)
    by_hand = gae(terminal_rewards(rewards, mask), values, mask, lambda_=1 - 1 / 1.5)
    torch.testing.assert_close(ours, by_hand)


@settings(max_examples=20)
@given(masks, st.sampled_from(list(HOLES)), st.booleans(), st.integers(0, 9))
def test_discounted_returns_equal_the_reference(masks, holes, per_token, seed):
    batch = Batch(masks, seed)
    rewards, beyond = batch.draw(), batch.draw_per_sequence()
    gamma = batch.draw().sigmoid() if per_token else torch.full_like(rewards, 0.9)
    ours = discounted_returns(
        rewards,
        batch.mask,
        gamma=gamma if per_token else 0.9,
        bootstrap_values=beyond,
        holes=holes,
    )
    columns = zip(*map(batch.lists, (rewards, batch.mask, gamma)), beyond.tolist(), strict=True)
    expected = [
        reference.discounted_returns(r, m, gammas=g, bootstrap=b, restart=HOLES[holes])
        for r, m, g, b in columns
    ]
    torch.testing.assert_close(ours, batch.padded(expected), **EXACT)


CAPS = {"rho_cap": 1.2, "trace_cap": 0.9, "advantage_cap": 1.5}


@settings(max_examples=20)
@given(masks, st.sampled_from(list(HOLES)), st.floats(0, 1), st.integers(0, 9))
@pytest.mark.parametrize("alpha", [None, 1.0, 0.6, 0.0])
def test_vtrace_equals_the_reference_padded_and_packed(alpha, masks, holes, lambda_, seed):
    function = vtrace if alpha is None else partial(leaky_vtrace, alpha=alpha)
    batch = Batch(masks, seed)
    rewards, values, log_ratio = batch.draw(), batch.draw(), batch.draw()
    beyond = batch.draw_per_sequence()
    keywords = {"gamma": 0.9, "lambda_": lambda_, "bootstrap_values": beyond, "holes": holes}
    ours = function(rewards, values, log_ratio, batch.mask, **CAPS, **keywords)
    columns = zip(
        *map(batch.lists, (rewards, values, log_ratio, batch.mask)), beyond.tolist(), strict=True
    )
    pairs = [
        reference.vtrace(
            r,
            v,
            x,
            m,
            gammas=full(r, 0.9),
            lam=lambda_,
            bootstrap=b,
            restart=HOLES[holes],
            alpha=1.0 if alpha is None else alpha,
            **CAPS,
        )
        for r, v, x, m, b in columns
    ]
    advantages, returns = (batch.padded(each) for each in zip(*pairs, strict=True))
    torch.testing.assert_close(ours.advantages, advantages, **EXACT)
    torch.testing.assert_close(ours.returns, returns, **EXACT)
    packed = function(
        *map(batch.pack, (rewards, values, log_ratio, batch.mask)),
        sequences=batch.sequences,
        **CAPS,
        **keywords,
    )
    torch.testing.assert_close(packed.advantages, batch.pack(advantages), **EXACT)
    torch.testing.assert_close(packed.returns, batch.pack(returns), **EXACT)


@settings(max_examples=20)
@given(masks, st.sampled_from(list(HOLES)), st.integers(0, 9))
def test_vtrace_on_policy_is_gae(masks, holes, seed):
    """Its targets are the lambda returns, and GAE's advantages both of its own."""
    batch = Batch(masks, seed)
    rewards, values, beyond = batch.draw(), batch.draw(), batch.draw_per_sequence()
    keywords = {"gamma": 0.9, "lambda_": 0.7, "bootstrap_values": beyond, "holes": holes}
    ours = vtrace(rewards, values, torch.zeros_like(rewards), batch.mask, **keywords)
    usual = gae(rewards, values, batch.mask, **keywords)
    torch.testing.assert_close(ours.returns, usual.returns, **EXACT)
    torch.testing.assert_close(ours.advantages, usual.advantages, **EXACT)


def test_a_leak_lies_between_vtrace_and_uncapped_weights():
    rewards, values, log_ratio = torch.randn(
        3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.double
    )
    mask = torch.ones(6, dtype=torch.bool)
    open_caps = dict.fromkeys(CAPS, math.inf)
    uncapped = vtrace(rewards, values, log_ratio, mask, **open_caps)
    leaking = leaky_vtrace(rewards, values, log_ratio, mask, alpha=0.0, **CAPS)
    torch.testing.assert_close(tuple(leaking), tuple(uncapped))


def test_alpha_gets_a_gradient_where_it_is_a_tensor():
    rewards, values, log_ratio = torch.randn(
        3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.double
    )
    mask = torch.ones(6, dtype=torch.bool)
    alpha = torch.tensor(0.7, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda a: tuple(leaky_vtrace(rewards, values, log_ratio, mask, alpha=a)), alpha
    )


def test_an_overflowing_ratio_meets_its_cap():
    one, mask = torch.ones(2), torch.ones(2, dtype=torch.bool)
    huge = vtrace(one, one, torch.tensor([1000.0, 1000.0]), mask)
    usual = vtrace(one, one, torch.tensor([0.0, 0.0]), mask)
    assert torch.equal(huge.advantages, usual.advantages)
    assert torch.equal(huge.returns, usual.returns)


@settings(max_examples=20)
@given(masks, st.integers(0, 9))
def test_rewards_of_sequences_go_to_their_last_unmasked_token(masks, seed):
    batch = Batch(masks, seed)
    rewards = batch.draw_per_sequence()
    placed = terminal_rewards(rewards, batch.mask)
    expected = [
        reference.terminal_rewards(reward, mask)
        for reward, mask in zip(rewards.tolist(), batch.lists(batch.mask), strict=True)
    ]
    assert torch.equal(placed, batch.padded(expected))
    packed = terminal_rewards(rewards, batch.pack(batch.mask), sequences=batch.sequences)
    assert torch.equal(packed, batch.pack(placed))
    assert torch.equal(last_unmasked(batch.mask).sum(1), batch.mask.any(1).long())
    kept = torch.where(batch.mask.any(1), rewards, 0.0)
    torch.testing.assert_close(placed.sum(1), kept)


@settings(max_examples=20)
@given(masks, st.sampled_from(list(HOLES)), st.integers(0, 9))
def test_reinforce_plus_plus_is_reward_to_go_with_the_reward_at_the_end(masks, holes, seed):
    batch = Batch(masks, seed)
    rewards, penalties = batch.draw_per_sequence(), batch.draw()
    ours = reinforce_plus_plus_returns(
        rewards, batch.mask, token_rewards=penalties, gamma=0.9, holes=holes
    )
    expected = []
    columns = zip(rewards.tolist(), *map(batch.lists, (penalties, batch.mask)), strict=True)
    for reward, penalty, mask in columns:
        placed = reference.terminal_rewards(reward, mask)
        total = [a + b for a, b in zip(placed, penalty, strict=True)]
        expected.append(
            reference.discounted_returns(total, mask, gammas=full(total, 0.9), restart=HOLES[holes])
        )
    torch.testing.assert_close(ours, batch.padded(expected), **EXACT)
    # Without a discount and a penalty each token gets its sequence's reward.
    plain = reinforce_plus_plus_returns(rewards, batch.mask)
    torch.testing.assert_close(plain, torch.where(batch.mask, rewards[:, None], 0.0), **EXACT)


@settings(max_examples=20)
@given(masks, st.floats(0, 1), st.integers(0, 9))
def test_turn_returns_equal_the_reference(masks, gamma, seed):
    batch = Batch(masks, seed)
    rewards = batch.draw()
    # Turns whose numbers begin anew in each sequence; some have no unmasked token.
    ids = (batch.draw().nan_to_num() > 0).long().cumsum(1)
    ours = turn_returns(rewards, batch.mask, gamma=gamma, turns=Segments(ids, ids.shape[1] + 1))
    columns = zip(*map(batch.lists, (rewards, batch.mask, ids)), strict=True)
    expected = [reference.turn_returns(r, m, turns, gamma=gamma) for r, m, turns in columns]
    torch.testing.assert_close(ours, batch.padded(expected), **EXACT)
    packed = turn_returns(
        batch.pack(rewards),
        batch.pack(batch.mask),
        gamma=gamma,
        turns=Segments(batch.pack(ids), ids.shape[1] + 1),
        sequences=batch.sequences,
    )
    torch.testing.assert_close(packed, batch.pack(ours), **EXACT)


@settings(max_examples=20)
@given(masks, st.integers(0, 9))
def test_turns_are_runs_of_unmasked_tokens_by_default(masks, seed):
    batch = Batch(masks, seed)
    rewards = batch.draw()
    ours = turn_returns(rewards, batch.mask, gamma=0.5)
    expected = []
    for r, mask in zip(*map(batch.lists, (rewards, batch.mask)), strict=True):
        number, turns = 0, []
        for t, keep in enumerate(mask):
            number += bool(t and keep and not mask[t - 1])
            turns.append(number)
        expected.append(reference.turn_returns(r, mask, turns, gamma=0.5))
    torch.testing.assert_close(ours, batch.padded(expected), **EXACT)
    packed = turn_returns(
        batch.pack(rewards), batch.pack(batch.mask), gamma=0.5, sequences=batch.sequences
    )
    torch.testing.assert_close(packed, batch.pack(ours), **EXACT)


def test_turns_by_hand():
    """Rewards 1 and 4 in two turns of two tokens, gamma 1/2; where in a turn does not matter."""
    mask = torch.tensor([True, True, False, True, True])
    for rewards in ([0.0, 1.0, 9.0, 0.0, 4.0], [1.0, 0.0, 9.0, 2.0, 2.0]):
        ours = turn_returns(torch.tensor(rewards), mask, gamma=0.5)
        assert ours.tolist() == [3.0, 3.0, 0.0, 4.0, 4.0]
    assert unmasked_runs(mask).ids.tolist() == [1, 1, 1, 2, 2]


def test_lambda_adapts_to_the_length():
    mask = torch.tensor([[True] * 40, [True] * 20 + [False] * 20, [True] * 5 + [False] * 35])
    ours = length_adaptive_lambda(mask, alpha=0.05, dtype=torch.double)
    torch.testing.assert_close(ours[:, 0], torch.tensor([0.5, 0.0, 0.0], dtype=torch.double))
    assert (ours == ours[:, :1]).all()
    sequences = packed_sequences(torch.tensor([0, 40, 60, 65]), 65)
    packed = length_adaptive_lambda(
        torch.ones(65, dtype=torch.bool), alpha=0.05, sequences=sequences, dtype=torch.double
    )
    assert torch.equal(packed, ours[mask])
    assert length_adaptive_lambda(mask).dtype == torch.float32


def test_decoupled_gae_is_two_calls():
    """VAPO: targets of the critic from lambda 1, advantages from a lambda of each length."""
    batch = Batch([[True] * 40, [True] * 25])
    rewards, values = batch.draw(), batch.draw()
    lambda_ = length_adaptive_lambda(batch.mask, alpha=0.05, dtype=torch.double)
    ours = gae(rewards, values, batch.mask, lambda_=lambda_).advantages
    expected = [
        reference.gae(r, v, m, gammas=full(r, 1.0), lambdas=full(r, 1 - 1 / (0.05 * len(r))))
        for r, v, m in zip(*map(batch.lists, (rewards, values, batch.mask)), strict=True)
    ]
    torch.testing.assert_close(ours, batch.padded(expected), **EXACT)


@settings(max_examples=20)
@given(masks, st.booleans(), st.integers(0, 9))
def test_optimal_token_baseline_equals_the_reference_padded_and_packed(masks, weighted, seed):
    batch = Batch(masks, seed)
    rewards, logprobs = batch.draw(), -batch.draw().abs() - 0.1
    squared, weights = logprobs.exp().square() + 0.01, batch.draw().exp() if weighted else None
    groups = [i % 2 for i in range(len(masks))]
    ids = torch.tensor(groups)[:, None].expand(batch.mask.shape)
    ours = optimal_token_baseline(
        rewards,
        logprobs,
        squared,
        batch.mask,
        groups=Segments(ids, 2),
        gamma=0.9,
        behavior_weight=weights,
    )
    advantages, returns = reference.optimal_token_baseline(
        *map(batch.lists, (rewards, logprobs, squared, batch.mask)),
        groups,
        gamma=0.9,
        weights=batch.lists(weights) if weighted else None,
    )
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(ours.advantages, batch.padded(advantages), **close)
    torch.testing.assert_close(ours.returns, batch.padded(returns), **close)
    packed = optimal_token_baseline(
        *map(batch.pack, (rewards, logprobs, squared, batch.mask)),
        groups=Segments(batch.pack(ids), 2),
        gamma=0.9,
        behavior_weight=batch.pack(weights) if weighted else None,
        sequences=batch.sequences,
    )
    torch.testing.assert_close(packed.advantages, batch.pack(ours.advantages), **close)


def test_a_sample_by_itself_equal_returns_and_certain_tokens_have_no_advantage():
    mask = torch.ones(3, 2, dtype=torch.bool)
    groups = Segments(torch.tensor([0, 0, 1])[:, None].expand(3, 2), 2)
    rewards = torch.tensor([[0.0, 0.7], [0.0, 0.7], [0.0, 0.3]])
    for probability in (0.5, 1.0):
        logprobs = torch.full((3, 2), probability).log()
        ours = optimal_token_baseline(
            rewards, logprobs, logprobs.exp().square(), mask, groups=groups
        )
        assert (ours.advantages == 0).all()
    # Tokens that were certain have no weight: the baseline is then the plain mean.
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.3]])
    ours = optimal_token_baseline(rewards, torch.zeros(3, 2), torch.ones(3, 2), mask, groups=groups)
    assert ours.advantages[:2].tolist() == [[0.5, 0.5], [-0.5, -0.5]]


def every_estimator(rewards, values, mask, number):
    """Each with masked tokens in mind: all of its per-token inputs come from the arguments."""
    yield from gae(rewards, values, mask, gamma=0.9, lambda_=0.8, bootstrap_values=number)
    yield from vtrace(rewards, values, values, mask, gamma=0.9, bootstrap_values=number)
    yield discounted_returns(rewards, mask, gamma=values.clamp(0, 1), bootstrap_values=number)
    yield reinforce_plus_plus_returns(number, mask, token_rewards=rewards)
    yield turn_returns(rewards, mask, gamma=0.5)
    groups = Segments(torch.zeros_like(mask, dtype=torch.long), 1)
    yield from optimal_token_baseline(rewards, values, values, mask, groups=groups)


@settings(max_examples=20)
@given(masks, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_masked_tokens_reach_neither_value_nor_gradient(masks, junk):
    batch = Batch(masks)
    rewards, values = batch.draw().nan_to_num(), batch.draw().nan_to_num()
    number = batch.draw_per_sequence()
    usual = list(every_estimator(rewards, values, batch.mask, number))
    leaves = [
        torch.where(batch.mask, rewards, junk).requires_grad_(),
        torch.where(batch.mask, values, junk).requires_grad_(),
        number.requires_grad_(),
    ]
    ours = list(every_estimator(leaves[0], leaves[1], batch.mask, leaves[2]))
    for one, other in zip(ours, usual, strict=True):
        assert torch.equal(one, other)
        assert (one[~batch.mask] == 0).all()
    sum(o.square().sum() for o in ours).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
    for leaf in leaves[:2]:
        assert (leaf.grad[~batch.mask] == 0).all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 3)])
def test_without_an_unmasked_token_everything_is_zero(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    tokens = torch.full(shape, torch.nan)
    number = torch.ones(shape[:-1])
    for output in every_estimator(tokens, tokens, mask, number):
        assert output.shape == shape
        assert (output == 0).all()
    assert length_adaptive_lambda(mask).shape == shape


def test_narrow_inputs_are_summed_in_float32():
    rewards = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(4096, dtype=torch.bool)
    returns = discounted_returns(rewards, mask)
    assert returns.dtype == torch.float32
    assert returns[0] == 4096
    assert gae(rewards, rewards.double(), mask).advantages.dtype == torch.float64
    # What lies beyond follows the others, wider or narrower.
    for dtype in (torch.bfloat16, torch.float64):
        beyond = torch.ones((), dtype=dtype)
        assert discounted_returns(rewards, mask, bootstrap_values=beyond)[0] == 4097
        assert gae(rewards, rewards, mask, bootstrap_values=beyond).returns[0] == 4097
        assert gae(rewards, rewards, mask, bootstrap_values=beyond).returns.dtype == torch.float32


def test_gradients_flow_through_rewards_and_values_but_not_through_weights():
    batch = Batch([[True, True, False, True]])
    leaves = [batch.draw().requires_grad_() for _ in range(3)]
    ours = vtrace(*leaves, batch.mask, gamma=0.9)
    (ours.advantages.sum() + ours.returns.sum()).backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is not None
    assert leaves[2].grad is None


TOKENS = torch.zeros(2, 3)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(2, 1)}, r"rewards has shape \(2, 1\) and mask \(2, 3\)"),
        ({"values": torch.zeros(2, 4)}, r"values has shape \(2, 4\) and mask \(2, 3\)"),
        ({"mask": TOKENS}, "mask has dtype torch.float32"),
        ({"rewards": TOKENS.long()}, r"rewards has dtype torch.int64, but must be floating"),
        ({"rewards": TOKENS + torch.nan}, r"rewards \(shape \(2, 3\)\) has 6 entries"),
        ({"values": TOKENS + torch.inf}, "values .* NaN or infinite"),
        ({"gamma": 1.5}, "gamma is 1.5, but must be in 0 .. 1"),
        ({"gamma": torch.ones(2)}, r"gamma has shape \(2,\) and mask \(2, 3\)"),
        ({"lambda_": -0.1}, "lambda_ is -0.1"),
        ({"lambda_": float("nan")}, "lambda_ is nan"),
        ({"bootstrap_values": torch.ones(2).long()}, "bootstrap_values has dtype torch.int64"),
        ({"bootstrap_values": torch.ones(2) / 0}, "bootstrap_values .* NaN or infinite"),
        ({"bootstrap_values": torch.ones(3)}, r"has shape \(3,\), but must be \(2,\)"),
        (
            {"sequences": Segments(torch.zeros(6, dtype=torch.long), 2)},
            r"sequences.ids has shape \(6,\)",
        ),
    ],
)
def test_bad_inputs_are_refused(change, message):
    inputs = {"rewards": TOKENS, "values": TOKENS, "mask": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=message):
        gae(**{**inputs, **change})


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mask: terminal_rewards(torch.ones(3), mask), r"rewards has shape \(3,\)"),
        (lambda mask: terminal_rewards(torch.ones(2).long(), mask), "rewards has dtype"),
        (
            lambda mask: terminal_rewards(torch.tensor([1.0, torch.nan]), mask),
            "rewards .* NaN or infinite",
        ),
        (lambda mask: turn_returns(TOKENS, mask, gamma=2.0), "gamma is 2.0"),
        (lambda mask: length_adaptive_lambda(mask, alpha=0.0), "alpha is 0.0"),
        (lambda mask: vtrace(TOKENS, TOKENS, TOKENS, mask, rho_cap=0.0), "rho_cap is 0.0"),
        (lambda mask: vtrace(TOKENS, TOKENS, TOKENS, mask, lambda_=2.0), "lambda_ is 2.0"),
        (
            lambda mask: leaky_vtrace(TOKENS, TOKENS, TOKENS, mask, alpha=1.5),
            "alpha is 1.5.*1 is V",
        ),
        (lambda mask: vtrace(TOKENS, TOKENS, TOKENS[:1], mask), "log_ratio has shape"),
        (
            lambda mask: optimal_token_baseline(
                TOKENS, TOKENS, TOKENS, mask, groups=Segments(torch.zeros(2).long(), 1)
            ),
            r"has shape \(2,\)",
        ),
    ],
)
def test_bad_inputs_of_the_others_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ["gamma", "lambda_"])
@pytest.mark.parametrize("wrong", [1.5, -0.5, torch.nan])
@pytest.mark.parametrize("function", [gae, lambda_returns, "vtrace"])
def test_discounts_per_token_have_bounds(function, name, wrong):
    ones, mask = torch.ones(3), torch.tensor([True, True, False])
    inputs = (ones, ones, ones, mask) if function == "vtrace" else (ones, ones, mask)
    function = vtrace if function == "vtrace" else function
    masked = torch.tensor([0.5, 0.5, wrong])
    assert function(*inputs, **{name: masked}) is not None
    with pytest.raises(ValueError, match=rf"{name} \(shape \(3,\)\) has 2 entries outside 0 .. 1"):
        function(*inputs, **{name: torch.tensor([wrong, wrong, 0.5])})


def test_vtrace_takes_a_lambda_per_token_and_is_gae_on_policy():
    torch.manual_seed(0)
    rewards, values, lambda_ = torch.rand(3, 2, 6, dtype=torch.double)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0]]) > 0
    bootstrap = torch.tensor([0.5, -1.0], dtype=torch.double)
    options = {"gamma": 0.9, "lambda_": lambda_, "bootstrap_values": bootstrap}
    ours = vtrace(rewards, values, torch.zeros_like(values), mask, **options)
    torch.testing.assert_close(tuple(ours), tuple(gae(rewards, values, mask, **options)))
    constant = torch.full_like(values, 0.7)
    log_ratio = torch.randn(2, 6, dtype=torch.double)
    torch.testing.assert_close(
        tuple(vtrace(rewards, values, log_ratio, mask, lambda_=constant)),
        tuple(vtrace(rewards, values, log_ratio, mask, lambda_=0.7)),
    )


def test_the_tokens_of_a_sequence_need_not_be_neighbors_for_its_reward():
    sequences = Segments(torch.tensor([0, 1, 0, 1]), 2)
    mask = torch.tensor([True, True, True, False])
    placed = terminal_rewards(torch.tensor([2.0, 3.0]), mask, sequences=sequences)
    assert placed.tolist() == [0, 3, 2, 0]
