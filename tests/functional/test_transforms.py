"""torch.func and torch.compile go through everything: one sample's formula is a batch's formula."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.func import grad, hessian, jacrev, vmap

from areal_lab.functional import (
    Segments,
    decoupled_ppo,
    effective_sample_size,
    effective_sample_size_by_lag,
    group_advantages,
    lag_histogram,
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
    mask_above,
    masked_quantiles,
    mean_of_others,
    no_scale,
    ppo,
    segment_reduce,
    sequence_mean,
    std_of_batch,
    token_lag,
    trajectory_lag,
    truncate,
)


def tokens(*shape):
    torch.manual_seed(0)
    logprobs, proximal, behavior, advantages = torch.randn(4, *shape, dtype=torch.double)
    mask = torch.rand(shape) > 0.3
    return 0.3 * logprobs, 0.3 * proximal, 0.3 * behavior, advantages, mask


LOSSES = {
    "ppo": lambda lp, prox, _, adv, mask: ppo(lp, prox, adv, mask, clip_epsilon=(0.2, 0.28)),
    "decoupled": decoupled_ppo,
    "truncated": partial(decoupled_ppo, correct=truncate(1.1)),
    "masked": partial(decoupled_ppo, correct=mask_above(1.1), token_count=20),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_map_over_samples_with_their_masks(loss):
    batch = tokens(5, 7)
    mapped = vmap(loss)(*batch)
    for i in range(5):
        one = loss(*(field[i] for field in batch))
        for ours, expected in zip(mapped, one, strict=True):
            torch.testing.assert_close(ours[i], expected)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_per_sample_gradients_of_losses(loss):
    batch = tokens(5, 7)
    mapped = vmap(grad(lambda *row: loss(*row).loss))(*batch)
    jacobian = jacrev(lambda lp: vmap(loss)(lp, *batch[1:]).loss)(batch[0])
    for i in range(5):
        leaf = batch[0][i].clone().requires_grad_()
        loss(leaf, *(field[i] for field in batch[1:])).loss.backward()
        torch.testing.assert_close(mapped[i], leaf.grad)
        torch.testing.assert_close(jacobian[i, i], leaf.grad)


def test_hessian_of_a_loss():
    batch = tokens(6)
    ours = hessian(lambda lp: decoupled_ppo(lp, *batch[1:]).loss)(batch[0])
    plain = torch.autograd.functional.hessian(
        lambda lp: decoupled_ppo(lp, *batch[1:]).loss, batch[0]
    )
    torch.testing.assert_close(ours, plain)


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


IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2])
VERSIONS = torch.tensor([0, 1, 1, 2, 3, -1, 0])

STATISTICS = {
    "sum": lambda x, m: segment_reduce(x, IDS, 3, mask=m),
    "mean": lambda x, m: segment_reduce(x, IDS, 3, mask=m, reduce="mean"),
    "max": lambda x, m: segment_reduce(x, IDS, 3, mask=m, reduce="max"),
    "sequence mean": lambda x, m: sequence_mean(x, m, Segments(IDS, 3)),
    "quantiles": lambda x, m: masked_quantiles(x, m, torch.tensor([0.1, 0.9])),
    "effective sample size": lambda x, m: effective_sample_size(x.exp(), m),
    "by lag": lambda x, m: effective_sample_size_by_lag(x.exp(), VERSIONS + 1, m, bins=3),
    "lag": lambda _, m: lag_histogram(token_lag(VERSIONS, m, 3), m, bins=3),
    "trajectories": lambda _, m: trajectory_lag(token_lag(VERSIONS, m, 3), m, IDS, 3),
    "grpo": lambda x, m: group_advantages(x, IDS + m.long()),
    "rloo": lambda x, _: group_advantages(x, IDS, baseline=mean_of_others, scale=no_scale),
    "lite": lambda x, _: group_advantages(x, IDS, scale=std_of_batch),
}


@pytest.mark.parametrize("function", STATISTICS.values(), ids=STATISTICS)
def test_statistics_map_over_values_and_masks(function):
    torch.manual_seed(0)
    values, mask = torch.randn(4, 7), torch.rand(4, 7) > 0.3
    ours = vmap(function)(values, mask)
    rows = [function(values[i], mask[i]) for i in range(4)]
    if isinstance(ours, tuple):
        ours, rows = tuple(ours), [tuple(row) for row in rows]
        torch.testing.assert_close(ours, tuple(map(torch.stack, zip(*rows, strict=True))))
    else:
        torch.testing.assert_close(ours, torch.stack(rows))


COMPILED = """
import torch
from areal_lab.functional import *

torch.manual_seed(0)
mask = torch.rand(3, 7) > 0.3
ids = padded_sequence_ids(mask)
targets = torch.randint(11, (7,))
versions = torch.randint(5, (3, 7))

def everything(logprobs, proximal, behavior, advantages, hidden, weight):
    lag = token_lag(versions, mask, 5)
    rewards = advantages.sum(1)
    return (
        *decoupled_ppo(
            logprobs, proximal, behavior, advantages, mask, correct=truncate(1.1), token_count=9
        ),
        *ppo(logprobs, proximal, advantages, mask, clip_epsilon=(0.2, 0.28)),
        sequence_mean(logprobs, mask, Segments(ids, 3)),
        group_advantages(rewards, torch.tensor([5, 2, 5])),
        group_advantages(rewards, ids[:, 0], baseline=mean_of_others, scale=std_of_batch),
        effective_sample_size_by_lag(proximal.exp(), lag, mask, bins=3),
        lag_histogram(lag, mask, bins=3),
        *trajectory_lag(lag, mask, ids, 3),
        masked_quantiles(behavior, mask, torch.tensor([0.1, 0.9])),
        *logprobs_and_entropy(hidden, weight, targets, temperature=0.7, chunk_tokens=3),
        *logprobs_and_entropy_from_logits(hidden @ weight.T, targets, temperature=0.7),
    )

def gradients(function):
    inputs = [x.clone().requires_grad_() for x in start]
    outputs = function(*inputs)
    sum(x.square().sum() for x in outputs if x.requires_grad).backward()
    return outputs, [x.grad for x in inputs]

start = (*(torch.randn(4, 3, 7) * 0.3), torch.randn(7, 4), torch.randn(11, 4))
compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(gradients(compiled), gradients(everything))
print("one graph")
"""


def test_everything_compiles_to_one_graph():
    """In a fresh interpreter, without the shape checks that tests switch on."""
    process = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False
    )
    assert process.stdout == "one graph\n", process.stderr
