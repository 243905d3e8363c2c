"""Two ways to map an autograd function over members of a batch: as one batch, and in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def flatten_members(
    batch_size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...], per_token: tuple[int, ...]
) -> list[Any]:
    """The same arguments with `[batch, T, ...]` as `[batch * T, ...]` where they are per token."""
    flat = list(args)
    for index in per_token:
        if args[index] is not None:
            dim = in_dims[index]
            mapped = args[index][None].expand(batch_size, *args[index].shape)
            flat[index] = (mapped if dim is None else args[index].movedim(dim, 0)).flatten(0, 1)
    return flat


def unflatten_members(batch_size: int, flat: Tensor) -> Tensor:
    """`[batch * T, ...]` as `[batch, T, ...]`."""
    return flat.view(batch_size, flat.shape[0] // batch_size, *flat.shape[1:])


def map_by_loop(
    function: Callable[..., tuple[Tensor | None, ...]],
    batch_size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """vmap by calling once per member, each with separate weights or gradients of weights."""

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
