"""A linear layer with an adapter that computes with the merged weight, as its engines do."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor

from areal_lab.training.merged_product import Adapted, merged_product


class MergedLinear(Linear):
    """peft's layer but for the order of its sums; one adapter, without dropout."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002 - as peft's
        """`x (W + scale B A)^T + bias`."""
        (name,) = self.active_adapters
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        base: Any = self.get_base_layer()
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        return merged_product(x, Adapted(base.weight, base.bias, a, b, self.scaling[name]), dtype)
