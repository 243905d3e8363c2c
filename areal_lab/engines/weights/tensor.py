"""The `http_tensor` transfer: the tensors inside the requests, the same bytes to every engine.

Serialize tensors by value, for `/update_weights_from_tensor`.

    tensors --pickle, storages inside--> bytes --base64--> JSON

torch's pickling for other processes (`multiprocessing.reduction`) sends handles instead: file
descriptors, which an engine that is not a child of the trainer cannot open (SGLang then crashes),
or names of shared-memory files, which need a manager process that outlives the trainer. Ordinary
pickling puts the bytes into the message, and the engine's unpickler reads both.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_lab.engines.weights.link import EngineLink
from areal_lab.engines.weights.push import ActivePush
from areal_lab.engines.weights.records import Phase

CHUNK_BYTES = 256 << 20
"""Largest size of the tensors in one request, unless a single one is larger; bounds the memory of
both sides."""


class TensorSender:
    """Sends a version in requests of bounded size; the last one names the version."""

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes

    def send(self, active: ActivePush) -> None:
        """Send all tensors to all engines; drop those that fail."""
        pieces = list(chunks(active.tensors, self._chunk_bytes))
        for number, piece in enumerate(pieces, start=1):
            payload = encode(piece)
            last = number == len(pieces)

            # Built once for all engines: a body is a third larger than its tensors.
            bodies = {
                ranks: b"".join(
                    update_body(
                        payload,
                        ranks=ranks,
                        version=str(active.version) if last else None,
                        flush_cache=active.flush_cache and last,
                    )
                )
                for ranks in {link.ranks for link in active.links}
            }

            def post(link: EngineLink, bodies: dict[int, bytes] = bodies) -> None:
                link.post(Phase.SEND, "/update_weights_from_tensor", bodies[link.ranks])

            active.for_each(post)

    def close(self) -> None:
        """Do nothing: there is no state between versions."""


NamedTensors = Sequence[tuple[str, Tensor]]


class UnsafePayload(ValueError):
    """A message contains something other than named tensors."""


def chunks(tensors: Mapping[str, Tensor], limit_bytes: int = CHUNK_BYTES) -> Iterator[NamedTensors]:
    """Split the tensors, in their order, into as few pieces as the limit allows."""
    piece: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if piece and size + tensor.nbytes > limit_bytes:
            yield piece
            piece, size = [], 0
        piece.append((name, tensor))
        size += tensor.nbytes
    if piece:
        yield piece


def update_body(
    payload: bytes, *, ranks: int, version: str | None, flush_cache: bool
) -> Iterator[bytes]:
    """Body of an `/update_weights_from_tensor` request, in pieces.

    `version` is set by the last piece of a set only; `None` keeps the engine's version.
    """
    fields: dict[str, Any] = {"flush_cache": flush_cache}
    if version is not None:
        fields["weight_version"] = version
    # Written around the payload: base64 needs no escaping, and scanning it for characters to escape
    # takes as long as everything else together.
    yield json.dumps(fields)[:-1].encode() + b', "serialized_named_tensors": ["'
    for rank in range(ranks):
        yield payload
        yield b'", "' if rank + 1 < ranks else b'"]}'


def encode(tensors: NamedTensors) -> bytes:
    """Encode names and tensors by value, in base64."""
    # A view would include its whole storage.
    whole = [(name, _alone(tensor.detach().cpu())) for name, tensor in tensors]
    return base64.b64encode(pickle.dumps(whole, protocol=pickle.HIGHEST_PROTOCOL))


def _alone(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if alone else tensor.clone()


def decode(payload: str) -> dict[str, Tensor]:
    """Inverse of `encode`, for the receiving side; raises UnsafePayload for other content."""
    try:
        raw = base64.b64decode(payload, validate=True)
        named = _TensorsOnly(io.BytesIO(raw)).load()
        tensors = dict(named)
    except (ValueError, TypeError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        raise UnsafePayload(f"the tensors cannot be read: {error}") from error
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()):
        raise UnsafePayload("the tensors cannot be read: not a list of names and tensors")
    return tensors


def _storage(raw: bytes) -> Any:
    return torch.load(io.BytesIO(raw), weights_only=True)


class _TensorsOnly(pickle.Unpickler):
    """Loads only the classes that tensors consist of: a pickle could otherwise run any code."""

    _allowed = {  # noqa: RUF012 - a table, written once
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): _storage,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return super().find_class(module, name)
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a tensor") from None
