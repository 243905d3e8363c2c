"""Rows of the table: surrogates, of a policy whose ratio and log-probs are inputs of their own.

A stop-gradient makes the derivative of a value another one than its gradient. Given log r and
log pi apart, those surrogates are ordinary functions of log pi, and finite differences hold.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from areal_lab.functional.ratios import AnchoredPolicy, sequence_token_ratio, token_ratio
from areal_lab.functional.segments import sequences_or_rows
from areal_lab.functional.surrogates.clip import (
    clip_surrogate,
    dual_clip_surrogate,
    sat_surrogate,
)
from areal_lab.functional.surrogates.covariance import (
    advantage_covariance,
    clip_cov_surrogate,
    kl_cov_surrogate,
)
from areal_lab.functional.surrogates.divergence import (
    dppo_kl_surrogate,
    dppo_tv_surrogate,
    prime_rl_ipo_surrogate,
    prime_rl_surrogate,
)
from areal_lab.functional.surrogates.reinforce import (
    aipo_surrogate,
    cispo_surrogate,
    icepop_surrogate,
    importance_surrogate,
    reinforce_surrogate,
    topr_surrogate,
    truncated_reinforce_surrogate,
    weighted_logprobs,
)
from areal_lab.functional.surrogates.smooth import (
    gmpo_surrogate,
    sapo_surrogate,
    vespo_surrogate,
)
from areal_lab.functional.surrogates.squared import (
    dro_surrogate,
    kimi_sequence_surrogate,
    kimi_surrogate,
    ratio_variance_surrogate,
)
from tests.functional.case import NO_GRADIENT, Case, Ragged

RATIO, LOGPROBS, BOTH = (0,), (1,), (0, 1)


def tokens(seed: int) -> tuple[Tensor, ...]:
    """log r, log pi, log pi of the anchor, A, noise, mask; six tokens."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(6, generator=generator, dtype=torch.double)

    anchor = -normal(1.0).abs() - 0.5
    log_ratio = normal(0.4).clamp(max=0.45)
    noise = torch.rand(6, generator=generator, dtype=torch.double)
    mask = torch.tensor([True, True, False, True, True, True])
    return log_ratio, anchor + log_ratio, anchor, normal(1.0), noise, mask


def of(surrogate, *, noisy: bool = False):
    def function(*inputs: Tensor):
        log_ratio, logprobs, anchor, advantages, noise, mask = inputs
        seen = [torch.where(mask, x, 0.0) for x in (log_ratio, logprobs, anchor.detach())]
        policy = AnchoredPolicy(*seen, mask, sequences_or_rows(mask))
        numbers = {"noise": noise} if noisy else {}
        result = surrogate(policy, advantages, **numbers)
        return result if isinstance(result, Tensor) else tuple(result)

    return function


def both_layouts(surrogate, *, noisy: bool = False, ratio=token_ratio):
    def layouts(batch: Ragged):
        logprobs, anchor, advantages, noise = (batch.draw(seed, scale=0.4) for seed in range(4))

        def result(pack, sequences):
            numbers = {"noise": pack(noise)} if noisy else {}
            policy = ratio(pack(logprobs - 2), pack(anchor - 2), pack(batch.mask), sequences)
            return surrogate(policy, pack(advantages), **numbers)

        padded, packed = result(lambda x: x, batch.rows), result(batch.pack, batch.sequences)
        if isinstance(padded, Tensor):
            return batch.pack(padded), packed
        return [batch.pack(x) for x in padded], list(packed)

    return layouts


def tempered(policy, advantages):
    return weighted_logprobs(policy, advantages, torch.exp(policy.log_ratio / 2))


def case(name, surrogate, differentiable, *, noisy=False, ratio=token_ratio, reasons=None):
    return Case(
        name=name,
        function=of(surrogate, noisy=noisy),
        sample=tokens,
        differentiable=differentiable,
        layouts=both_layouts(surrogate, noisy=noisy, ratio=ratio),
        reasons=reasons or {},
    )


CASES = [
    case("clip_surrogate", clip_surrogate, RATIO),
    case(
        "clip_surrogate (of sequence_token_ratio)",
        partial(clip_surrogate, clip_epsilon=0.05),
        RATIO,
        ratio=sequence_token_ratio,
    ),
    case("dual_clip_surrogate", partial(dual_clip_surrogate, dual_clip=1.3), RATIO),
    case(
        "sat_surrogate",
        partial(sat_surrogate, quantile=0.5),
        RATIO,
        reasons=dict.fromkeys(
            ("grad", "double backward"), "the bound is a function of log r without a gradient"
        ),
    ),
    case("reinforce_surrogate", reinforce_surrogate, LOGPROBS),
    case("importance_surrogate", importance_surrogate, RATIO),
    case("cispo_surrogate", partial(cispo_surrogate, clip_epsilon=0.2), LOGPROBS),
    case("aipo_surrogate", partial(aipo_surrogate, cap=1.2), LOGPROBS),
    case("truncated_reinforce_surrogate", truncated_reinforce_surrogate, LOGPROBS),
    case("icepop_surrogate", partial(icepop_surrogate, clip_epsilon=0.3), LOGPROBS),
    case("topr_surrogate", topr_surrogate, LOGPROBS),
    case("weighted_logprobs", tempered, LOGPROBS),
    case("sapo_surrogate", sapo_surrogate, RATIO),
    case("gmpo_surrogate", partial(gmpo_surrogate, log_clip_epsilon=0.2), RATIO),
    case("vespo_surrogate", vespo_surrogate, LOGPROBS),
    case("dppo_tv_surrogate", partial(dppo_tv_surrogate, divergence=0.05), RATIO),
    case("dppo_kl_surrogate", partial(dppo_kl_surrogate, divergence=0.01), RATIO),
    case("prime_rl_surrogate", partial(prime_rl_surrogate, penalty=0.1), RATIO),
    case("prime_rl_ipo_surrogate", partial(prime_rl_ipo_surrogate, penalty=0.1), RATIO),
    case("kimi_surrogate", kimi_surrogate, BOTH),
    case("kimi_sequence_surrogate", kimi_sequence_surrogate, BOTH),
    case("dro_surrogate", partial(dro_surrogate, beta=0.3), BOTH),
    case("ratio_variance_surrogate", partial(ratio_variance_surrogate, penalty=0.7), RATIO),
    case(
        "clip_cov_surrogate",
        partial(clip_cov_surrogate, fraction=0.5, band=(0.0, 5.0)),
        RATIO,
        noisy=True,
    ),
    case("kl_cov_surrogate", partial(kl_cov_surrogate, fraction=0.5), RATIO),
    case("advantage_covariance", advantage_covariance, (), reasons=NO_GRADIENT),
]
