"""Programs in processes with limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal_lab.rewards.sandbox import isolated, run_python


def test_a_program_passes_at_its_end_only() -> None:
    assert run_python("x = 1\nassert x == 1").passed
    assert not run_python("assert False").passed
    assert not run_python("1 +").passed


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "exit()"])
def test_leaving_early_is_not_passing(leave: str) -> None:
    assert not run_python(f"{leave}\nassert False").passed


def test_a_program_that_does_not_end_is_killed_with_its_children() -> None:
    mark = "areal-lab-sandbox-test-mark"
    program = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'])\n"
        "time.sleep(600)\n"
    )
    assert run_python(program, timeout_s=1).timed_out
    # A killed process is there until it has been scheduled once more.
    _, left = psutil.wait_procs(processes_with(mark), timeout=30)
    assert left == []


@pytest.mark.skipif(not isolated(), reason="this kernel lets no user make namespaces")
def test_a_killed_worker_takes_its_program_along() -> None:
    mark = "areal-lab-sandbox-orphan-mark"
    program = (
        "import subprocess, sys\n"
        "code = 'import time; time.sleep(600)'\n"
        f"subprocess.run([sys.executable, '-c', code, '{mark}'], start_new_session=True)\n"
    )
    worker = (
        f"from areal_lab.rewards.sandbox import run_python; run_python({program!r}, timeout_s=600)"
    )
    with subprocess.Popen([sys.executable, "-c", worker]) as process:
        while not (found := processes_with(mark)):
            assert process.poll() is None
        process.kill()
    _, left = psutil.wait_procs(found, timeout=30)
    assert left == []


def processes_with(mark: str) -> list[psutil.Process]:
    running = psutil.process_iter(["cmdline"])
    return [one for one in running if mark in (one.info["cmdline"] or [])]


def test_memory_is_limited() -> None:
    found = run_python("x = bytearray(1 << 29)", memory_bytes=1 << 28)
    assert not found.passed
    assert "MemoryError" in found.output


def test_output_is_bounded() -> None:
    found = run_python("while True: print('x' * 100_000)", timeout_s=20)
    assert not found.passed
    assert len(found.output) <= 4096


def test_it_starts_in_an_empty_folder_that_is_removed_with_its_files() -> None:
    found = run_python(
        "import os\nassert os.listdir('.') == []\nopen('a', 'w').close()\nprint(os.getcwd())"
    )
    assert found.passed
    assert not Path(found.output.strip()).exists()


def test_our_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    assert run_python("import os\nassert 'SECRET_TOKEN' not in os.environ").passed


@pytest.mark.skipif(not isolated(), reason="this kernel lets no user make namespaces")
def test_there_is_no_network() -> None:
    found = run_python("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)")
    assert "unreachable" in found.output


@pytest.mark.parametrize(("timeout_s", "memory"), [(0, 1), (1, 0)])
def test_limits_must_be_positive(timeout_s: float, memory: int) -> None:
    with pytest.raises(ValueError, match="both must be > 0"):
        run_python("", timeout_s=timeout_s, memory_bytes=memory)
