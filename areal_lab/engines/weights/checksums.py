"""The checksums that SGLang reports on a CPU for given tensors.

The embedded engine reports our checksum of all weights. SGLang on a CPU reports, for each
parameter, the first eight bytes of the SHA-256 of its memory. Its parameter names are those of the
model folder, except for

    qkv_proj        q_proj, k_proj, v_proj, concatenated by rows
    gate_up_proj    gate_proj, up_proj, concatenated by rows
    embed_tokens    padded with rows of zeros to a multiple of 64, as is lm_head

On a GPU it hashes differently, and a tensor-parallel rank holds parts: nothing is compared then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

VOCABULARY_MULTIPLE = 64
"""SGLang pads the vocabulary to a multiple of this."""

_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_PARTS = {"k_proj", "v_proj", "up_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}


def sglang_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Checksum of each parameter by SGLang's names, for an engine with one CPU rank."""
    return {name: _sha256(tensor) for name, tensor in _in_sglang_layout(tensors)}


def difference(expected: Mapping[str, str], reply: Mapping[str, Any]) -> str | None:
    """How a `/weights_checker` reply of SGLang contradicts `expected`; `None` if it does not.

    Parameters with a layout unknown here (the experts of a mixture) are not compared, but a reply
    without a single known name is a contradiction.
    """
    ranks = reply.get("ranks") or []
    if len(ranks) != 1:
        return None  # each rank holds parts
    found = ranks[0]["checksums"]
    common = sorted(expected.keys() & found.keys())
    if not common:
        return "none of its parameters has a name that was sent"
    wrong = [name for name in common if expected[name] != found[name]]
    if not wrong:
        return None
    name = wrong[0]
    return (
        f"{len(wrong)} of {len(common)} parameters differ, such as {name} "
        f"(sent {expected[name]}, holds {found[name]})"
    )


def _in_sglang_layout(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        *path, module, kind = name.split(".") if "." in name else ("", name, "")
        if module in _FUSED:
            fused, parts = _FUSED[module]
            names = [".".join((*path, part, kind)) for part in parts]
            if all(part in tensors for part in names):
                yield ".".join((*path, fused, kind)), torch.cat([tensors[part] for part in names])
                continue
        if module in _PARTS:
            continue
        if module in _VOCABULARY:
            yield name, _padded(tensor)
        else:
            yield name, tensor


def _padded(tensor: Tensor) -> Tensor:
    missing = -len(tensor) % VOCABULARY_MULTIPLE
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
