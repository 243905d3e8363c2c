r"""Log-probs of the sampled tokens and entropy, from hidden states or from logits.

`T` tokens, `H` hidden size, `V` vocabulary. From hidden states, `[T, V]` logits never exist: chunks
of tokens are multiplied out, reduced and forgotten, and the backward pass makes them again.

    hidden [c, H] @ weight.T --> logits [c, V] --> logprobs, entropy, log-normaliser [c]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from areal_lab.functional.checks import check_integer, check_same_shape

_CHUNK_ENTRIES = 1 << 24
"""Logits in one chunk by default: 64 MiB in float32."""
_BLOCK_ENTRIES = 1 << 18
"""Logits that element-wise maths goes over at a time: 1 MiB in float32, which stays in cache."""


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
    logprobs, entropy, _ = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
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
    log_p = torch.log_softmax(_wide(logits) / temperature, dim=-1)
    possible = torch.isfinite(log_p)
    finite = torch.where(possible, log_p, torch.zeros_like(log_p))
    p = torch.where(possible, torch.exp(finite), torch.zeros_like(log_p))
    chosen = log_p.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return LogprobsAndEntropy(chosen, -(p * finite).sum(-1))


class _ChunkedLogprobs(torch.autograd.Function):
    """(hidden, weight) -> (logprobs, entropy), and the log-normaliser as a cache."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = _wide_dtype(hidden.dtype)
        logprobs, entropy, normalizer = (
            torch.empty(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(3)
        )
        buffer = _LogitsBuffer(hidden, weight, temperature, chunk)
        for rows in buffer.chunks():
            logits = buffer.logits(rows)
            for start, stop in _blocks(logits):
                block, at = logits[start:stop], slice(rows.start + start, rows.start + stop)
                target = block.gather(1, targets[at, None])[:, 0]
                peak = block.amax(1)
                block.sub_(peak[:, None])
                p = block.exp()
                mass = p.sum(1)
                # sum(p * z) as a batched dot product: no temporary.
                expected = torch.bmm(p[:, None, :], block[:, :, None])[:, 0, 0] / mass
                log_mass = mass.log()
                torch.add(peak, log_mass, out=normalizer[at])
                torch.sub(log_mass, expected, out=entropy[at])
                torch.sub(target - peak, log_mass, out=logprobs[at])
        return logprobs, entropy, normalizer

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, targets, ctx.temperature, ctx.chunk = inputs
        _, entropy, normalizer = output
        ctx.mark_non_differentiable(normalizer)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, entropy, normalizer)

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, normalizer = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalizer)
        grad_hidden, grad_weight = _ChunkedGradients.apply(  # type: ignore[no-untyped-call]
            hidden,
            weight,
            targets,
            grad_logprobs,
            grad_entropy,
            entropy,
            normalizer,
            ctx.temperature,
            ctx.chunk,
            ctx.needs_input_grad[:2],
        )
        return grad_hidden, grad_weight, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        return _map_by_loop(_ChunkedLogprobs.apply, info.batch_size, in_dims, args)


