r"""Gradients of a model sample by sample, for several losses at once, summed into minibatches.

    tokens --functional_call(theta)--> log pi_theta [T] --losses--> [K] --jacrev--> [K, P]
                                                                      '--vmap over samples [N]

A sample's loss is its share of the batch's: shares are divided by the mean number of tokens, so
that the mean over samples is the trainer's loss of the batch, and the mean gradient its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import functional_call, jacrev, vmap
from transformers import PreTrainedModel

from areal_lab.functional.aggregate import Count
from areal_lab.functional.losses.policy import HasLoss, PolicyLoss, decoupled_ppo
from areal_lab.functional.losses.reinforce import importance_sampling
from areal_lab.training.objective.loss import choose_loss
from areal_lab.training.settings import TrainerSettings
from cosim.schema import CosimConfig
from reproductions.learning.gradients.old_samples import Samples, Weights

NAIVE, DECOUPLED = "naive", "decoupled"
ANCHOR, IMPORTANCE = "decoupled without its weight", "importance sampling"
_AT_ONCE: Final = 64
"""Samples that are mapped together: fewer take longer, more take new memory in every call."""


class Gradients(NamedTuple):
    """Of one set of samples."""

    blocks: Float[Tensor, "B K P"]
    """Mean gradient of the samples of each block, by loss."""
    variance: Float[Tensor, " K"]
    """Trace of the covariance of one sample's gradient."""
    clipped: Float[Tensor, " K"]
    """Share of tokens that the loss's clip leaves without a gradient."""


def losses(config: CosimConfig) -> Mapping[str, PolicyLoss]:
    """The trainer's two losses, the second without its weight, and the unclipped estimate."""

    def chosen(decoupled: bool) -> PolicyLoss:
        actor = config.actor.model_copy(update={"use_decoupled_loss": decoupled})
        changed = config.model_copy(update={"actor": actor})
        settings = TrainerSettings(config=changed, model_path="", weights_root="")
        return choose_loss(settings).function

    def anchor_only(
        logprobs: Tensor,
        proximal_logprobs: Tensor,
        behavior_logprobs: Tensor,  # noqa: ARG001 - part of the protocol
        advantages: Tensor,
        mask: Tensor,
        *,
        token_count: Count | None = None,
    ) -> HasLoss:
        return decoupled_ppo(
            logprobs,
            proximal_logprobs,
            proximal_logprobs,
            advantages,
            mask,
            clip_epsilon=config.actor.eps_clip,
            token_count=token_count,
        )

    return MappingProxyType(
        {
            NAIVE: chosen(False),
            DECOUPLED: chosen(True),
            ANCHOR: anchor_only,
            IMPORTANCE: importance_sampling,
        }
    )


def logprobs(
    model: PreTrainedModel, theta: Weights, tokens: Int[Tensor, "N L"], count: int
) -> Float[Tensor, "N T"]:
    """Log-probs of the last `count` tokens of each row, at temperature 1."""
    length = tokens.shape[1] - 1
    # Given as numbers, so that transformers makes no mask of its own, which cannot be mapped over.
    causal = torch.triu(torch.full((length, length), -torch.inf), 1)[None, None]
    inputs = {
        "input_ids": tokens[:, :-1],
        "attention_mask": causal,
        "position_ids": torch.arange(length)[None],
        "use_cache": False,
    }
    logits = functional_call(model, dict(theta), kwargs=inputs).logits[:, -count:]
    return torch.log_softmax(logits, -1).gather(2, tokens[:, -count:, None])[:, :, 0]


def per_sample_gradients(
    model: PreTrainedModel,
    theta: Weights,
    functions: Sequence[PolicyLoss],
    samples: Samples,
    proximal: Float[Tensor, "N T"],
    *,
    tokens_per_sample: float,
) -> Float[Tensor, "N K P"]:
    """Gradient of each loss of each sample alone, all parameters in one row.

    Args:
        theta: the weights to derive by.
        proximal: log pi_prox of the response's tokens.
        tokens_per_sample: of the whole batch, the mean.
    """
    parts = _mapped(model, theta, functions, samples, proximal, tokens_per_sample=tokens_per_sample)
    return torch.cat(parts, 2)


def _mapped(
    model: PreTrainedModel,
    theta: Weights,
    functions: Sequence[PolicyLoss],
    samples: Samples,
    proximal: Float[Tensor, "N T"],
    *,
    tokens_per_sample: float,
) -> list[Float[Tensor, "N K p"]]:
    """The same, each parameter apart: one large tensor would be new memory in every call."""

    def of_one(theta: dict[str, Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        tokens, *rest = (tensor[None] for tensor in sample)
        own = logprobs(model, theta, tokens, rest[0].shape[1])
        results = [one(own, *rest, token_count=tokens_per_sample) for one in functions]
        return torch.stack([result.loss for result in results])

    tensors = (
        samples.tokens,
        proximal,
        samples.behavior_logprobs,
        samples.advantages[:, None].expand_as(proximal),
        samples.mask,
    )
    each = vmap(jacrev(of_one), in_dims=(None, 0))(dict(theta), tensors)
    return [one.detach().flatten(2) for one in each.values()]


def gradients(
    model: PreTrainedModel,
    theta: Weights,
    functions: Sequence[PolicyLoss],
    samples: Samples,
    proximal: Float[Tensor, "N T"],
    *,
    block: int,
) -> Gradients:
    """Mean gradients of blocks of samples, their spread, and what is clipped.

    Args:
        block: samples in a block, whole groups of them, as in a minibatch.
    """
    count, tokens = len(samples.tokens), float(samples.mask.sum())
    parameters = sum(tensor.numel() for tensor in theta.values())
    blocks = torch.zeros(-(-count // block), len(functions), parameters)
    squares = torch.zeros(len(functions), dtype=torch.double)
    # A sample without an advantage has no gradient, which need not be computed.
    for taught in samples.advantages.nonzero()[:, 0].split(_AT_ONCE):
        own = Samples(*(tensor[taught] for tensor in samples))
        parts = _mapped(
            model, theta, functions, own, proximal[taught], tokens_per_sample=tokens / count
        )
        start = 0
        for part in parts:
            end = start + part.shape[2]
            blocks[:, :, start:end].index_add_(0, taught // block, part, alpha=1 / block)
            squares += torch.linalg.vector_norm(part, dim=(0, 2)).square()
            start = end
    mean = blocks.mean(0, dtype=torch.double)
    # The squares differ by orders of magnitude: nothing cancels.
    variance = (squares - count * mean.square().sum(1)) / (count - 1)
    return Gradients(blocks, variance, _clipped(model, theta, functions, samples, proximal))


def _clipped(
    model: PreTrainedModel,
    theta: Weights,
    functions: Sequence[PolicyLoss],
    samples: Samples,
    proximal: Float[Tensor, "N T"],
) -> Float[Tensor, " K"]:
    """Share of the tokens with an advantage."""
    taught = samples.mask & (samples.advantages != 0)[:, None]
    advantages = samples.advantages[:, None].expand_as(proximal)
    with torch.no_grad():
        own = logprobs(model, theta, samples.tokens, proximal.shape[1])
    shares = []
    for one in functions:
        result: Any = one(own, proximal, samples.behavior_logprobs, advantages, taught)
        shares.append((result.clipped & taught).sum() / taught.sum())
    return torch.stack(shares)
