"""What a row of the table function x transform needs: a function, a sample, its two layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_lab.functional import Segments

COLUMNS = ("eager", "grad", "vmap", "jacrev", "compile", "double backward", "packed = padded")


class Ragged(NamedTuple):
    """Four sequences of 3, 1, 5 and 2 tokens, padded to 5, some tokens masked."""

    exists: Tensor
    """[N, T], False on padding."""
    mask: Tensor
    """[N, T], True where the policy chose the token; False on all padding."""
    rows: Segments
    """Of the padded batch."""
    sequences: Segments
    """Of the packed batch."""
    cu_seqlens: Tensor

    def pack(self, padded: Tensor) -> Tensor:
        """[N, T] to [tokens]."""
        return padded[self.exists]

    def draw(self, seed: int, *, scale: float = 1.0, dtype: torch.dtype = torch.double) -> Tensor:
        """Normal values with NaN on the padding."""
        generator = torch.Generator().manual_seed(seed)
        values = scale * torch.randn(self.exists.shape, generator=generator, dtype=dtype)
        return torch.where(self.exists, values, torch.nan)


def ragged() -> Ragged:
    """The batch that padded and packed results are compared on."""
    lengths = torch.tensor([3, 1, 5, 2])
    exists = torch.arange(5) < lengths[:, None]
    mask = exists & (torch.tensor([1, 1, 0, 1, 1]) > 0)
    ids = torch.arange(4)[:, None].expand(4, 5)
    return Ragged(
        exists=exists,
        mask=mask,
        rows=Segments(ids, 4),
        sequences=Segments(ids[exists], 4),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    """Public name, with the variant in brackets where there are several: `kl_penalty (k3)`."""
    function: Callable[..., Any]
    """Tensors, as `sample` gives them, to a tensor or a tuple of tensors."""
    sample: Callable[[int], tuple[Tensor, ...]]
    """Seed to the inputs of ONE sample, floats in float64: `[T]` tokens, or `[N]` samples of a
    group. Away from kinks such as clip bounds, where finite differences are wrong."""
    differentiable: tuple[int, ...] = ()
    """Positions of the inputs that get a gradient; all other floats must get none."""
    layouts: Callable[[Ragged], tuple[Any, Any]] | None = None
    """The padded and the packed result in comparable form: token tensors of the padded batch
    packed with `Ragged.pack`. None needs a reason in `reasons`."""
    covers: tuple[str, ...] = ()
    """Public functions that this row goes through and that have no row of their own."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Column to why it does not apply, a short sentence for the table."""

    def __post_init__(self) -> None:
        """Say at once what is missing."""
        unknown = set(self.reasons) - set(COLUMNS)
        if unknown:
            raise ValueError(f"{self.name}: no columns {unknown}; there are {COLUMNS}")
        if self.layouts is None and "packed = padded" not in self.reasons:
            raise ValueError(f"{self.name}: give layouts, or the reason why there are none")
        if not self.differentiable and not {"grad", "jacrev", "double backward"} <= set(
            self.reasons
        ):
            raise ValueError(f"{self.name}: without a gradient, say why in grad, jacrev, ...")


NO_GRADIENT = dict.fromkeys(("grad", "jacrev", "double backward"), "a statistic: no gradient")
"""Reasons of a function whose results are detached by design."""
