"""A run that crashes is continued; one that ended, or was stopped, is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_lab.pipeline.resume.restart import run_with_restarts

KILLED = -signal.SIGKILL


class Lives:
    """Processes that end with the next of these codes."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.commands.append(list(command))
        code = self.codes.pop(0)
        program = (
            f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
        )
        return subprocess.Popen([sys.executable, "-S", "-c", program])


@pytest.mark.parametrize(
    ("codes", "restarts", "last"),
    [
        ((0,), 3, 0),
        ((2,), 3, 2),
        ((130,), 3, 130),
        ((1, KILLED, 0), 3, 0),
        ((1, 1, 1), 2, 1),
        ((KILLED,), 0, 128 + signal.SIGKILL),
        ((KILLED, 2), 5, 2),
    ],
)
def test_a_crash_is_continued_until_none_is_left(
    codes: tuple[int, ...], restarts: int, last: int
) -> None:
    lives, notes = Lives(*codes), list[str]()
    code = run_with_restarts(
        Path("run"), ["plots=false"], restarts=restarts, note=notes.append, start=lives
    )
    assert code == last
    assert not lives.codes
    assert len(notes) == len(codes) - 1
    assert all(one[-3:] == ["--resume", "run", "plots=false"] for one in lives.commands)
    if KILLED in codes[:-1]:
        assert any("SIGKILL" in note for note in notes)


def test_a_termination_reaches_the_run_and_ends_the_restarts() -> None:
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(30)"
    before = signal.getsignal(signal.SIGTERM)
    code = run_with_restarts(
        Path("run"),
        restarts=3,
        note=pytest.fail,
        start=lambda _: subprocess.Popen([sys.executable, "-S", "-c", program]),
    )
    assert code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
