"""The running processes of a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import psutil

_ENDED: Final = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def group_of(process: int) -> int | None:
    """Process group of a process; None if it has exited."""
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def members(group: int) -> Iterator[psutil.Process]:
    """Running processes of a group; zombies do not count."""
    # Not process_iter, which reads a file of every process; servers that start are polled.
    for pid in psutil.pids():
        if group_of(pid) != group:
            continue
        try:
            process = psutil.Process(pid)
            ended = process.status() in _ENDED
        except psutil.NoSuchProcess:
            continue
        if not ended:
            yield process
