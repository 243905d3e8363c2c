"""Memory of the machine or container (free and total) and of processes (peak, and returned)."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import psutil

from areal_lab.host.process_groups import members

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Total memory available to processes here."""
    return min(int(psutil.virtual_memory().total), _number(cgroup / "memory.max"))


def memory_available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that the kernel could allocate now."""
    left = _number(cgroup / "memory.max") - _number(cgroup / "memory.current", 0)
    return min(int(psutil.virtual_memory().available), left)


def peak_rss_bytes(process: int) -> int:
    """Peak resident memory of a process; 0 if it has exited, or without /proc."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, re.findall(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)))


def group_peak_rss_bytes(group: int) -> int:
    """Sum of the peak resident memory of the processes of a process group.

    An upper bound of their joint peak: shared pages count once per process, and the peaks may be at
    different times. Processes that have exited do not count.
    """
    return sum(peak_rss_bytes(process.pid) for process in members(group))


def return_freed_memory() -> None:
    """Give the memory that this process has freed back to the kernel; glibc keeps it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have no such function
        trim(0)


def _number(file: Path, otherwise: int = sys.maxsize) -> int:
    """Number in a file of the control group; some have `max`, and without a group the file is
    missing.
    """
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return otherwise
