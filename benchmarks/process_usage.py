"""CPU seconds and memory of a command and its descendants, sampled while it runs.

Memory is the sum of the proportional set sizes (PSS), in which a page shared by n processes counts
1/n in each. Pages in shared memory count once, even while no process maps them (such as weights in
/dev/shm). Linux only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from areal_lab.host.process_groups import SHARED_MEMORY

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a process tree at one moment."""

    at_s: float
    """Seconds since the epoch."""
    cpu_s: float
    """User and system time of all processes so far, including exited ones as last seen."""
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used by a command from start to end."""

    started_s: float
    ended_s: float
    exit_code: int
    samples: tuple[Sample, ...] = field(repr=False)

    @property
    def peak_mib(self) -> float:
        """Peak memory of all processes together."""
        return max(sample.memory_mib for sample in self.samples)

    def cpu_at(self, at_s: float) -> float:
        """CPU seconds used until `at_s`, from the sample nearest to it."""
        return min(self.samples, key=lambda sample: abs(sample.at_s - at_s)).cpu_s


def run_and_measure(
    command: Sequence[str],
    *,
    log_path: Path,
    environment: Mapping[str, str],
    working_folder: Path | None = None,
    limit_s: float = float("inf"),
    every_s: float = 0.5,
) -> Usage:
    """Run a command to its end and sample it.

    Args:
        log_path: receives standard output and error.
        environment: variables on top of this process's own.
        limit_s: wall seconds after which the command is asked to end; its exit code tells.
        every_s: seconds between samples; reading the memory of a process takes some milliseconds.
    """
    shared_before = _shared_memory_mib()
    started_s = time.time()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            cwd=working_folder,
            start_new_session=True,
        )
    root = psutil.Process(process.pid)
    cpu_of: dict[int, float] = {}
    samples: list[Sample] = []
    try:
        while process.poll() is None:
            samples.append(_sample(root, cpu_of, shared_before))
            if time.time() - started_s > limit_s:
                break
            try:
                process.wait(every_s)
            except subprocess.TimeoutExpired:
                pass  # still running: sample again
    finally:
        for descendant in reversed(_tree(root)):
            _kill(descendant)
    return Usage(started_s, time.time(), process.wait(), tuple(samples))


def _sample(root: psutil.Process, cpu_of: dict[int, float], shared_before_mib: float) -> Sample:
    own_mib = shared_mib = 0.0
    for process in _tree(root):
        try:
            times = process.cpu_times()
            own, shared = _memory_mib(process.pid)
        except (psutil.Error, OSError):
            continue  # it exited after it was listed
        cpu_of[process.pid] = times.user + times.system
        own_mib += own
        shared_mib += shared
    waiting_mib = _shared_memory_mib() - shared_before_mib
    return Sample(time.time(), sum(cpu_of.values()), own_mib + max(shared_mib, waiting_mib))


def _tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _memory_mib(pid: int) -> tuple[float, float]:
    """Proportional set size, private and in shared memory."""
    sizes_kib: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        sizes_kib[name.rstrip(":")] = int(value)
    shared = sizes_kib.get("Pss_Shmem", 0)
    return (sizes_kib.get("Pss", 0) - shared) / 1024, shared / 1024


def _shared_memory_mib() -> float:
    return shutil.disk_usage(SHARED_MEMORY).used / _MIB


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass  # it has exited
