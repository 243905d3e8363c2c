"""How much memory there is: the machine's, or the container's if that is less."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_lab.host.memory import memory_available_bytes, memory_bytes


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  2000 kB\nMemFree:  500 kB\nMemAvailable:  1000 kB\n")
    return file


@pytest.mark.parametrize(
    ("limit", "used", "whole", "available"),
    [
        (None, None, 2000, 1000),
        ("max", "300", 2000, 1000),
        (str(1500 * 1024), str(300 * 1024), 1500, 1000),
        (str(1500 * 1024), str(900 * 1024), 1500, 600),
    ],
)
def test_the_least_of_machine_and_container_counts(
    meminfo: Path, limit: str | None, used: str | None, whole: int, available: int
) -> None:
    for name, text in (("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (meminfo.parent / name).write_text(f"{text}\n")
    assert memory_bytes(meminfo, meminfo.parent) == whole * 1024
    assert memory_available_bytes(meminfo, meminfo.parent) == available * 1024


def test_where_nothing_is_told_there_is_no_bound(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path / "gone", tmp_path) == sys.maxsize
    assert memory_available_bytes(tmp_path / "gone", tmp_path) == sys.maxsize


def test_this_machine_has_some() -> None:
    assert 0 < memory_available_bytes() <= memory_bytes() < 1 << 50
