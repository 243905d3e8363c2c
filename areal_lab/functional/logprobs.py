r"""Log-probs of the sampled tokens and entropy, from hidden states or from logits.

`T` tokens, `H` hidden size, `V` vocabulary. From hidden states, `[T, V]` logits never exist: chunks
of tokens are multiplied out, reduced and forgotten, and the backward pass makes them again.

    hidden [c, H] @ weight.T --> logits [c, V] --> logprobs, entropy, log-normaliser [c]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer, check_same_shape
from areal_lab.functional.chunked_logprobs import ChunkedLogprobs, wide

_CHUNK_ENTRIES = 1 << 24
"""Logits in one chunk by default: 64 MiB in float32."""


class LogprobsAndEntropy(NamedTuple):
    """Of each token; float32 or wider."""

    logprobs: Tensor
    """log pi of the target token, in nats."""
    entropy: Tensor
    """Entropy of the whole distribution, in nats."""


def logprobs_and_entropy(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " T"],
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> LogprobsAndEntropy:
    r"""Log-prob of the target and entropy at each token, without holding all logits.

    $$ \log \pi(y_t) = \mathrm{log\_softmax}(W h_t / \tau)_{y_t}, \quad
    H_t = -\sum_v \pi_v \log \pi_v $$

    Memory above the inputs is one chunk of logits, and in the backward pass the two gradients.
    Gradients go to `hidden` and `weight`, of any order, also under `torch.func`. Products are
    computed in the inputs' type, the softmax in float32 at least.

    Args:
        hidden: last hidden states, at the positions *before* the targets.
        weight: output embedding (language-model head); a head's bias is not supported.
        targets: the sampled tokens, `0 .. V - 1`.
        temperature: tau that tokens were sampled with.
        chunk_tokens: tokens whose logits exist at a time; None takes 2^24 logits (64 MiB).

    Raises:
        ValueError: shapes or types do not fit, temperature or chunk_tokens is not positive.
    """
    _check_inputs(hidden, weight, targets)
    _check_temperature(temperature)
    if chunk_tokens is None:
        chunk_tokens = max(16, _CHUNK_ENTRIES // max(1, weight.shape[0]))
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, but must be at least 1")
    logprobs, entropy, _ = ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets.long(), temperature, chunk_tokens
    )
    return LogprobsAndEntropy(logprobs, entropy)


def logprobs_and_entropy_from_logits(
    logits: Float[Tensor, "*shape V"],
    targets: Int[Tensor, "*shape"],
    *,
    temperature: float = 1.0,
) -> LogprobsAndEntropy:
    r"""Log-prob of the target and entropy, from logits that exist already.

    Logits of -infinity (a token that cannot be drawn) add nothing to the entropy.

    Args:
        logits: unnormalised log-probabilities.
        targets: the sampled tokens, `0 .. V - 1`.
        temperature: tau that tokens were sampled with.

    Raises:
        ValueError: shapes or types do not fit, or temperature is not positive.
    """
    check_integer("targets", targets)
    check_same_shape("targets", targets, "logits[..., 0]", logits[..., 0])
    _check_temperature(temperature)
    log_p = torch.log_softmax(wide(logits) / temperature, dim=-1)
    possible = torch.isfinite(log_p)
    finite = torch.where(possible, log_p, torch.zeros_like(log_p))
    p = torch.where(possible, torch.exp(finite), torch.zeros_like(log_p))
    chosen = log_p.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return LogprobsAndEntropy(chosen, -(p * finite).sum(-1))


def _check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature is {temperature}, but must be positive and finite; for the log-probs of "
            "greedy decoding use 1.0"
        )


def _check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    check_integer("targets", targets)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, but must be "
            "[T, H] and [V, H]; flatten a batch with hidden.flatten(0, 1), and pass the weight of "
            "the language-model head as it is"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, but hidden {tuple(hidden.shape)} asks for "
            f"{tuple(hidden.shape[:1])}: one target per hidden state"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden has dtype {hidden.dtype} and weight {weight.dtype}, but they must be equal; "
            "pass weight.to(hidden.dtype), which keeps the gradient"
        )
