"""How much memory there is, as Linux tells it: the machine's, or the container's if less."""

from __future__ import annotations

import sys
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """All that processes here may have together; `sys.maxsize` where the system does not tell."""
    return min(_machine(meminfo, "MemTotal:"), _limit(cgroup))


def memory_available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """What the kernel could give now."""
    used = _lines(cgroup / "memory.current")
    left = _limit(cgroup) - int(used[0]) if used and used[0].isdigit() else sys.maxsize
    return min(_machine(meminfo, "MemAvailable:"), left)


def _machine(meminfo: Path, name: str) -> int:
    found = (int(line.split()[1]) * 1024 for line in _lines(meminfo) if line.startswith(name))
    return next(found, sys.maxsize)


def _limit(cgroup: Path) -> int:
    limit = _lines(cgroup / "memory.max")
    return int(limit[0]) if limit and limit[0].isdigit() else sys.maxsize


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
