"""Visible GPUs, from device files and the environment. No torch."""

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

    As in CUDA, a list in `CUDA_VISIBLE_DEVICES` ends at the first negative number. It is ignored if
    there are no device files.
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
    """GPUs of process `index` with `width` GPUs each, round-robin; shared if there are too few."""
    return tuple(gpus[(index * width + offset) % len(gpus)] for offset in range(width))
