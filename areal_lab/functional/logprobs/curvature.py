"""Second derivative of log-prob and entropy with respect to hidden states and output weights.

All vocabulary of some tokens at once and every step an ordinary operation: for checks, Hessians
and curvature, not for speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lab.functional.checks import wide
from areal_lab.functional.logprobs.cutoff import NOT_KEPT
from areal_lab.functional.logprobs.tiles import Restriction


def second_order(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    restriction: Restriction,
    rows: slice,
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

    Args:
        restriction: of all tokens, of which these are `rows`.
    """
    h, w = wide(hidden) / temperature, wide(weight)
    a = torch.zeros_like(h) if along_hidden is None else wide(along_hidden) / temperature
    b = torch.zeros_like(w) if along_weight is None else wide(along_weight)
    u = a @ w.T + h @ b.T
    logits = h @ w.T
    dropped = restriction.dropped(logits, rows, slice(None))
    if dropped is not None:
        logits = logits.masked_fill(dropped, NOT_KEPT)
    log_p = torch.log_softmax(logits, dim=1)
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
