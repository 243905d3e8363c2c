"""Rows of the table: advantages of samples, of several rewards, of agents; whitening."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.advantages.agent import gigpo_advantages, rae_advantages
from areal_lab.functional.advantages.difficulty import prompt_weight
from areal_lab.functional.advantages.group import (
    group_advantages,
    mean_of_others,
    std_of_batch,
    std_of_others,
)
from areal_lab.functional.advantages.multi_reward import (
    component_advantages,
    gdpo_advantages,
    normalize_then_sum,
    sum_then_normalize,
)
from areal_lab.functional.advantages.named import (
    dr_grpo_advantages,
    gpg_advantages,
    grpo_advantages,
    lite_ppo_advantages,
    max_rl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from areal_lab.functional.advantages.whitening import (
    Moments,
    reinforce_plus_plus_baseline_advantages,
    spread_to_tokens,
    token_moments,
    whiten,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

PER_SAMPLE = {"packed = padded": "one number per sample: no token layout"}
WHOLE = Moments(*torch.tensor([9.0, 5.0, 4.0], dtype=torch.double))
GROUPS = torch.tensor([4, 7, 4, 7, 4, 7, 4, 2])


def rewards(seed: int, *shape: int) -> Tensor:
    """Positive and all different, so that a best one and a mean to divide by exist."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape or (8,), generator=generator, dtype=torch.double) + 0.1


def with_groups(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return rewards(seed), GROUPS[torch.randperm(8, generator=generator)]


def with_lengths(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return *with_groups(seed), torch.randint(1, 9, (8,), generator=generator)


def of_components(seed: int) -> tuple[Tensor, ...]:
    return rewards(seed, 8, 3), with_groups(seed)[1]


def of_steps(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 4, (10,), generator=generator)
    episodes = torch.randint(0, 8, (10,), generator=generator)
    return *with_groups(seed), rewards(seed + 100, 10), states, episodes


def of_agents(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return rewards(seed), torch.randint(0, 3, (8,), generator=generator), rewards(seed + 100, 3)


def tokens(seed: int) -> tuple[Tensor, ...]:
    return rewards(seed, 6), torch.tensor([True, True, False, True, True, True])


def of_sequences(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 3, generator=generator) < 0.7
    return rewards(seed, 4), torch.tensor([0, 1, 0, 1]), mask


def whiten_layouts(batch: Ragged):
    padded = batch.draw(0)
    ours = whiten(padded, batch.mask)
    return batch.pack(ours), whiten(batch.pack(padded), batch.pack(batch.mask))


def spread_layouts(batch: Ragged):
    values = rewards(0, 4)
    packed_mask = batch.pack(batch.mask)
    ours = spread_to_tokens(values, batch.mask)
    return batch.pack(ours), spread_to_tokens(values, packed_mask, sequences=batch.sequences)


def baseline_layouts(batch: Ragged):
    values, groups = rewards(0, 4), torch.tensor([0, 0, 1, 1])
    ours = reinforce_plus_plus_baseline_advantages(values, groups, batch.mask)
    packed = reinforce_plus_plus_baseline_advantages(
        values, groups, batch.pack(batch.mask), sequences=batch.sequences
    )
    return batch.pack(ours), packed


def sample_case(name, function, sample=with_groups, differentiable=(0,)) -> Case:
    return Case(
        name=name,
        function=function,
        sample=sample,
        differentiable=differentiable,
        reasons=PER_SAMPLE,
    )


CASES = [
    sample_case("group_advantages", group_advantages),
    sample_case("group_advantages (std_of_batch)", partial(group_advantages, scale=std_of_batch)),
    sample_case(
        "group_advantages (mean_of_others, std_of_others)",
        partial(group_advantages, baseline=mean_of_others, scale=std_of_others),
    ),
    sample_case("grpo_advantages", grpo_advantages),
    sample_case("dr_grpo_advantages", dr_grpo_advantages),
    sample_case("rloo_advantages", rloo_advantages),
    sample_case("lite_ppo_advantages", lite_ppo_advantages),
    sample_case("opo_advantages", opo_advantages, with_lengths),
    sample_case("gpg_advantages", gpg_advantages),
    sample_case("max_rl_advantages", max_rl_advantages),
    sample_case("pass_at_k_advantages", pass_at_k_advantages),
    sample_case("remax_advantages", remax_advantages, lambda s: (rewards(s), rewards(s + 9))),
    sample_case("component_advantages", component_advantages, of_components),
    sample_case("normalize_then_sum", normalize_then_sum, of_components),
    sample_case("sum_then_normalize", sum_then_normalize, of_components),
    sample_case(
        "gdpo_advantages", partial(gdpo_advantages, weights=(1.0, 0.5, 2.0)), of_components
    ),
    sample_case("gigpo_advantages", gigpo_advantages, of_steps, (0, 2)),
    sample_case("rae_advantages", rae_advantages, of_agents),
    Case(
        name="whiten",
        function=whiten,
        sample=tokens,
        differentiable=(0,),
        layouts=whiten_layouts,
    ),
    Case(
        name="whiten (moments, keep_mean)",
        function=partial(whiten, moments=WHOLE, unbiased=False, keep_mean=True),
        sample=tokens,
        differentiable=(0,),
        layouts=whiten_layouts,
    ),
    Case(
        name="token_moments",
        function=token_moments,
        sample=tokens,
        differentiable=(0,),
        layouts=lambda b: (
            token_moments(b.draw(0), b.mask),
            token_moments(b.pack(b.draw(0)), b.pack(b.mask)),
        ),
    ),
    Case(
        name="spread_to_tokens",
        function=spread_to_tokens,
        sample=lambda seed: of_sequences(seed)[::2],
        differentiable=(0,),
        layouts=spread_layouts,
    ),
    Case(
        name="reinforce_plus_plus_baseline_advantages",
        function=reinforce_plus_plus_baseline_advantages,
        sample=of_sequences,
        differentiable=(0,),
        layouts=baseline_layouts,
    ),
    Case(
        name="prompt_weight (grpo)",
        function=lambda rates: prompt_weight(grpo_advantages, rates, group_size=4),
        sample=lambda seed: (rewards(seed, 5) / 2,),
        covers=("advantages_by_count",),
        reasons=NO_GRADIENT | {"packed = padded": "one number per prompt: no tokens"},
    ),
]
