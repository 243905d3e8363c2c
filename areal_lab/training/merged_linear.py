r"""A LoRA layer that multiplies by the merged weight, as engines do, with low-rank gradients.

    y = x (W + s B A)^T        dL/dx = dL/dy (W + s B A)
                               dL/dA = s (dL/dy B)^T x        dL/dB = s (dL/dy)^T (x A^T)

Rows of x are tokens; W [outputs, inputs], A [rank, inputs], B [outputs, rank]. The sum is rounded
to the type of the product, as in a checkpoint that engines load, and computed again for the
backward pass: that takes `rank` multiplications per weight and avoids keeping a matrix of its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


class MergedLinear(Linear):
    """peft's layer with another order of the sums; one adapter, without dropout."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ARG002 - as peft's
        """`x (W + scale B A)^T + bias`."""
        if self.disable_adapters:
            base_output: Tensor = self.get_base_layer()(x)
            return base_output
        (name,) = self.active_adapters
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        base: Any = self.get_base_layer()
        a: Any = self.lora_A[name].weight
        b: Any = self.lora_B[name].weight
        return merged_product(x, Adapted(base.weight, base.bias, a, b, self.scaling[name]), dtype)


def merge(
    weight: Float[Tensor, "O I"], a: Float[Tensor, "R I"], b: Float[Tensor, "O R"], scale: float
) -> Float[Tensor, "O I"]:
    """`W + scale B A`, in the type of W, inside autocast as well."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight, b.to(weight), a.to(weight), alpha=scale)


class Adapted(NamedTuple):
    """A frozen layer and its low-rank update."""

    weight: Float[Tensor, "O I"]
    bias: Float[Tensor, " O"] | None
    a: Float[Tensor, "R I"]
    b: Float[Tensor, "O R"]
    scale: float


def merged_product(
    x: Float[Tensor, "*T I"], layer: Adapted, dtype: torch.dtype
) -> Float[Tensor, "*T O"]:
    """`x (W + scale B A)^T + bias`, with gradients for x, A and B."""
    product: Tensor = _MergedProduct.apply(  # type: ignore[no-untyped-call]  # untyped in torch
        x.to(dtype), layer.a, layer.b, layer
    )
    return product


class _MergedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, layer: Adapted) -> Tensor:
        ctx.save_for_backward(x, layer.weight, a, b)
        ctx.scale = layer.scale
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        # The same call as in a plain layer, so the kernel and every bit are the same.
        return linear(x, merge(layer.weight, a, b, layer.scale).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ merge(weight, a, b, ctx.scale).to(x.dtype)
        rows, grads = x.flatten(0, -2), grad.flatten(0, -2)
        grad_a = (grads @ b.to(x.dtype)).T @ rows
        grad_b = grads.T @ (rows @ a.to(x.dtype).T)
        scaled = (g.to(p.dtype) * ctx.scale for g, p in ((grad_a, a), (grad_b, b)))
        return grad_x, *scaled, None
