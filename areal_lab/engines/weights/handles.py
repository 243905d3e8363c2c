"""The `cuda_ipc` transfer: handles of the trainer's copy, which an engine on the same GPU copies.

    trainer   a new copy of each version on the GPU --handles, in one request-->
    engine    opens the handles, copies into its weights, closes them, replies
              cannot open them: refuses, and gets the tensors by value (`tensor`)

Handles are torch's own for other processes (`torch.multiprocessing.reductions`): CUDA IPC for
memory of a GPU, named shared memory for memory of the host, with which the tests run all of this
but the two calls for CUDA. Not run on a GPU yet.

The trainer keeps a copy while the version is needed, and lets engines read it only during a push.
Each version gets new memory: torch wraps a storage again each time that it is shared.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import sys
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from areal_lab.engines.weights.link import EngineLink
from areal_lab.engines.weights.push import ActivePush
from areal_lab.engines.weights.records import Phase, TransferFailed
from areal_lab.engines.weights.tensor import TensorSender, UnsafePayload

PATH: Final = "/update_weights_from_handles"
"""Path of the request at an embedded engine."""


class HandleSender:
    """Sends the handles of a version, and the tensors by value to engines that cannot open handles.

    A handle of a GPU that is not opened keeps its memory until this process ends, so such an engine
    gets handles once.
    """

    def __init__(self, by_value: TensorSender | None = None) -> None:
        self._by_value = by_value or TensorSender()
        self._cannot_open: set[str] = set()
        # Memory of the host by name: a descriptor is for this process and its children.
        torch.multiprocessing.set_sharing_strategy("file_system")

    def send(self, active: ActivePush) -> None:
        """Send all tensors to all engines; drop those that fail."""
        refused: dict[EngineLink, TransferFailed] = {}

        def post(link: EngineLink) -> None:
            if link.base_url in self._cannot_open:
                return
            # A handle is for one receiver, which gives it back.
            fields = {
                "handles": encode_handles(active.tensors),
                "weight_version": str(active.version),
                "flush_cache": active.flush_cache,
            }
            try:
                link.post(Phase.SEND, PATH, json.dumps(fields).encode())
            except TransferFailed as error:
                if error.failure.problem != "refused":
                    raise
                refused[link] = error
                _take_back(active.tensors)

        active.for_each(post)
        for error in refused.values():
            print(f"weights: {error}; sending them by value", file=sys.stderr, flush=True)
        others = [
            link for link in active.links if link in refused or link.base_url in self._cannot_open
        ]
        if not others:
            return
        took = [link for link in active.links if link not in others]
        active.links = others
        self._by_value.send(active)
        self._cannot_open |= {link.base_url for link in active.links}
        active.links = [*took, *active.links]

    def close(self) -> None:
        """Do nothing: there is no state between versions."""


def encode_handles(tensors: Mapping[str, Tensor]) -> str:
    """Encode names and handles, in base64; the tensors must live until the receiver is done."""
    whole = [(name, tensor.detach()) for name, tensor in tensors.items()]
    return base64.b64encode(ForkingPickler.dumps(whole, pickle.HIGHEST_PROTOCOL)).decode()


def _take_back(tensors: Mapping[str, Tensor]) -> None:
    """Give back one handle of each tensor in host memory, as its receiver would have done.

    A receiver that failed halfway has given some back itself: their names then go early, and an
    engine that has not opened them yet gets the tensors by value.
    """
    for tensor in tensors.values():
        if tensor.device.type == "cpu":
            tensor.untyped_storage()._shared_decref()


def open_handles(payload: str) -> dict[str, Tensor]:
    """Inverse of `encode_handles` in another process: tensors in the sender's memory.

    Raises:
        UnsafePayload: they cannot be opened here, or the payload has other content.
    """
    try:
        named = _HandlesOnly(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        tensors = dict(named)
    except (
        *(ValueError, TypeError, EOFError, OSError, AttributeError),
        *(pickle.UnpicklingError, RuntimeError),
    ) as error:
        raise UnsafePayload(f"the handles cannot be opened: {error}") from error
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()):
        raise UnsafePayload("the handles cannot be opened: not a list of names and tensors")
    return tensors


_CLASSES: Final[dict[tuple[str, str], Any]] = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): reductions.rebuild_cuda_tensor,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    (
        "torch.multiprocessing.reductions",
        "rebuild_storage_filename",
    ): reductions.rebuild_storage_filename,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch", "Tensor"): Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch", "UntypedStorage"): torch.UntypedStorage,
}
"""All that a payload may name, except for types of numbers: a pickle could run any code."""


class _HandlesOnly(pickle.Unpickler):
    """Loads only what handles of tensors consist of."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        try:
            return _CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a handle") from None