class _ChunkedGradients(torch.autograd.Function):
    """Gradients of `sum(g * logprobs + k * entropy)` with respect to hidden and weight.

    With p = softmax(z), l = log p and entropy H, the gradient with respect to the logits is
    `g (onehot - p) - k p (l + H)`. The cached H and log-normaliser are functions of hidden and
    weight; the derivative of this function accounts for them itself, so they get no gradient.
    """

    @staticmethod
    def forward(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        entropy: Tensor,
        normalizer: Tensor,
        temperature: float,
        chunk: int,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor | None, Tensor | None]:
        needs_hidden, needs_weight = needs
        narrow = hidden.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Summed over chunks, hence in the wide type: bfloat16 would lose small contributions.
        grad_weight = torch.zeros_like(weight, dtype=_wide_dtype(narrow)) if needs_weight else None
        buffer = _LogitsBuffer(hidden, weight, temperature, chunk)
        for rows in buffer.chunks():
            logits = buffer.logits(rows)
            for start, stop in _blocks(logits):
                block, at = logits[start:stop], slice(rows.start + start, rows.start + stop)
                _logits_gradient_(
                    block,
                    targets[at],
                    grad_logprobs[at],
                    None if grad_entropy is None else grad_entropy[at],
                    entropy[at],
                    normalizer[at],
                )
            grad_logits = logits.to(narrow)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows]).div_(temperature)
            if grad_weight is not None:
                _add_product_(grad_weight, grad_logits.T, buffer.scaled(rows))
        return grad_hidden, None if grad_weight is None else grad_weight.to(narrow)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:  # noqa: ARG004
        hidden, weight, targets, grad_logprobs, grad_entropy, _, _, temperature, chunk, _ = inputs
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, grad_logprobs, grad_entropy)

    @staticmethod
    def backward(
        ctx: Any, along_hidden: Tensor | None, along_weight: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # Ordinary differentiable operations, so that derivatives of every higher order follow.
        hidden, weight, targets, g, k = ctx.saved_tensors
        k = torch.zeros_like(g) if k is None else k
        parts = [
            _second_order(
                hidden[rows],
                weight,
                targets[rows],
                g[rows],
                k[rows],
                None if along_hidden is None else along_hidden[rows],
                along_weight,
                ctx.temperature,
            )
            for rows in _chunk_slices(hidden.shape[0], ctx.chunk)
        ]
        if not parts:
            return (None,) * 10
        to_hidden, to_weight, to_g, to_k = zip(*parts, strict=True)
        return (
            torch.cat(to_hidden).to(hidden.dtype),
            torch.stack(to_weight).sum(0).to(weight.dtype) if len(parts) > 1 else to_weight[0],
            None,
            torch.cat(to_g),
            torch.cat(to_k) if ctx.needs_input_grad[4] else None,
            *(None,) * 5,
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _map_by_loop(_ChunkedGradients.apply, info.batch_size, in_dims, args)


class _LogitsBuffer:
    """Logits of one chunk of tokens at a time, always in the same memory."""

    def __init__(self, hidden: Tensor, weight: Tensor, temperature: float, chunk: int) -> None:
        self.hidden, self.weight, self.temperature = hidden, weight, temperature
        self.chunk = min(chunk, max(1, hidden.shape[0]))
        self.buffer = hidden.new_empty(self.chunk, weight.shape[0])

    def chunks(self) -> Iterator[slice]:
        return _chunk_slices(self.hidden.shape[0], self.chunk)

    def scaled(self, rows: slice) -> Tensor:
        """hidden / tau: cheaper than dividing the logits, which are V / H times as many."""
        part = self.hidden[rows]
        return part if self.temperature == 1 else part / self.temperature

    def logits(self, rows: slice) -> Tensor:
        """Logits of these rows, in the wide type; overwritten by the next call."""
        out = self.buffer[: rows.stop - rows.start]
        return _wide(torch.mm(self.scaled(rows), self.weight.T, out=out))


def _logits_gradient_(
    logits: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    normalizer: Tensor,
) -> None:
    """Turn a block of logits into the gradient with respect to them, in place."""
    logits.sub_(normalizer[:, None])
    if grad_entropy is None:
        logits.exp_().mul_(-grad_logprobs[:, None])
    else:
        p = logits.exp()
        # -p (g + k (l + H)) = p * (-k l + (-g - k H))
        logits.mul_(-grad_entropy[:, None])
        logits.sub_((grad_logprobs + grad_entropy * entropy)[:, None]).mul_(p)
    logits.scatter_add_(1, targets[:, None], grad_logprobs[:, None])


def _second_order(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    g: Tensor,
    k: Tensor,
    along_hidden: Tensor | None,
    along_weight: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `<d_hidden, along_hidden> + <d_weight, along_weight>` (see _ChunkedGradients).

    The inner product is `sum(d * u)` with d the gradient with respect to the logits and u the
    change of the logits along the two directions. Returns its gradients with respect to hidden,
    weight, g and k.
    """
    # The same mathematics in the wide type; this path is for checks and curvature, not for speed.
    h, w = _wide(hidden) / temperature, _wide(weight)
    a = torch.zeros_like(h) if along_hidden is None else _wide(along_hidden) / temperature
    b = torch.zeros_like(w) if along_weight is None else _wide(along_weight)
    u = a @ w.T + h @ b.T
    log_p = torch.log_softmax(h @ w.T, dim=1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1, keepdim=True)
    index = targets[:, None]
    g, k = g[:, None], k[:, None]

    mean_u = (p * u).sum(1, keepdim=True)
    mean_lu = (p * log_p * u).sum(1, keepdim=True)
    d = -p * (g + k * (log_p + entropy))
    d = d.scatter_add(1, index, g)
    away = u - mean_u
    curvature = log_p * u - mean_lu + away * (1 + entropy) - mean_u * (log_p + entropy)
    q = -p * (g * away + k * curvature)

    to_hidden = (q @ w + d @ b) / temperature
    to_weight = q.T @ h + d.T @ a
    to_g = (u.gather(1, index) - mean_u)[:, 0]
    to_k = -(mean_lu + entropy * mean_u)[:, 0]
    return to_hidden, to_weight, to_g, to_k


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a temporary where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _map_by_loop(
    function: Callable[..., tuple[Tensor | None, ...]],
    batch_size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """vmap by calling once per member of the batch: chunk buffers are reused, memory stays flat."""

    def member(index: int) -> list[Any]:
        return [
            arg.select(dim, index) if isinstance(dim, int) else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]

    results = [function(*member(index)) for index in range(batch_size)]
    outputs = tuple(
        None if column[0] is None else torch.stack([x for x in column if x is not None])
        for column in zip(*results, strict=True)
    )
    return outputs, tuple(None if output is None else 0 for output in outputs)


def _chunk_slices(tokens: int, chunk: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk):
        yield slice(start, min(start + chunk, tokens))


def _blocks(logits: Tensor) -> Iterator[tuple[int, int]]:
    """Row ranges small enough that the passes over a block find it in the processor's cache."""
    rows, vocab = logits.shape
    step = max(1, _BLOCK_ENTRIES // max(1, vocab)) if logits.device.type == "cpu" else max(1, rows)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(values: Tensor) -> Tensor:
    return values.to(_wide_dtype(values.dtype))


def _check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(
            f"temperature is {temperature}, but must be positive and finite; for the log-probs of "
            "greedy decoding use 1.0"
        )


def _check_inputs(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    check_integer("targets", targets)
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:  # noqa: PLR2004
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
