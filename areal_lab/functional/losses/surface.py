r"""Policy loss as a surface: its effect on one token for any position of the three policies.

    behavior ---weight w---> proximal ---ratio r---> theta
                                                       |  gradient on log pi_theta,
    advantage A ---------------------------------------'  the only way a loss can move

Any `PolicyLoss` and any custom one; a loss is called, never taken apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad_and_value, vmap

from areal_lab.functional.checks import check_finite, check_floating
from areal_lab.functional.losses.policy import HasLoss, keywords_of_batch, loss_of


class LossSurface(NamedTuple):
    """A loss at each point of the grid, `[ratios, weights, advantages]`; detached."""

    value: Float[Tensor, "R W A"]
    """The loss of the point's response."""
    gradient: Float[Tensor, "R W A"]
    """Derivative by the token's log pi_theta, times the tokens of the response.

    Descent moves log pi_theta, and with it log r, along the negative gradient."""


def loss_surface(
    loss: Callable[..., HasLoss],
    *,
    ratios: Float[Tensor, " R"],
    weights: Float[Tensor, " W"],
    advantages: Float[Tensor, " A"],
    response_tokens: int = 1,
    rest_ratio: float = 1.0,
    rest_weight: float = 1.0,
    proximal_probability: float = 0.1,
) -> LossSurface:
    r"""Value and gradient of a policy loss over a grid of ratio, weight and advantage.

    Each point of the grid is a separate batch: one response whose first token is the one that
    is studied, so that no point changes another.

    $$ r = \pi_\theta / \pi_{prox}, \quad w = \pi_{prox} / \pi_{behav}, \quad
    \mathrm{gradient} = T\, \frac{\partial L(r, w, A)}{\partial \log \pi_\theta(y_1)} $$

    - One token is the whole response by default. Losses of a whole response (GSPO,
      GMPO, TOPR, `sequence_product`) then are those of a token: give `response_tokens` and the
      ratio of the others, `rest_ratio`, to see what couples them.
    - What is taken over a batch is taken over this response: `self_normalize` gives a single token
      weight 1 everywhere, the covariances of `clip_cov` and `kl_cov` are 0, `m2po` keeps its only
      token, and `sat` is PPO at the behavior policy. Versions are all the trainer's, lag 0; bind
      others to a loss that wants them.
    - Losses that ignore $\pi_{prox}$ (`importance_sampling`, AIPO, DPPO) depend on the product
      $r w$ alone.

    A function that `torch.func.vmap` cannot map (it calls `.item()`, branches on values or indexes
    by a mask) is called once per point: about 1 ms each, where all points take 3 ms together.

    Args:
        loss: a `PolicyLoss`, such as `partial(decoupled_ppo, clip_epsilon=0.1)`. It gets the
            keywords it asks for, as from a trainer.
        ratios: r of the token.
        weights: w of the token.
        advantages: A, the same for all tokens of the response.
        response_tokens: T, tokens of the response, including the one that is studied.
        rest_ratio: r of each other token.
        rest_weight: w of each other token.
        proximal_probability: $\pi_{prox}$ of every token; only losses that use probabilities
            themselves (DPPO), and the value of $A \log \pi$, depend on it.

    Source: definition; PPO (arXiv:1707.06347), figure 1, draws the value for w = 1.

    Raises:
        ValueError: a ratio or weight is not positive and finite, an advantage is not finite,
            `response_tokens` is below 1, or a policy would have a probability above 1.
        TypeError: the loss is not a function of the five tensors, or returns no `loss`.
    """
    _check_grid(ratios=ratios, weights=weights, advantages=advantages)
    ratios, weights, advantages = ratios.detach(), weights.detach(), advantages.detach()
    for name, value in (("rest_ratio", rest_ratio), ("rest_weight", rest_weight)):
        if not 0 < value < float("inf"):
            raise ValueError(
                f"{name} is {value}, but must be positive and finite: 1.0 is on policy"
            )
    if response_tokens < 1:
        raise ValueError(f"response_tokens is {response_tokens}, but must be at least 1")
    rest = response_tokens - 1
    most = max(float(ratios.max()), rest_ratio if rest else 0.0)
    least = min(float(weights.min()), rest_weight if rest else float("inf"))
    limit = min(1.0, 1 / most, least)
    if not 0 < proximal_probability <= limit * (1 + 1e-9):
        raise ValueError(
            f"proximal_probability is {proximal_probability}, but must be in (0, {limit:.3g}]: "
            f"with ratios up to {most:.3g} and weights down to {least:.3g} the probability of "
            "another policy would be above 1"
        )

    log_proximal = ratios.new_tensor(proximal_probability).log()
    log_ratio = ratios.new_tensor([rest_ratio]).log().expand(rest)
    log_weight = ratios.new_tensor([rest_weight]).log().expand(rest)
    mask = torch.ones(response_tokens, dtype=torch.bool, device=ratios.device)
    keywords = keywords_of_batch(loss, torch.zeros_like(mask, dtype=torch.long), mask)
    call = partial(loss, **keywords) if keywords else loss

    def of_token(logprob: Tensor, weight: Tensor, advantage: Tensor) -> Tensor:
        proximal = log_proximal.expand(response_tokens)
        logprobs = torch.cat([logprob[None], log_proximal + log_ratio])
        behavior = log_proximal - torch.cat([weight.log()[None], log_weight])
        tokens = (logprobs, proximal, behavior, advantage.expand(response_tokens), mask)
        return loss_of(call, *tokens).loss

    grid = torch.meshgrid(log_proximal + ratios.log(), weights, advantages, indexing="ij")
    points = [axis.reshape(-1) for axis in grid]
    derivative = grad_and_value(of_token)
    try:
        results = vmap(derivative, randomness="different")(*points)
    except RuntimeError:
        # The loop raises what is the loss's own error; what only vmap refuses it computes.
        each = [derivative(*point) for point in zip(*points, strict=True)]
        gradients, values = zip(*each, strict=True)
        results = torch.stack(gradients), torch.stack(values)
    gradient, value = (result.detach().reshape(grid[0].shape) for result in results)
    return LossSurface(value=value, gradient=response_tokens * gradient)


