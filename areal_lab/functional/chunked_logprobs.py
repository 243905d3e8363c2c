r"""Autograd for log-probs from hidden states: chunks of logits are made, reduced and forgotten.

    forward    hidden, weight --> logprobs, entropy, log-normaliser [T]
    backward   the same chunks again --> gradient of the logits, in place --> hidden, weight
    again      ordinary operations, differentiable as often as wanted

Two functions, since the first derivative has one of its own; `vmap` calls them in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_BLOCK_ENTRIES = 1 << 18
"""Logits that element-wise maths goes over at a time: 1 MiB in float32, which stays in cache."""


class ChunkedLogprobs(torch.autograd.Function):
    """(hidden, weight) -> (logprobs, entropy), and the log-normaliser as a cache."""

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy, normalizer = (
            torch.empty(hidden.shape[0], dtype=wide_dtype(hidden.dtype), device=hidden.device)
            for _ in range(3)
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
        grad_hidden, grad_weight = ChunkedGradients.apply(  # type: ignore[no-untyped-call]
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
        return _map_by_loop(ChunkedLogprobs.apply, info.batch_size, in_dims, args)


class ChunkedGradients(torch.autograd.Function):
    """Gradients of `sum(g * logprobs + k * entropy)` with respect to hidden and weight.

    With p = softmax(z), l = log p and entropy H, the gradient with respect to the logits is
    `g (onehot - p) - k p (l + H)`. The cached H and log-normaliser are functions of hidden and
    weight; the derivative of this function accounts for them itself, so they get no gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
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
        grad_weight = torch.zeros_like(weight, dtype=wide_dtype(narrow)) if needs_weight else None
        buffer = _LogitsBuffer(hidden, weight, temperature, chunk)
        for rows in buffer.chunks():
            logits = buffer.logits(rows)
            for start, stop in _blocks(logits):
                block, at = logits[start:stop], slice(rows.start + start, rows.start + stop)
                _logits_gradient_(
                    block,
                    targets=targets[at],
                    grad_logprobs=grad_logprobs[at],
                    grad_entropy=None if grad_entropy is None else grad_entropy[at],
                    entropy=entropy[at],
                    normalizer=normalizer[at],
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
                g=g[rows],
                k=k[rows],
                along_hidden=None if along_hidden is None else along_hidden[rows],
                along_weight=along_weight,
                temperature=ctx.temperature,
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
        return _map_by_loop(ChunkedGradients.apply, info.batch_size, in_dims, args)


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
        return wide(torch.mm(self.scaled(rows), self.weight.T, out=out))


def _logits_gradient_(
    logits: Tensor,
    *,
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
    *,
    g: Tensor,
    k: Tensor,
    along_hidden: Tensor | None,
    along_weight: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `<d_hidden, along_hidden> + <d_weight, along_weight>` (see ChunkedGradients).

    The inner product is `sum(d * u)` with d the gradient with respect to the logits and u the
    change of the logits along the two directions. Returns its gradients with respect to hidden,
    weight, g and k.
    """
    # The same mathematics in the wide type; this path is for checks and curvature, not for speed.
    h, w = wide(hidden) / temperature, wide(weight)
    a = torch.zeros_like(h) if along_hidden is None else wide(along_hidden) / temperature
    b = torch.zeros_like(w) if along_weight is None else wide(along_weight)
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


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that softmax and sums are computed in: float32, or float64 when that comes in."""
    return torch.promote_types(dtype, torch.float32)


def wide(values: Tensor) -> Tensor:
    """Values in their wide type."""
    return values.to(wide_dtype(values.dtype))
