r"""Common wrong versions of losses, to compare with the right ones.

    retold                  as                                    the real one
    both_sides_clipped      $-\mathrm{clip}(r) A$                 ppo, cispo
    pulled_back             a clipped token returns to the edge   ppo
    attached_weight         $\pi_{prox} / \pi_{behav}$ is trained decoupled_ppo
    clipped_product         one product of ratios is clipped      decoupled_ppo

Each is a `PolicyLoss`. None is in the index: no run should take one by its name. The page
docs/retellings.md has what is right, its source and the tests.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from areal_lab.functional.aggregate import Count, token_mean
from areal_lab.functional.losses.policy import PlainLoss, PolicyLoss, anchored_at_behavior, ppo
from areal_lab.functional.masked import select


def both_sides_clipped(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: float = 0.2,
    token_count: Count | None = None,
) -> PlainLoss:
    r"""PPO without its minimum, or CISPO without its stop-gradient: $-\rho\,\mathrm{clip}(r) A$.

    No token outside of the range has a gradient, on either side, whatever the sign of A. As CISPO
    it was in a public framework (allenai/open-instruct, pull request 1264) until 1269 changed it.

    Source: a retelling; PPO (arXiv:1707.06347), eq. 7, has a minimum, CISPO (arXiv:2506.13585),
    eq. 4, a stop-gradient.
    """
    drift = select(logprobs - proximal_logprobs.detach(), mask)
    weight = torch.exp(select(proximal_logprobs - behavior_logprobs, mask)).detach()
    clipped = drift.exp().clamp(1 - clip_epsilon, 1 + clip_epsilon)
    value = weight * clipped * advantages.detach()
    return PlainLoss(-token_mean(value, mask, token_count=token_count))


def pulled_back(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: float = 0.2,
    token_count: Count | None = None,
) -> PlainLoss:
    r"""PPO that also pulls a clipped token back to the edge of the range.

    $$ L = L_{PPO} + \frac{1}{N} \sum_t \rho_t\, d_t^2, \quad
    d = \log r - \log \mathrm{clip}(r, 1 \pm \epsilon) $$

    Source: a retelling; the rollback of Truly PPO (arXiv:1903.07940) was proposed because PPO
    has none.
    """
    drift = select(logprobs - proximal_logprobs.detach(), mask)
    weight = torch.exp(select(proximal_logprobs - behavior_logprobs, mask)).detach()
    ratio = drift.exp()
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    beyond = drift - clipped.log().detach()
    given = select(advantages.detach(), mask)
    value = torch.minimum(ratio * given, clipped * given) - beyond.square()
    return PlainLoss(-token_mean(weight * value, mask, token_count=token_count))


def attached_weight(
    logprobs: Float[Tensor, "*shape"],
    proximal_logprobs: Float[Tensor, "*shape"],
    behavior_logprobs: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    clip_epsilon: float = 0.2,
    token_count: Count | None = None,
) -> PlainLoss:
    r"""Decoupled PPO whose weight $\pi_{prox} / \pi_{behav}$ gets a gradient.

    Where the proximal log-probs are those of the policy that is trained, as in the first minibatch
    of a step, the push on a token doubles. A public framework had such a gradient until
    verl-project/verl, pull request 4105.

    Source: a retelling; in AReaL (arXiv:2505.24298), eq. 5, the weight is a number.
    """
    drift = select(logprobs - proximal_logprobs.detach(), mask)
    weight = torch.exp(select(proximal_logprobs - behavior_logprobs, mask))
    ratio = drift.exp()
    clipped = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    given = select(advantages.detach(), mask)
    value = weight * torch.minimum(ratio * given, clipped * given)
    return PlainLoss(-token_mean(value, mask, token_count=token_count))


def clipped_product(*, clip_epsilon: float = 0.2) -> PolicyLoss:
    r"""Decoupled PPO as one product of ratios that is clipped as a whole.

    $$ \min(r w A, \mathrm{clip}(r w, 1 \pm \epsilon) A), \quad
    r w = \frac{\pi_\theta}{\pi_{prox}} \frac{\pi_{prox}}{\pi_{behav}}
    = \frac{\pi_\theta}{\pi_{behav}} $$

    The proximal policy cancels: this is standard PPO around the behavior policy.

    Source: a retelling; AReaL (arXiv:2505.24298), eq. 5, clips the first ratio only.
    """
    return anchored_at_behavior(partial(ppo, clip_epsilon=clip_epsilon))
