"""Rows of the table: returns, GAE, V-trace and the token-level baseline."""

from __future__ import annotations

import torch
from torch import Tensor

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
from areal_lab.functional.segments import Segments, unmasked_runs
from tests.functional.case import NO_GRADIENT, Case, Ragged

GROUPS = torch.tensor([0, 0, 1, 0])
"""Prompt of each sequence of the ragged batch."""


def tokens(seed: int) -> tuple[Tensor, ...]:
    """Rewards, values, log-ratio, one number for the sequence, mask; six tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    mask = torch.tensor([seed % 2 == 0, True, False, True, True, seed < 2])
    # Away from ratio 1, which is a cap.
    log_ratio = torch.tensor([0.3, -0.4, 0.0, 0.2, -0.1, 0.5], dtype=torch.double)
    return normal(6), normal(6), log_ratio.roll(seed), normal(1)[0], mask


def layouts_of(function, inputs: int, *, per_sequence: bool):
    """Padded and packed: some tensors of tokens, perhaps one number for each sequence, mask."""

    def layouts(batch: Ragged):
        padded = [batch.draw(seed) for seed in range(inputs)]
        number = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.double)
        numbers = [number] if per_sequence else []
        ours = function(*padded, *numbers, batch.mask)
        packed = function(
            *map(batch.pack, padded), *numbers, batch.pack(batch.mask), sequences=batch.sequences
        )
        many = isinstance(ours, tuple)
        return [batch.pack(x) for x in (ours if many else [ours])], list(
            packed if many else [packed]
        )

    return layouts


def gae_of(holes):
    def function(rewards, values, bootstrap, mask, sequences=None):
        return gae(
            rewards,
            values,
            mask,
            gamma=0.9,
            lambda_=0.8,
            bootstrap_values=bootstrap,
            holes=holes,
            sequences=sequences,
        )

    return function


def gae_with_tensors(rewards, values, gamma, mask, sequences=None):
    """Gamma and lambda per token."""
    unit = torch.sigmoid(gamma)
    lambda_ = length_adaptive_lambda(mask, alpha=0.7, sequences=sequences, dtype=torch.double)
    return gae(rewards, values, mask, gamma=unit, lambda_=lambda_, sequences=sequences)


def of_responses(token_rewards, values, reward, mask, sequences=None):
    return gae_advantages(
        reward, values, mask, token_rewards=token_rewards, bootstrap_values=reward / 2,
        gamma=0.9, lambda_=0.8, value_lambda=1.0, length_alpha=0.7, sequences=sequences,
    )  # fmt: skip


def mixed(rewards, values, bootstrap, mask, sequences=None):
    return lambda_returns(
        rewards, values, mask, gamma=0.9, lambda_=0.8, bootstrap_values=bootstrap,
        sequences=sequences,
    )  # fmt: skip


def discounted(rewards, bootstrap, mask, sequences=None):
    return discounted_returns(
        rewards, mask, gamma=0.9, bootstrap_values=bootstrap, sequences=sequences
    )


def off_policy(rewards, values, log_ratio, bootstrap, mask, sequences=None):  # noqa: PLR0917
    return vtrace(
        rewards, values, log_ratio, mask, gamma=0.9, lambda_=0.8, rho_cap=1.3, trace_cap=1.1,
        bootstrap_values=bootstrap, sequences=sequences,
    )  # fmt: skip


def leaky(rewards, values, log_ratio, bootstrap, mask, sequences=None):  # noqa: PLR0917
    return leaky_vtrace(
        rewards, values, log_ratio, mask, alpha=0.7, gamma=0.9, lambda_=0.8, rho_cap=1.3,
        trace_cap=1.1, bootstrap_values=bootstrap, sequences=sequences,
    )  # fmt: skip


def reinforce_plus_plus(token_rewards, reward, mask, sequences=None):
    return reinforce_plus_plus_returns(
        reward, mask, token_rewards=token_rewards, gamma=0.9, sequences=sequences
    )


def by_turn(rewards, mask, sequences=None):
    return turn_returns(rewards, mask, gamma=0.5, sequences=sequences)


def by_given_turn(rewards, mask, sequences=None):
    turns = Segments(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    return turn_returns(rewards, mask, gamma=0.5, turns=turns, sequences=sequences)


def given_turn_layouts(batch: Ragged):
    ids = torch.tensor([0, 0, 0, 1, 1]).expand(4, 5)
    rewards = batch.draw(0)
    padded = turn_returns(rewards, batch.mask, gamma=0.5, turns=Segments(ids, 2))
    packed = turn_returns(
        batch.pack(rewards),
        batch.pack(batch.mask),
        gamma=0.5,
        turns=Segments(batch.pack(ids), 2),
        sequences=batch.sequences,
    )
    return batch.pack(padded), packed


def token_baseline(rewards, logprobs, mask, sequences=None, groups=None):
    """Two sequences of three tokens by default, of the same prompt."""
    if sequences is None and mask.dim() == 1:
        sequences = Segments(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    if groups is None:
        groups = Segments(torch.zeros(6, dtype=torch.long), 1)
    logprobs = torch.where(mask, -logprobs.abs(), torch.nan)
    return optimal_token_baseline(
        rewards,
        logprobs,
        logprobs.exp().square(),
        mask,
        groups=groups,
        gamma=0.9,
        sequences=sequences,
    )


def token_baseline_layouts(batch: Ragged):
    rewards, logprobs, ids = batch.draw(0), batch.draw(1), GROUPS[:, None].expand(4, 5)
    padded = token_baseline(rewards, logprobs, batch.mask, None, Segments(ids, 2))
    packed = token_baseline(
        batch.pack(rewards),
        batch.pack(logprobs),
        batch.pack(batch.mask),
        batch.sequences,
        Segments(batch.pack(ids), 2),
    )
    return [batch.pack(x) for x in padded], list(packed)


def chosen_inputs(*positions: int):
    """Those of `tokens`, then the mask."""
    return lambda seed: tuple(tokens(seed)[i] for i in (*positions, 4))


def adaptive(mask, sequences=None):
    return length_adaptive_lambda(mask, alpha=0.7, sequences=sequences, dtype=torch.double)


def runs(mask, sequences=None):
    return unmasked_runs(mask, sequences).ids


def placed(reward, mask, sequences=None):
    return terminal_rewards(reward, mask, sequences=sequences)


CASES = [
    Case(
        name=name,
        function=function,
        sample=chosen_inputs(*positions),
        differentiable=differentiable,
        layouts=layouts_of(function, inputs, per_sequence=3 in positions),
    )
    for name, function, positions, differentiable, inputs in [
        ("gae", gae_of(carry_over_holes), (0, 1, 3), (0, 1, 2), 2),
        ("gae (restart_at_holes)", gae_of(restart_at_holes), (0, 1, 3), (0, 1, 2), 2),
        ("gae (gamma, lambda per token)", gae_with_tensors, (0, 1, 2), (0, 1, 2), 3),
        ("gae_advantages", of_responses, (0, 1, 3), (0, 1, 2), 2),
        ("lambda_returns", mixed, (0, 1, 3), (0, 1, 2), 2),
        ("vtrace", off_policy, (0, 1, 2, 3), (0, 1, 3), 3),
        ("leaky_vtrace", leaky, (0, 1, 2, 3), (0, 1, 3), 3),
        ("discounted_returns", discounted, (0, 3), (0, 1), 1),
        ("reinforce_plus_plus_returns", reinforce_plus_plus, (0, 3), (0, 1), 1),
        ("terminal_rewards", placed, (3,), (0,), 0),
        ("turn_returns (runs)", by_turn, (0,), (0,), 1),
    ]
] + [
    Case(
        name="turn_returns (given turns)",
        function=by_given_turn,
        sample=chosen_inputs(0),
        differentiable=(0,),
        layouts=given_turn_layouts,
    ),
    Case(
        name="optimal_token_baseline",
        function=token_baseline,
        sample=chosen_inputs(0, 1),
        differentiable=(0,),
        layouts=token_baseline_layouts,
    ),
    Case(
        name="length_adaptive_lambda",
        function=adaptive,
        sample=chosen_inputs(),
        layouts=layouts_of(adaptive, 0, per_sequence=False),
        reasons=NO_GRADIENT,
    ),
    Case(
        name="last_unmasked",
        function=last_unmasked,
        sample=chosen_inputs(),
        layouts=layouts_of(
            lambda mask, sequences=None: last_unmasked(mask, sequences), 0, per_sequence=False
        ),
        reasons=NO_GRADIENT,
    ),
    Case(
        name="restart_at_holes",
        function=restart_at_holes,
        sample=chosen_inputs(),
        layouts=layouts_of(restart_at_holes, 0, per_sequence=False),
        reasons=NO_GRADIENT,
    ),
    Case(
        name="unmasked_runs",
        function=runs,
        sample=chosen_inputs(),
        layouts=layouts_of(runs, 0, per_sequence=False),
        reasons=NO_GRADIENT,
    ),
]
