"""What a server is started with on this machine: its options, command line and variables.

    ServerOptions --fitted--> ServerOptions --server_command, server_environment--> child

What cannot be started here as it is asked for is refused in one line, with the mend.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from areal_lab.engines.launch.backends import Backend, ServerOptions, lora_refusal
from areal_lab.engines.launch.environments import environment
from areal_lab.host.cpu import native_bfloat16
from areal_lab.host.gpus import share_of, visible_gpus
from areal_lab.models.dtypes import dtype_name
from areal_lab.models.folder import cache_room

HOST: Final = "127.0.0.1"
_IN_ENGINE: Final = Path(__file__).parent / "in_engine.py"


def fitted(backend: Backend, wanted: ServerOptions) -> ServerOptions:
    """The options for this machine: type, cache and build are chosen here.

    Raises:
        ValueError: in one line, if the engine cannot be started here as it is asked for.
    """
    found = environment(backend.name)
    if not found.condition.usable:
        raise ValueError(
            f"engine {backend.name} is {found.condition} (looked in {found.folder}); "
            f"run: areal-lab engine install {backend.name}"
        )
    if found.build == "gpu" and not visible_gpus():
        raise ValueError(
            f"engine {backend.name} is installed for GPUs, but none is visible; "
            f"run: areal-lab engine install {backend.name} --build cpu"
        )
    if wanted.tensor_parallel > 1 and (not backend.tensor_parallel or found.build == "cpu"):
        raise ValueError(
            f"engine {backend.name} with tensor parallel {wanted.tensor_parallel} needs the GPU "
            "build of an engine that has it (sglang, vllm); use 1"
        )
    if wanted.lora is not None and (refusal := lora_refusal(backend, wanted.lora)) is not None:
        raise ValueError(refusal)
    native = found.build == "gpu" or native_bfloat16()
    dtype = dtype_name(wanted.dtype, native=native)
    room = cache_room(
        wanted.model,
        dtype=dtype,
        sequences=wanted.max_running_requests,
        context_tokens=wanted.context_length,
    )
    return replace(
        wanted,
        dtype=dtype,
        cache_tokens=room.tokens,
        cache_bytes=room.bytes,
        build=found.build,
    )


def server_command(backend: Backend, python: Path, options: ServerOptions) -> list[str]:
    """The command line of a server that ends with its parent."""
    arguments = backend.arguments(options)
    if not backend.own_environment:
        return [str(python), "-m", backend.module, *arguments]
    return [str(python), "-P", str(_IN_ENGINE), backend.module, *arguments]


def server_environment(
    backend: Backend, python: Path, options: ServerOptions, index: int = 0
) -> dict[str, str]:
    """Variables on top of this process's own."""
    variables = backend.environment(options)
    if backend.own_environment:
        # What our own environment puts on the module path is nothing to the engine's.
        variables.setdefault("PYTHONPATH", "")
        variables["PATH"] = os.pathsep.join((str(python.parent), os.environ.get("PATH", "")))
    if options.build == "gpu":
        share = share_of(index, options.tensor_parallel, visible_gpus())
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return variables
