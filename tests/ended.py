"""Processes that have ended."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil


def gone(*pids: int) -> bool:
    """Whether all of these processes have ended; one that nobody has waited for has, too."""
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_and_wait(code: str, *arguments: str) -> None:
    """Kill a program once it has said two processes, and wait until these have ended."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 2
        run.kill()
    while not gone(*pids):
        time.sleep(0.01)
