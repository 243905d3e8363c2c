"""Facts about this machine's processors: CPU and compilers, and visible GPUs. No torch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

_CPUINFO: Final = Path("/proc/cpuinfo")

_BFLOAT16_FLAGS: Final = frozenset({"amx_bf16", "bf16"})
"""CPU flags for products of bfloat16 matrices or vectors, on x86 and ARM."""
_INTEL: Final = "GenuineIntel"
"""On the one of these CPUs that was measured, products in bfloat16 are slower than in float32.

It has `avx512_bf16`, but its AMX is hidden by a virtual machine (docs/log.md, 2026-11-29).
"""


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Model name of the CPU, for display."""
    return _first(cpuinfo, "model name") or platform.processor() or platform.machine()


def fast_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the CPU has bfloat16 instructions that are faster than those of float32;
    emulation is three times slower.
    """
    flags = (_first(cpuinfo, "flags") or _first(cpuinfo, "Features")).split()
    if "avx512_bf16" in flags and _first(cpuinfo, "vendor_id") != _INTEL:
        return True
    return not _BFLOAT16_FLAGS.isdisjoint(flags)


def _first(cpuinfo: Path, name: str) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


_COMPILERS: Final = {"c": ("CC", ("gcc", "clang", "cc")), "c++": ("CXX", ("g++", "clang++"))}


def find_compiler(language: Literal["c", "c++"]) -> str | None:
    """Path of a compiler for torch: the one in `CC` or `CXX`, else one that torch looks for, or
    None.

    Kernels for a CPU are compiled as C++; launchers of Triton's kernels on a GPU as C.
    """
    variable, names = _COMPILERS[language]
    asked = os.environ.get(variable)
    return next(filter(None, map(shutil.which, (asked,) if asked else names)), None)


_DEVICE_FILES = Path("/dev")
_NVIDIA_SMI_S: Final = 20.0
"""Longest wait for nvidia-smi, which takes seconds if the driver was not loaded."""


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


def gpu_memory_bytes(gpu: str) -> int | None:
    """Memory of a GPU, by its name in `CUDA_VISIBLE_DEVICES`; None if nvidia-smi does not tell."""
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.total"]
    try:
        ended = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_S,
            check=True,
        )
        return int(ended.stdout.strip()) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def share_of(index: int, width: int, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """GPUs of process `index` with `width` GPUs each, round-robin; shared if there are too few."""
    return tuple(gpus[(index * width + offset) % len(gpus)] for offset in range(width))
