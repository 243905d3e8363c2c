"""Refuse wrong shapes and types in one sentence: the argument, its value and the fix.

Most check shapes and dtypes, which costs nothing and holds under `torch.func` and `torch.compile`.
Those of values (`check_range`, `check_finite`) run only where the values can be read; `check_range`
leaves out tensors on a device as well, for which it would have to wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


def check_token_inputs(mask: Tensor, **values: Tensor) -> None:
    """Refuse values whose shape is not the mask's, which torch would broadcast silently.

    Raises:
        ValueError: the mask is not boolean, or a value has another shape than the mask.
    """
    if mask.dtype != torch.bool:
        raise ValueError(
            f"mask has dtype {mask.dtype}, but must be torch.bool (True = the policy chose this "
            "token); pass mask.bool()"
        )
    for name, value in values.items():
        if value.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} and mask {tuple(mask.shape)}, but they "
                "must be equal; give one value per token (a value per sequence is spread with "
                "value[:, None].expand_as(mask), or value[sequence_ids] when packed)"
            )


def check_same_shape(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse `value` when its shape is not that of `other`.

    Raises:
        ValueError: the shapes differ.
    """
    if value.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} and {other_name} {tuple(other.shape)}, "
            f"but they must be equal; give one entry of {name} per entry of {other_name}"
        )


def check_integer(name: str, value: Tensor) -> None:
    """Refuse ids that are not integers.

    Raises:
        ValueError: the dtype is floating, complex or boolean.
    """
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {value.dtype}, but must be integers; pass .long()")


def check_range(name: str, ids: Tensor, size: int, advice: str) -> None:
    """Refuse ids outside 0 .. size - 1 if they can be read without waiting for a device.

    Elsewhere (on a GPU, under `vmap` and `torch.compile`) the operation that indexes with them
    refuses them.

    Raises:
        ValueError: an id is negative, or `size` or more.
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or ids.numel() == 0:
        return
    try:
        low, high = (int(end) for end in torch.aminmax(ids))
    except RuntimeError:
        # Under vmap the values of one sample cannot be read.
        return
    if low < 0 or high >= size:
        raise ValueError(
            f"{name} has an entry {low if low < 0 else high}, but must be in 0 .. {size - 1}; "
            f"{advice}"
        )


def check_floating(name: str, value: Tensor) -> None:
    """Refuse integers and booleans where floating numbers are needed.

    Raises:
        ValueError: the dtype is not floating.
    """
    if not value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}, but must be floating; pass .float()")


def check_finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity where values can be read: eagerly, not in vmap or compile.

    Raises:
        ValueError: an entry is not finite.
    """
    bad = count_known(~torch.isfinite(value))
    if bad:
        raise ValueError(
            f"{name} (shape {tuple(value.shape)}) has {bad} entries that are NaN or infinite; "
            "fix the function that made them, or leave those samples out"
        )


def count_known(condition: Tensor) -> int:
    """Number of True entries; 0 if they cannot be read, and the caller guarantees them."""
    if torch.compiler.is_compiling():
        return 0
    try:
        return int(condition.sum())
    except RuntimeError:
        # Under vmap the values of one sample cannot be read.
        return 0


def applied(
    name: str, function: Callable[..., _Result], *inputs: Any, gives: type[_Result], example: str
) -> _Result:
    """Call `function(*inputs)` for a function that the caller passed as the argument `name`.

    Anything that is not a function, takes other arguments or returns another type is refused. The
    last two are often a factory that was not called: `truncate` instead of `truncate(2.0)`.

    Raises:
        TypeError: the function is of the wrong kind.
    """
    if not callable(function):
        raise TypeError(f"{name} is {function!r:.60}, but must be a function; pass {example}")
    try:
        result = function(*inputs)
    except TypeError as error:
        if _takes(function, inputs):
            raise
        raise TypeError(
            f"{name} is {function!r:.60}, which takes other arguments; pass {example}"
        ) from error
    if not isinstance(result, gives):
        raise TypeError(
            f"{name} returned a {type(result).__name__}, but must return a {gives.__name__}; "
            f"pass {example}"
        )
    return result


def _takes(function: Callable[..., Any], inputs: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(function).bind(*inputs)
    except (TypeError, ValueError):  # ValueError: a function in C without a signature
        return False
    return True


def check_number(name: str, value: object, example: str) -> None:
    """Refuse a tensor or tuple where a factory takes a number: the factory itself was passed on.

    Raises:
        TypeError: the value is a tuple or a tensor with axes.
    """
    if isinstance(value, tuple) or (isinstance(value, Tensor) and value.dim() > 0):
        raise TypeError(
            f"{name} is a {type(value).__name__}, but must be a number; pass {example}, which "
            "makes the function"
        )


def wide(values: Tensor) -> Tensor:
    """Values in float32 at least: sums over many tokens lose too much in bfloat16."""
    return values.to(wide_dtype(values.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are computed in: float32, or float64 when that comes in."""
    return torch.promote_types(dtype, torch.float32)
