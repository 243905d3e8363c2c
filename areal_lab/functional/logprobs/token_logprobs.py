r"""Log-probs of the sampled tokens and entropy, from hidden states or from logits.

`T` tokens, `H` hidden size, `V` vocabulary. From hidden states, `[T, V]` logits never exist: tiles
of them are computed, reduced and discarded. The backward pass computes them again, except those
that fit into `cache_bytes`.

    hidden [t, H] @ weight [v, H].T --> logits [t, v] --> logprobs, entropy, log-normalizer [t]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer, check_range, check_same_shape, wide
from areal_lab.functional.logprobs.chunked import ChunkedLogprobs
from areal_lab.functional.logprobs.cutoff import NOT_KEPT, Cutoff, smallest_kept
from areal_lab.functional.logprobs.tiles import VocabularyPart
from areal_lab.logit_tiles import largest_tile, logit_tiles

_PADDING = "give padding any token of the vocabulary, such as 0, and mask it in the loss"


class LogprobsAndEntropy(NamedTuple):
    """Log-prob and entropy of each token; float32 or wider."""

    logprobs: Tensor
    """log pi of the target token, in nats; -infinity for a token that could not be sampled."""
    entropy: Tensor
    """Entropy of the whole distribution, in nats."""


def logprobs_and_entropy(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V H"],
    targets: Int[Tensor, " T"],
    *,
    temperature: float = 1.0,
    keep: Bool[Tensor, "T V"] | Cutoff | None = None,
    chunk_tokens: int | None = None,
    cache_bytes: int | None = None,
    part: VocabularyPart | None = None,
) -> LogprobsAndEntropy:
    r"""Log-prob of the target and entropy at each token, without holding all logits.

    $$ \log \pi(y_t) = \mathrm{log\_softmax}(W h_t / \tau)_{y_t}, \quad
    H_t = -\sum_v \pi_v \log \pi_v $$

    With `keep`, the softmax is over the kept tokens only, as in a truncating sampler; the gradient
    treats the set of kept tokens as a constant. A target that is not kept has the log-prob
    -infinity and no gradient: exclude it from the loss by its mask. Where a mask keeps nothing, the
    entropy is 0.

    Memory above the inputs is one tile of logits and `cache_bytes`, and in the backward pass the
    two gradients. Gradients go to `hidden` and `weight`, of any order, also under `torch.func`.
    Products are computed in the inputs' type, the softmax in float32 at least.

    Args:
        hidden: last hidden states, at the positions *before* the targets.
        weight: output embedding (language-model head); a head's bias is not supported.
        targets: the sampled tokens, `0 .. V - 1`.
        temperature: tau that tokens were sampled with.
        keep: None keeps all tokens. A mask that the sampler recorded, True = kept; or a rule such
            as `top_p(0.95)`, which is applied to these logits.
        chunk_tokens: size of one tile, in tokens whose logits it could hold. None takes tiles of
            2048 logits per token, between 2^22 (16 MiB) and 2^24, on a CPU, and of 2^26 on a GPU.
            With a rule a tile holds all logits of at least one token.
        cache_bytes: logits that are kept for the backward pass, which computes the others again.
            With 0 it computes all of them again; with `T * V` of the inputs' type it is fastest.
            None keeps half as many bytes as the weight has, whose gradient is of that size anyway,
            but at least 96 MiB, and up to 160 MiB together with a small tile. Nothing is kept where
            no gradient is needed, nor under `vmap`.
        part: None if `weight` is whole. Where processes divide it among them, the part that is here
            (vocabulary parallel): results are those of the whole one on each of them, the gradient
            of hidden too, and that of `weight` is of its part. Not together with `keep`, and
            without second derivatives.

    Source: without holding the logits: Wijmans et al., Cut your losses (arXiv:2411.09009).

    Raises:
        ValueError: shapes or types do not fit, a target is not in the vocabulary, temperature or
            chunk_tokens is not positive, cache_bytes is negative, or keep and part are both given.
            On a GPU, under `vmap` and
            when compiled, a wrong target is torch's own error.
    """
    _check_inputs(hidden, weight, targets, part.vocabulary if part else weight.shape[0])
    if part is not None and keep is not None:
        raise ValueError(
            "keep needs the logits of the whole vocabulary, but part says that weight has some of "
            "them; leave keep out, or gather the weight"
        )
    _check_temperature(temperature)
    mask = keep if isinstance(keep, Tensor) else None
    rule = None if isinstance(keep, Tensor) else keep
    if mask is not None:
        _check_mask(mask, (hidden.shape[0], weight.shape[0]))
    _check_chunk(chunk_tokens)
    if cache_bytes is not None and cache_bytes < 0:
        raise ValueError(f"cache_bytes is {cache_bytes}, but must be at least 0 (keeps no logits)")
    vocab = max(1, weight.shape[0])
    number = hidden.element_size()
    tiles = logit_tiles(
        hidden.shape[0],
        weight.numel(),
        number,
        cpu=hidden.device.type == "cpu",
        entries=None if chunk_tokens is None else chunk_tokens * vocab,
    )
    if cache_bytes is None:
        cache_bytes = tiles.cache_bytes
    differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    cached_tokens = cache_bytes // (vocab * number) if differentiated else 0
    # torch leaves `apply` untyped.
    logprobs, entropy, *_ = ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        targets.long(),
        mask,
        rule,
        part,
        temperature,
        tiles.entries,
        min(cached_tokens, hidden.shape[0]),
    )
    return LogprobsAndEntropy(logprobs, entropy)


def logprobs_and_entropy_from_logits(
    logits: Float[Tensor, "*shape V"],
    targets: Int[Tensor, "*shape"],
    *,
    temperature: float = 1.0,
    keep: Bool[Tensor, "*shape V"] | Cutoff | None = None,
) -> LogprobsAndEntropy:
    r"""Log-prob of the target and entropy, from logits that exist already.

    Logits of -infinity are tokens that are not kept (see `logprobs_and_entropy`): they add nothing
    to the entropy, and as targets have the log-prob -infinity without a gradient.

    Args:
        logits: unnormalized log-probabilities.
        targets: the sampled tokens, `0 .. V - 1`.
        temperature: tau that tokens were sampled with.
        keep: None keeps all tokens; a mask, True = kept; or a rule such as `top_p(0.95)`.

    Source: see `logprobs_and_entropy`, whose reference this is.

    Raises:
        ValueError: shapes or types do not fit, a target is not in the vocabulary (see
            `logprobs_and_entropy`), or temperature is not positive.
    """
    check_integer("targets", targets)
    check_same_shape("targets", targets, "logits[..., 0]", logits[..., 0])
    check_range("targets", targets, logits.shape[-1], _PADDING)
    log_p, dropped = _kept_distribution(logits, temperature, keep)
    index = targets.long().unsqueeze(-1)
    impossible = dropped.gather(-1, index).squeeze(-1)
    logprobs = log_p.gather(-1, index).squeeze(-1).masked_fill(impossible, -math.inf)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return LogprobsAndEntropy(logprobs, entropy.masked_fill(dropped.all(-1), 0))


def squared_probs(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V H"],
    *,
    temperature: float = 1.0,
    keep: Bool[Tensor, "T V"] | Cutoff | None = None,
    chunk_tokens: int | None = None,
) -> Float[Tensor, " T"]:
    r"""Sum of the squared probabilities at each token, without holding all logits.

    $$ \sum_v \pi_v^2, \quad \pi = \mathrm{softmax}(W h_t / \tau) $$

    The probability that two samples of the token agree. `optimal_token_baseline` takes it, as a
    constant: the result has no gradient.

    Args:
        hidden: last hidden states, at the positions before the tokens.
        weight: output embedding (language-model head).
        temperature: tau that tokens were sampled with.
        keep: as for `logprobs_and_entropy`.
        chunk_tokens: tokens whose logits exist at a time; None takes 2^24 logits (64 MiB in
            float32) on a CPU and 2^26 elsewhere.

    Source: definition; for the baseline: arXiv:2602.07078.

    Raises:
        ValueError: shapes or types do not fit, or temperature or chunk_tokens is not positive.
    """
    _check_states(hidden, weight)
    _check_chunk(chunk_tokens)
    tokens, vocab = hidden.shape[0], weight.shape[0]
    if isinstance(keep, Tensor):
        _check_mask(keep, (tokens, vocab))
    if chunk_tokens is None:
        entries = largest_tile(cpu=hidden.device.type == "cpu")
        chunk_tokens = max(1, entries // max(1, vocab))
    parts = hidden.detach().split(chunk_tokens)
    kept = keep.split(chunk_tokens) if isinstance(keep, Tensor) else [keep] * len(parts)
    return torch.cat(
        [
            squared_probs_from_logits(part @ weight.detach().T, temperature=temperature, keep=some)
            for part, some in zip(parts, kept, strict=True)
        ]
    )


def squared_probs_from_logits(
    logits: Float[Tensor, "*shape V"],
    *,
    temperature: float = 1.0,
    keep: Bool[Tensor, "*shape V"] | Cutoff | None = None,
) -> Float[Tensor, "*shape"]:
    r"""Sum of the squared probabilities, $\sum_v \pi_v^2$, from logits that exist already.

    Args:
        logits: unnormalized log-probabilities; no gradient, as for `squared_probs`.
        temperature: tau that tokens were sampled with.
        keep: as for `logprobs_and_entropy_from_logits`. Where nothing is kept the sum is 0.

    Source: see `squared_probs`, whose reference this is.

    Raises:
        ValueError: shapes or types do not fit, or temperature is not positive.
    """
    log_p, dropped = _kept_distribution(logits.detach(), temperature, keep)
    return torch.exp(2 * log_p).sum(-1).masked_fill(dropped.all(-1), 0)


def _kept_distribution(
    logits: Tensor, temperature: float, keep: Tensor | Cutoff | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities in float32 at least, and True where a token cannot be sampled."""
    _check_temperature(temperature)
    scaled = wide(logits) / temperature
    dropped = scaled == -math.inf
    if isinstance(keep, Tensor):
        _check_mask(keep, tuple(logits.shape))
        dropped = dropped | ~keep
    elif keep is not None:
        constant = scaled.detach()
        dropped = dropped | (constant < smallest_kept(keep, constant).unsqueeze(-1))
    return torch.log_softmax(scaled.masked_fill(dropped, NOT_KEPT), dim=-1), dropped


def _check_chunk(chunk_tokens: int | None) -> None:
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}, but must be at least 1")


def _check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature is {temperature}, but must be positive and finite; for the log-probs of "
            "greedy decoding use 1.0"
        )


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"keep is a {mask.dtype} tensor of shape {tuple(mask.shape)}, but must be a torch.bool "
            f"tensor of shape {shape}, True = the sampler kept this token, or a rule such as "
            "top_p(0.95)"
        )


def _check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor, vocabulary: int) -> None:
    check_integer("targets", targets)
    _check_states(hidden, weight)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, but hidden {tuple(hidden.shape)} asks for "
            f"{tuple(hidden.shape[:1])}: one target per hidden state"
        )
    check_range("targets", targets, vocabulary, _PADDING)


def _check_states(hidden: Tensor, weight: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}, but must be "
            "[T, H] and [V, H]; flatten a batch with hidden.flatten(0, 1), and pass the weight of "
            "the language-model head as it is"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden has dtype {hidden.dtype} and weight {weight.dtype}, but they must be equal; "
            "pass weight.to(hidden.dtype), which keeps the gradient"
        )
