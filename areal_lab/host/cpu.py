"""Facts about the CPU from /proc/cpuinfo; empty where that is missing. No torch."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")

_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags for bfloat16 instructions, on x86 and ARM."""


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Model name of the CPU, for display."""
    return _first(cpuinfo, "model name") or platform.processor() or platform.machine()


def native_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPU has bfloat16 instructions; emulation is three times slower than float32."""
    flags = _first(cpuinfo, "flags") or _first(cpuinfo, "Features")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def _first(cpuinfo: Path, name: str) -> str:
    """Value of the first line with this key."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
