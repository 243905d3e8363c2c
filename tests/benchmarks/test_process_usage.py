"""Measuring a command from outside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import process_usage
from benchmarks.process_usage import run_and_measure

# The child touches its memory and computes for a while, so that several samples see it.
HOLD = """
import subprocess, sys
block = bytearray(b"x") * (64 << 20)
if sys.argv[2] == "parent":
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], "child"])
    child.wait()
else:
    sum(range(40_000_000))
"""


def measured_mib(tmp_path: Path, role: str) -> tuple[float, float]:
    usage = run_and_measure(
        [sys.executable, "-c", HOLD, HOLD, role],
        log_path=tmp_path / f"{role}.log",
        environment={},
        every_s=0.05,
    )
    assert usage.exit_code == 0
    return usage.peak_mib, usage.cpu_at(usage.ended_s)


def test_memory_and_time_of_descendants_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files that no process maps are those of the whole machine, where other tests make some too.
    monkeypatch.setattr(process_usage, "_shared_memory_mib", lambda: 0.0)
    alone_mib, alone_s = measured_mib(tmp_path, "child")
    both_mib, both_s = measured_mib(tmp_path, "parent")
    assert 64 < alone_mib < 110
    assert both_mib > alone_mib + 60
    assert min(alone_s, both_s) > 0


def test_a_command_is_ended_at_its_limit(tmp_path: Path) -> None:
    usage = run_and_measure(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        log_path=tmp_path / "log",
        environment={},
        limit_s=0.2,
        every_s=0.05,
    )
    assert usage.exit_code != 0
    assert usage.ended_s - usage.started_s < 60
