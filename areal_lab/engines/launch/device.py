"""Whether the servers of an engine compute on the CPU or on GPUs: one rule for all commands."""

from __future__ import annotations

from typing import Literal

from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.environments import Environment

Device = Literal["cpu", "cuda"]


def engine_device(found: Environment, asked: str, *, gpus: int, needed: int) -> Device:
    """Where servers of this engine compute.

    SGLang and vLLM compute where their build does. The embedded engine takes GPUs if the installed
    torch can use them and there are enough for all of its servers, else the CPU.

    Args:
        found: the engine's environment.
        asked: `auto`, `cpu` or `cuda`.
        gpus: that the servers may take.
        needed: GPUs of all servers, if each gets its own.

    Raises:
        ValueError: the reason, as the end of a sentence, if `asked` cannot be.
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
