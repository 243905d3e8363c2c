"""Records of weight transfers: the kinds of transfer, their phases and failures. No torch.

    folder         trainer --write--> shared memory or disk --path--> engine reads
    http_tensor    trainer --tensors inside the request----> engine
    distributed    trainer --request: names, shapes--------> engine joins one broadcast per tensor
    cuda_ipc       trainer --handles of its copy on a GPU--> engine on the same GPU copies
    adapter        as `folder`, with A and B of a LoRA adapter only: the engine keeps its weights

For `http_tensor`, `distributed` and `cuda_ipc` the trainer keeps a copy of the version in memory
(`WeightsInMemory`) and calls the engines itself; the pipeline still pauses and resumes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from areal_lab.control.events import Version


class Transfer(StrEnum):
    """Transfer of new weights to the engines."""

    FOLDER = "folder"
    """A model folder that trainer and engines both see: shared memory, or disk."""
    HTTP_TENSOR = "http_tensor"
    """Tensors inside HTTP requests; works across machines without a shared file system."""
    DISTRIBUTED = "distributed"
    """One broadcast per tensor in a process group of trainer and engines: gloo, or NCCL on GPUs."""
    CUDA_IPC = "cuda_ipc"
    """Handles of a copy on a GPU that an engine and the trainer share."""
    ADAPTER = "adapter"
    """A folder with a LoRA adapter only; requests name their adapter."""


class Phase(StrEnum):
    """The phase in which a transfer failed, as error messages name it."""

    OPEN = "opening the update"
    JOIN = "joining the process group"
    SEND = "sending the tensors"
    BROADCAST = "broadcasting the tensors"
    CLOSE = "closing the update"
    VERIFY = "comparing what the engine holds"


Problem = Literal["refused", "unreachable", "mismatch"]
"""The engine refused; is gone or did not reply in time; or has other weights afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsInMemory:
    """A complete set of weights in the trainer's memory, ready to be sent to engines."""

    version: Version
    checksum: str
    """Checksum as in `WeightsFolder`, of the tensors' names, shapes, types and bytes."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """An engine to send weights to."""

    base_url: str
    ranks: int = 1
    """Tensor-parallel degree: each rank gets every tensor and keeps its part."""
    key: str = field(default="", repr=False)
    """Its key; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """Reason why one engine does not hold a version; plain data, sent between processes."""

    engine: str
    """Its base URL."""
    phase: Phase
    problem: Problem
    message: str
    """One line with the engine, the version, the phase and the problem."""


class TransferFailed(RuntimeError):
    """One engine did not take the weights; raised inside the trainer's process."""

    def __init__(self, failure: EngineFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def transfer_failed(
    engine: str, phase: Phase, problem: Problem, what: str, *, version: Version
) -> TransferFailed:
    """The error of one engine, with the same wording for every transfer."""
    message = f"engine {engine} did not take version {version}: {phase} failed: {what}"
    return TransferFailed(
        EngineFailure(engine=engine, phase=phase, problem=problem, message=message)
    )
