"""Memory: what the machine or the container has, and the most that processes have held."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil

from areal_lab.host.processes import members

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """All that processes here may have together."""
    return min(int(psutil.virtual_memory().total), _number(cgroup / "memory.max"))


def memory_available_bytes(cgroup: Path = _CGROUP) -> int:
    """What the kernel could give now."""
    left = _number(cgroup / "memory.max") - _number(cgroup / "memory.current", 0)
    return min(int(psutil.virtual_memory().available), left)


def peak_rss_bytes(process: int) -> int:
    """Largest resident memory that a process has had; 0 if it has ended, or where /proc is none."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, re.findall(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)))


def group_peak_rss_bytes(group: int) -> int:
    """Largest resident memory that each process of a process group has had, summed.

    An upper bound of what they held together: pages that they share count once for each, and they
    may have had their most at different times. Those that have ended count nothing.
    """
    return sum(peak_rss_bytes(process.pid) for process in members(group))


def _number(file: Path, otherwise: int = sys.maxsize) -> int:
    """In a file of the control group; some hold `max`, and where there is no group none exists."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return otherwise
