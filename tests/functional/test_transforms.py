"""Transforms that the table does not have: hessians, and axes that only some inputs have."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.func import grad, hessian, jacrev, vmap

from areal_lab.functional import (
    decoupled_ppo,
    gae,
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
)


def tokens(*shape):
    torch.manual_seed(0)
    logprobs, proximal, behavior, advantages = torch.randn(4, *shape, dtype=torch.double)
    mask = torch.rand(shape) > 0.3
    return 0.3 * logprobs, 0.3 * proximal, 0.3 * behavior, advantages, mask


def test_hessian_of_a_loss():
    batch = tokens(6)
    ours = hessian(lambda lp: decoupled_ppo(lp, *batch[1:]).loss)(batch[0])
    plain = torch.autograd.functional.hessian(
        lambda lp: decoupled_ppo(lp, *batch[1:]).loss, batch[0]
    )
    torch.testing.assert_close(ours, plain)


def test_hessian_of_a_recurrence_is_jacrev_of_jacrev():
    """It has no forward mode, which `torch.func.hessian` would take."""
    rewards, _, _, values, mask = tokens(6)

    def total(values):
        return gae(rewards, values, mask, lambda_=0.5).advantages.pow(3).sum()

    expected = torch.autograd.functional.hessian(total, values)
    torch.testing.assert_close(jacrev(jacrev(total))(values), expected)


def scalar(function):
    return lambda *args: sum(output.square().sum() for output in function(*args))


def plain_logprobs(hidden, weight, targets):
    return logprobs_and_entropy_from_logits(hidden @ weight.T, targets, temperature=0.7)


chunked_logprobs = partial(logprobs_and_entropy, temperature=0.7, chunk_tokens=3)


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f: vmap(f, in_dims=(0, None, 0)), id="vmap over hidden"),
        pytest.param(lambda f: vmap(f, in_dims=(0, 0, None)), id="vmap over weights"),
        pytest.param(
            lambda f: vmap(grad(scalar(f), argnums=(0, 1)), in_dims=(0, None, 0)), id="per sample"
        ),
        pytest.param(
            lambda f: vmap(jacrev(f, argnums=(0, 1)), in_dims=(0, None, 0)), id="jacobian"
        ),
        pytest.param(lambda f: vmap(jacrev(grad(scalar(f))), in_dims=(0, None, 0)), id="hessian"),
    ],
)
def test_logprobs_under_transforms(transform, request):
    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 3, dtype=torch.double)
    several = request.node.callspec.id == "vmap over weights"
    weight = torch.randn(*((2,) if several else ()), 7, 3, dtype=torch.double)
    targets = torch.randint(7, (5,) if several else (2, 5))
    ours = transform(chunked_logprobs)(hidden, weight, targets)
    plain = transform(plain_logprobs)(hidden, weight, targets)
    torch.testing.assert_close(ours, plain)
