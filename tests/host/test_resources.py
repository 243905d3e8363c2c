"""What the CPU is, and the compute type that follows from it."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from areal_lab.host import ports
from areal_lab.host.machine import fast_bfloat16, processor_name
from areal_lab.host.memory import memory_available_bytes, memory_bytes
from areal_lab.host.ports import address_towards, free_port
from areal_lab.models import folder
from areal_lab.models.folder import compute_dtype


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16", True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512_bf16 amx_bf16", True),
        ("flags\t\t: fpu avx512f", False),
        ("Features\t: fp asimd bf16", True),
        ("", False),
    ],
)
def test_bfloat16_is_native_where_the_cpu_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, native: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: A: B 3000\n{line}\n")
    assert fast_bfloat16(cpuinfo) == native
    assert processor_name(cpuinfo) == "A: B 3000"
    monkeypatch.setattr(folder, "fast_bfloat16", lambda: native)
    assert compute_dtype("auto") == (torch.bfloat16 if native else torch.float32)


def test_a_named_type_is_taken_and_an_unknown_one_refused() -> None:
    assert compute_dtype("float32") is torch.float32
    assert compute_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match="'float16', but must be auto, float32 or bfloat16"):
        compute_dtype("float16")


def test_a_system_that_tells_nothing_has_a_name_all_the_same(tmp_path: Path) -> None:
    assert processor_name(tmp_path / "none")
    assert not fast_bfloat16(tmp_path / "none")


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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_reaches_itself_from_its_loopback_address(host: str) -> None:
    assert address_towards(host) == "127.0.0.1"


@pytest.mark.parametrize("host", ["::1", "[::1]", "2001:db8::7"])
def test_a_machine_that_is_named_by_an_ipv6_address_is_refused_in_one_sentence(host: str) -> None:
    with pytest.raises(ValueError, match=r"has an IPv6 address only, .*; use an IPv4") as told:
        address_towards(host)
    assert str(told.value).startswith(host)
    assert "\n" not in str(told.value)


def test_a_machine_that_is_not_reached_is_told_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"this machine does not reach no-such-host\.invalid"):
        address_towards("no-such-host.invalid")


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass


def test_a_connection_within_a_machine_is_waited_for() -> None:
    for near in ("http://127.0.0.1:80", "http://[::1]:80", "https://localhost", "http://127.9.9.9"):
        assert ports.connect_s(near, 5.0) == 600.0
    for far in ("http://10.0.0.1:80", "http://example.org", "http://[fe80::1", "", "engine"):
        assert ports.connect_s(far, 5.0) == 5.0
