"""How much memory there is: the machine's, or the container's if that is less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from areal_lab.host.memory import memory_available_bytes, memory_bytes


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=2000, available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("limit", "used", "whole", "available"),
    [
        (None, None, 2000, 1000),
        ("max", "300", 2000, 1000),
        ("1500", "300", 1500, 1000),
        ("1500", "900", 1500, 600),
    ],
)
def test_the_least_of_machine_and_container_counts(
    tmp_path: Path, limit: str | None, used: str | None, whole: int, available: int
) -> None:
    for name, text in (("memory.max", limit), ("memory.current", used)):
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    assert memory_bytes(tmp_path) == whole
    assert memory_available_bytes(tmp_path) == available


def test_this_machine_has_some() -> None:
    assert 0 < memory_available_bytes() <= memory_bytes() < 1 << 50
