"""Copies to a GPU are staged in pinned memory and queued; on one device nothing is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.models.copies import copy_into, to_device
from areal_lab.models.folder import compute_dtype, has_bfloat16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called of tensors, none of which moves."""
    made: list[Any] = []

    def pinned(self: Tensor) -> Tensor:
        made.append("pinned")
        return self

    def moved(self: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        made.append((str(device), non_blocking))
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "to", moved)
    return made


def test_a_copy_to_a_gpu_is_pinned_and_queued(calls: list[Any]) -> None:
    to_device(torch.ones(2), torch.device("cuda"))
    assert calls == ["pinned", ("cuda", True)]


def test_nothing_moves_on_a_cpu(calls: list[Any]) -> None:
    tensor = torch.ones(2)
    assert to_device(tensor, torch.device("cpu")) is tensor
    copy_into(torch.zeros(2), tensor)
    assert not calls


def test_a_tensor_is_overwritten_in_its_own_type() -> None:
    target = torch.zeros(3, dtype=torch.bfloat16)
    source = torch.tensor([1.0, 1.001, -3.3])
    copy_into(target, source)
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize(
    ("device", "native", "expected"),
    [
        ("cpu", False, torch.float32),
        ("cpu", True, torch.bfloat16),
        ("cuda", False, torch.bfloat16),
        ("cuda:1", False, torch.bfloat16),
        ("pretend:0", False, torch.float32),
    ],
)
def test_the_type_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: torch.dtype, *, native: bool
) -> None:
    monkeypatch.setattr("areal_lab.models.folder.fast_bfloat16", lambda: native)
    assert compute_dtype("auto", device) == expected
    assert has_bfloat16(device) == (expected == torch.bfloat16)
    assert compute_dtype("float32", device) == torch.float32
