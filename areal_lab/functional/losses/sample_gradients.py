r"""Policy that drifts through versions, its samples of every lag, and their gradients.

    version 0 -> 1 -> ... -> V - 1      a stationary walk of the logits, [state, action]
       |         |           |
    samples    samples     samples      all scored against the last version: lag V - 1 ... 0
                                                        |
                        per_sample_gradients(loss) [N P] --gradient_spread_by_lag--> by lag

The smallest policy on which a loss can be studied sample by sample: it has a row of logits for
each state and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import grad, vmap

from areal_lab.functional.losses.policy import HasLoss, keywords_of_batch, loss_of
from areal_lab.functional.losses.reinforce import importance_sampling

_AT_ONCE: Final = 4_000
"""Samples that are mapped together: fewer take longer, more take 0.1 GB and are not faster."""


class DriftingPolicy(NamedTuple):
    """The last version of a policy, and samples of this and the versions before it."""

    logits: Float[Tensor, "S A"]
    """Trained logits of the last version, by state and action."""
    log_policies: Float[Tensor, "V S A"]
    """Log-probs of every action, by version; the last is that of `logits`."""
    states: Int[Tensor, "N T"]
    actions: Int[Tensor, "N T"]
    behavior_logprobs: Float[Tensor, "N T"]
    """Log-probs of the chosen actions under the version that chose them."""
    advantages: Float[Tensor, "N T"]
    """Share of right actions of the sample, minus the mean over samples; one action of each state
    is right."""
    mask: Bool[Tensor, "N T"]
    lag: Int[Tensor, " N"]
    """Versions between the last one and that of the sample."""

    def logprobs(self, logits: Float[Tensor, "S A"]) -> Float[Tensor, "N T"]:
        """Log-probs of the chosen actions under other logits."""
        return torch.log_softmax(logits, -1)[self.states, self.actions]


def drifting_policy(
    *,
    generator: torch.Generator | None = None,
    samples: int = 20_000,
    tokens: int = 16,
    states: int = 64,
    actions: int = 6,
    versions: int = 5,
    kept: float = 0.8,
) -> DriftingPolicy:
    r"""Let a random policy drift for some versions, and sample from each of them.

    $$ z_{v+1} = \rho\, z_v + \sqrt{1 - \rho^2}\, \epsilon, \quad \epsilon \sim N(0, 1) $$

    so that the spread of the logits, and with it the entropy, stays what it is.

    Args:
        generator: draws everything; None takes a new one with seed 0.
        samples: N, spread evenly over the versions.
        tokens: T, tokens of a sample, each in a separate state.
        states: S.
        actions: A.
        versions: V; lags go from 0 to V - 1.
        kept: rho, how much of the logits a version keeps of the one before.

    Source: definition.

    Raises:
        ValueError: if a count is below 1, or `kept` is not in [0, 1].
    """
    counts = {
        "samples": samples,
        "tokens": tokens,
        "states": states,
        "actions": actions,
        "versions": versions,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}, but must be at least 1")
    if not 0 <= kept <= 1:
        raise ValueError(f"kept is {kept}, but must be in [0, 1]: the share that a version keeps")
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    walk = [torch.randn(states, actions, generator=generator)]
    for _ in range(versions - 1):
        noise = torch.randn(states, actions, generator=generator)
        walk.append(kept * walk[-1] + math.sqrt(1 - kept**2) * noise)
    log_policies = torch.log_softmax(torch.stack(walk), -1)
    version = torch.arange(samples) % versions
    visited = torch.randint(states, (samples, tokens), generator=generator)
    # By the inverse of the distribution function, a tenth of the time of `torch.multinomial`.
    below = log_policies.exp().cumsum(-1)[..., :-1]
    uniform = torch.rand(samples, tokens, 1, generator=generator)
    chosen = (uniform >= below[version[:, None], visited]).sum(-1)
    rewards = (chosen == visited % actions).float().mean(1)
    return DriftingPolicy(
        logits=walk[-1],
        log_policies=log_policies,
        states=visited,
        actions=chosen,
        behavior_logprobs=log_policies[version[:, None], visited, chosen],
        advantages=(rewards - rewards.mean())[:, None].expand(samples, tokens),
        mask=torch.ones(samples, tokens, dtype=torch.bool),
        lag=versions - 1 - version,
    )


def per_sample_gradients(
    loss: Callable[..., HasLoss], policy: DriftingPolicy
) -> Float[Tensor, "N P"]:
    r"""Gradient of the loss of each sample alone, by all logits of the policy.

    The proximal policy is the current one, as in the first minibatch of a step. A loss that
    `torch.func.vmap` cannot map is called once per sample, which takes about 1 ms each.

    Args:
        loss: a `PolicyLoss`, custom ones included; it gets the keywords it asks for.
        policy: from `drifting_policy`.

    Source: `torch.func.vmap(torch.func.grad(...))`, as in torch's tutorial "Per-sample-gradients".

    Raises:
        TypeError: the loss is not a function of the five tensors, or returns no `loss`.
    """
    return _of_logits(_of_logprobs(loss, policy), policy)


def _of_logprobs(loss: Callable[..., HasLoss], policy: DriftingPolicy) -> Float[Tensor, "N T"]:
    """Gradient of the loss of each sample alone, by the log-probs of its chosen actions."""
    ids = torch.zeros(policy.states.shape[1], dtype=torch.long)
    keywords = keywords_of_batch(loss, ids, policy.mask[0])
    call = partial(loss, **keywords) if keywords else loss

    def of_one(logprobs: Tensor, rest: tuple[Tensor, ...]) -> Tensor:
        return loss_of(call, logprobs, logprobs.detach(), *rest).loss

    gradient = grad(of_one)
    logprobs = policy.logprobs(policy.logits)
    rest = (policy.behavior_logprobs, policy.advantages, policy.mask)
    each: Tensor
    try:
        each = vmap(gradient, chunk_size=_AT_ONCE)(logprobs, rest)
    except RuntimeError:
        pairs = zip(logprobs, zip(*rest, strict=True), strict=True)
        each = torch.stack([gradient(*one) for one in pairs])
    return each.detach()


def _of_logits(gradients: Float[Tensor, "N T"], policy: DriftingPolicy) -> Float[Tensor, "N P"]:
    r"""Gradients by the logits, from those by the log-probs of the chosen actions.

    $$ \partial \log \pi(a | s) / \partial z_{s a'} = [a = a'] - \pi(a' | s) $$
    """
    (samples, _), (states, actions) = gradients.shape, policy.logits.shape
    # The second term by state, so that each probability is multiplied once. One [N, P] is made:
    # pages of memory that are new take longer than the numbers in them.
    of_states = gradients.new_zeros(samples, states).scatter_add_(1, policy.states, gradients)
    found = (of_states[:, :, None] * -policy.logits.softmax(-1)).flatten(1)
    return found.scatter_add_(1, policy.states * actions + policy.actions, gradients)


def unbiased_gradient(policy: DriftingPolicy) -> Float[Tensor, " P"]:
    """Mean gradient of all samples, each token weighted by its ratio to the policy that chose it.

    Source: importance sampling, PPO (arXiv:1707.06347), eq. 6.
    """
    each = _of_logprobs(importance_sampling, policy).flatten()[None]
    # The gradient by the logits is linear: that of one sample with the tokens of all.
    tokens = {"states": policy.states.flatten()[None], "actions": policy.actions.flatten()[None]}
    return _of_logits(each, policy._replace(**tokens))[0] / len(policy.lag)