def ratio_path(
    loss: Callable[..., HasLoss],
    *,
    ratio: float,
    weight: float,
    advantage: float,
    step_size: float,
    steps: int,
    proximal_probability: float = 1e-3,
) -> Float[Tensor, " steps"]:
    r"""Ratio of one token under gradient descent on its own log-prob, the other policies fixed.

    $$ \log r_{k+1} = \log r_k - \alpha\, \partial L / \partial \log \pi_\theta $$

    The first entry is the initial ratio, so the result has `steps + 1` entries. A token of a model
    moves with all the others, too; this is the least that can happen to it.

    Args:
        loss: a `PolicyLoss`.
        ratio: $\pi_\theta / \pi_{prox}$ at the start.
        weight: $\pi_{prox} / \pi_{behav}$.
        advantage: A.
        step_size: alpha, in log-prob per unit of gradient.
        steps: number of steps.
        proximal_probability: as in `loss_surface`; small, to leave room for large ratios.

    Source: definition.

    Raises:
        ValueError: as `loss_surface`, where the path leads to too, or a step size that is not
            positive and finite, or a negative number of steps.
    """
    if not (0 < step_size < float("inf") and steps >= 0):
        raise ValueError(
            f"step_size is {step_size} and steps {steps}, but must be positive and finite, and "
            "at least 0"
        )
    one = torch.ones(1, dtype=torch.double)
    path = [ratio * one]
    for _ in range(steps):
        gradient = loss_surface(
            loss,
            ratios=path[-1],
            weights=weight * one,
            advantages=advantage * one,
            proximal_probability=proximal_probability,
        ).gradient.flatten()
        path.append(path[-1] * torch.exp(-step_size * gradient))
    return torch.cat(path)


def _check_grid(**axes: Tensor) -> None:
    for name, axis in axes.items():
        check_floating(name, axis)
        if axis.dim() != 1 or axis.numel() == 0:
            raise ValueError(
                f"{name} has shape {tuple(axis.shape)}, but must be a list of numbers, one per "
                "point of its axis; pass torch.linspace or torch.tensor([1.0])"
            )
        check_finite(name, axis)
        if name != "advantages" and not bool((axis > 0).all()):
            raise ValueError(
                f"{name} has an entry {float(axis.min())}, but must be positive: a ratio of "
                "probabilities"
            )
