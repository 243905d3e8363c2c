"""What a machine has, and the ceilings of its card: products, attention, copies, launches."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from areal_lab.host.machine import find_compiler, visible_gpus
from simulator.catalogue.gpu import GPU, find_gpu
from tools.gpu_day.record import Day

_LIBRARIES: Final = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "numpy"),
    *("datasets", "pydantic", "fastapi", "beartype", "jaxtyping", "pytest", "areal_lab"),
)
_CARDS: Final = ("GB200", "B200", "H200", "H100", "H20", "A100", "L40S")
"""Names of the simulator's GPUs in what drivers call them; longer ones first."""
_GIB: Final = 2**30


def known_gpu(day: Day) -> GPU | None:
    """The simulator's entry of this card; None if it has none, or on a CPU."""
    if not day.cuda:
        return None
    name = torch.cuda.get_device_name(day.device)
    found = next((card for card in _CARDS if card in name), None)
    if found == "A100":
        memory = torch.cuda.get_device_properties(day.device).total_memory
        found = "A100-80" if memory > 60 * _GIB else None
    try:
        return None if found is None else find_gpu(found)
    except ValueError:
        return None


def facts(day: Day) -> None:
    """What this machine has; what a run would see."""
    day.check("software", _software)
    day.check("machine", partial(_machine, day))


def _software() -> Mapping[str, Any]:
    found: dict[str, str | None] = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {"python": platform.python_version(), "cuda": torch.version.cuda, **found}


def _machine(day: Day) -> Mapping[str, Any]:
    known = known_gpu(day)
    values: dict[str, Any] = {
        "device": str(day.device),
        "gpu": known and known.name,
        "cores": len(os.sched_getaffinity(0)),
        "shared_memory_gib": round(shutil.disk_usage("/dev/shm").free / _GIB, 1),
        "c_compiler": find_compiler("c"),
        "visible_gpus": visible_gpus(),
    }
    if day.cuda:
        card = torch.cuda.get_device_properties(day.device)
        values |= {
            "card": card.name,
            "multiprocessors": card.multi_processor_count,
            "gpu_memory_gib": round(card.total_memory / _GIB, 1),
            "bfloat16": torch.cuda.is_bf16_supported(),
        }
    return values


def kernels(day: Day) -> None:
    """Points that the simulator's coefficients can be compared with."""
    shapes = [(64, 128)] if day.tiny else [(1536, 8960), (3584, 18944), (5120, 27648)]
    for rows in (8,) if day.tiny else (1, 16, 64, 256, 1024, 4096, 8192, 16384):
        for inner, outer in shapes:
            about = {"rows": rows, "inner": inner, "outer": outer}
            day.check("product", partial(_product, day, rows, inner, outer), **about)
    for tokens, rows in ((64, 1),) if day.tiny else ((2048, 16), (8192, 4), (32768, 1)):
        day.check("attention", partial(_attention, day, rows, tokens), tokens=tokens, rows=rows)
    day.check("copy on the device", partial(_copy, day))
    for pinned in (False, True) if day.cuda else ():
        day.check("copy to and from the host", partial(_host_copy, day, pinned), pinned=pinned)
    day.check("launch", partial(_launch, day))
    day.check("fused AdamW", partial(_adamw, day))


def random_matrix(day: Day, *shape: int) -> Tensor:
    """Normal numbers in bf16: products of zeros would be faster."""
    return torch.randn(*shape, device=day.device, dtype=torch.bfloat16)


def _product(day: Day, rows: int, inner: int, outer: int) -> Mapping[str, Any]:
    x, weight = random_matrix(day, rows, inner), random_matrix(day, outer, inner)
    s = day.seconds(lambda: x @ weight.T)
    size = 2 * (inner * outer + rows * (inner + outer))
    return {
        "seconds": s,
        "tflops": 2 * rows * inner * outer / s / 1e12,
        "gb_per_s": size / s / 1e9,
    }


def _attention(day: Day, rows: int, tokens: int, heads: int = 12) -> Mapping[str, Any]:
    q = random_matrix(day, rows, heads, tokens, 128).requires_grad_()
    attend = partial(functional.scaled_dot_product_attention, q, q, q, is_causal=True)
    forward_s = day.seconds(attend, repeats=5)
    both_s = day.seconds(lambda: attend().backward(q.detach()), repeats=5)
    flops = 2 * rows * heads * tokens * tokens * 128
    return {
        "forward_s": forward_s,
        "both_s": both_s,
        "forward_tflops": flops / forward_s / 1e12,
        "both_tflops": 3.5 * flops / both_s / 1e12,
    }


def _bytes(day: Day) -> Tensor:
    return torch.empty(1024 if day.tiny else _GIB, dtype=torch.uint8, device=day.device).random_()


def _copy(day: Day) -> Mapping[str, Any]:
    source = _bytes(day)
    target = torch.empty_like(source)
    s = day.seconds(lambda: target.copy_(source))
    return {"seconds": s, "read_and_written_tb_per_s": 2 * source.numel() / s / 1e12}


def _host_copy(day: Day, pinned: bool) -> Mapping[str, Any]:
    there = _bytes(day)
    here = torch.empty(there.numel(), dtype=torch.uint8, pin_memory=pinned)
    out_s = day.seconds(lambda: here.copy_(there, non_blocking=pinned), repeats=3, warmup=1)
    in_s = day.seconds(lambda: there.copy_(here, non_blocking=pinned), repeats=3, warmup=1)
    size = there.numel() / 1e9
    return {"to_host_gb_per_s": size / out_s, "to_device_gb_per_s": size / in_s}


def _launch(day: Day, launches: int = 2000) -> Mapping[str, Any]:
    number = torch.zeros(8, device=day.device)

    def work() -> None:
        for _ in range(launches):
            number.add_(1)

    return {"seconds": day.wall_s(work) / launches}


def _adamw(day: Day) -> Mapping[str, Any]:
    weight = torch.zeros(1 << (8 if day.tiny else 28), device=day.device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    s = day.seconds(torch.optim.AdamW([weight], fused=True).step, repeats=5)
    # Weight, gradient and both moments are read, all but the gradient written, 4 bytes each.
    return {
        "seconds": s,
        "parameters": weight.numel(),
        "gb_per_s": 28 * weight.numel() / s / 1e9,
    }
