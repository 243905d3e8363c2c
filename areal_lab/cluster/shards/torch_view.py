"""Fetched fields as torch tensors that share their memory. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_lab.data.arrays.jagged import Field, Jagged


def as_tensor(field: Field) -> Tensor:
    """A tensor of the same memory; rows of unequal length as a nested tensor in torch's `jagged`
    layout, whose offsets take new memory."""
    if isinstance(field, Jagged):
        offsets = torch.from_numpy(field.offsets)
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(field.values), offsets)
    return torch.from_numpy(field)


def as_tensors(fields: Mapping[str, Field]) -> dict[str, Tensor]:
    """Each field as a tensor; see `as_tensor`."""
    return {name: as_tensor(field) for name, field in fields.items()}
