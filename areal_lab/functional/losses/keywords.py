"""Call a policy loss with the keywords that its signature asks for; see `PolicyLoss`.

trainer, loss_surface, gradient_check ---has---> token_count, sequences, ..., versions
loss(*tensors, *, token_count=None) ---asks for---> token_count
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_lab.functional.checks import applied
from areal_lab.functional.losses.policy import HasLoss
from areal_lab.functional.segments import Segments, segment_reduce


def requested_keywords(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Those of the names that are unbound parameters of a function, in their order."""
    # The signature of a partial still has the parameters that it binds.
    inner = inspect.unwrap(function)
    bound: Mapping[str, Any] = inner.keywords if isinstance(inner, partial) else {}
    parameters = inspect.signature(function).parameters
    return [name for name in names if name in parameters and name not in bound]


def keywords_of_batch(function: Callable[..., Any], ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """The keywords that a loss asks for, of a packed batch that is complete in itself.

    Each sequence is one turn and a group of its own, and all tokens are of the trainer's version.

    Args:
        ids: sequence of each token, numbered from 0.
        mask: True = the policy chose the token.
    """
    count = int(ids.max()) + 1
    sequences = Segments(ids, count)
    tokens = segment_reduce(mask.long(), ids, count)
    facts = {
        "token_count": int(mask.sum()),
        "sequences": sequences,
        "sequence_count": count,
        "turns": sequences,
        "groups": sequences,
        "group_count": count,
        "group_tokens": tokens,
        "versions": torch.zeros_like(ids),
        "trainer_version": 0,
    }
    return {name: facts[name] for name in requested_keywords(function, facts)}


def loss_of(call: Callable[..., HasLoss], *tokens: Tensor) -> HasLoss:
    """The result of a loss that a caller passed, for its five tensors.

    Raises:
        TypeError: it is no function of them, or returns no `loss`.
    """
    return applied(
        "loss",
        call,
        *tokens,
        gives=HasLoss,  # type: ignore[type-abstract]  # a protocol: only looked at
        example="decoupled_ppo",
    )
