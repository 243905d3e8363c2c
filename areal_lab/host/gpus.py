"""Which GPUs this process may use, told from device files and the environment. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_DEVICE_FILES = Path("/dev")


def visible_gpus(
    devices: Path = _DEVICE_FILES, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs as `CUDA_VISIBLE_DEVICES` would list them; empty without any.

    A list in `CUDA_VISIBLE_DEVICES` is taken as it stands up to the first negative number, as CUDA
    does; it counts only where there is a device file at all.
    """
    numbers = sorted(
        int(found.group(1))
        for file in (devices.glob("nvidia[0-9]*") if devices.is_dir() else ())
        if (found := re.fullmatch(r"nvidia(\d+)", file.name))
    )
    if not numbers:
        return ()
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, range(len(numbers))))
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):
            break
        names.append(name)
    return tuple(names)


def share_of(index: int, width: int, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """The GPUs of process `index` if each takes `width`, in turn; processes share where few are."""
    return tuple(gpus[(index * width + offset) % len(gpus)] for offset in range(width))
