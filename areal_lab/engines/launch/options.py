"""A server's options, command line and environment variables on this machine.

    ServerOptions --fit_to_machine--> ServerOptions --server_command, server_environment--> child

Options that do not work on this machine are refused in one line, with a fix.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from areal_lab.engines.launch.backends import (
    BACKENDS,
    Backend,
    ServerOptions,
    arguments_refusal,
    lora_refusal,
)
from areal_lab.engines.launch.environments import Environment, environment
from areal_lab.host.machine import share_of, visible_gpus
from areal_lab.models.folder import cache_room, dtype_name, has_bfloat16
from areal_lab.models.vision import is_vision_model

HOST: Final = "127.0.0.1"
_IN_ENGINE: Final = Path(__file__).parent / "in_engine.py"


def fit_to_machine(backend: Backend, options: ServerOptions) -> ServerOptions:
    """Choose type, cache size and build for this machine."""
    found = environment(backend.name)
    if not found.condition.usable:
        raise ValueError(
            f"engine {backend.name} is {found.condition} (looked in {found.folder}); "
            f"run: areal-lab engine install {backend.name}"
        )
    gpus = visible_gpus()
    if found.build == "gpu" and backend.own_environment and not gpus:
        raise ValueError(
            f"engine {backend.name} is installed for GPUs, but none is visible; "
            f"run: areal-lab engine install {backend.name} --build cpu"
        )
    if options.tensor_parallel > 1 and (not backend.tensor_parallel or found.build == "cpu"):
        raise ValueError(
            f"engine {backend.name} with tensor parallel {options.tensor_parallel} needs the GPU "
            "build of sglang or vllm; use 1"
        )
    if options.lora is not None and (refusal := lora_refusal(backend, options.lora)) is not None:
        raise ValueError(refusal)
    if (refusal := arguments_refusal(backend, options.extra)) is not None:
        raise ValueError(refusal)
    try:
        device = engine_device(
            found, options.device, gpus=len(gpus), needed=options.tensor_parallel
        )
    except ValueError as error:
        raise ValueError(f"device is {options.device}, but {error}") from error
    dtype = dtype_name(options.dtype, native=has_bfloat16(device))
    room = cache_room(
        options.model,
        dtype=dtype,
        sequences=options.max_running_requests,
        context_tokens=options.context_length,
    )
    return replace(
        options,
        dtype=dtype,
        cache_tokens=room.tokens,
        cache_bytes=room.bytes,
        build="gpu" if device == "cuda" else "cpu",
        images=is_vision_model(options.model),
    )


def server_command(backend: Backend, python: Path, options: ServerOptions) -> list[str]:
    """The command line of a server that exits with its parent."""
    arguments = backend.arguments(options)
    if not backend.own_environment:
        return [str(python), "-m", backend.module, *arguments]
    return [str(python), "-P", str(_IN_ENGINE), backend.module, *arguments]


def server_environment(
    backend: Backend, python: Path, options: ServerOptions, index: int = 0
) -> dict[str, str]:
    """Environment variables to add to this process's own."""
    variables = backend.environment(options)
    if backend.own_environment:
        # The engine must not see our module path.
        variables.setdefault("PYTHONPATH", "")
        variables["PATH"] = os.pathsep.join((str(python.parent), os.environ.get("PATH", "")))
    if options.build == "gpu":
        share = share_of(index, options.tensor_parallel, visible_gpus())
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return variables


Device = Literal["cpu", "cuda"]


def engine_device(found: Environment, asked: str, *, gpus: int, needed: int) -> Device:
    """Return the device of servers of this engine.

    SGLang and vLLM use the device of their build. The embedded engine takes GPUs if the installed
    torch can use them and there are enough for all of its servers, else the CPU.
    """
    install = f"run: areal-lab engine install {found.backend} --build"
    own_environment = BACKENDS[found.backend].own_environment
    if found.build == "cpu":
        if asked == "cuda":
            why = (
                f"the CPU build of {found.backend} is installed; {install} gpu"
                if own_environment
                else "the installed torch was built without CUDA; take auto or cpu"
            )
            raise ValueError(why)
        return "cpu"
    if own_environment:
        if asked == "cpu":
            raise ValueError(f"the GPU build of {found.backend} is installed; {install} cpu")
        return "cuda"
    if asked == "cuda" and gpus < needed:
        raise ValueError(
            f"{needed} server(s) need a GPU each, and {gpus} are free for them; take fewer "
            "servers, auto or cpu"
        )
    return "cuda" if asked != "cpu" and gpus >= needed else "cpu"
