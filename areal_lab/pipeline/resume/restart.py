"""Run a training in a separate process, and restart it after a crash: `train --restart N`.

    this process --starts--> areal-lab train --resume RUN --crash--> again, at most N times
                                                          --exit 0, 2, 130--> the end

So a training also continues after its process is killed, such as for lack of memory. If it has no
checkpoint yet, its files are moved to `attempt-1` and it starts over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from areal_lab.models.checkpoint_files import checkpoints_of
from areal_lab.pipeline.resume.positions import set_aside, trained_steps

FINAL_CODES: Final = frozenset({0, 2, 130})
"""Exit codes that end the restarts: 0 complete, 2 wrong settings or continued by another process,
130 stopped by the user."""


def run_with_restarts(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    restarts: int,
    note: Callable[[str], None],
    start: Callable[[Sequence[str]], subprocess.Popen[bytes]] = subprocess.Popen,
) -> int:
    """Run to the end, with restarts after a crash; returns the last exit code.

    The terminal sends Ctrl-C to the run directly. SIGTERM is passed on to the run and ends the
    restarts.

    Args:
        folder: run folder; a new one has only its configuration.
        overrides: changed settings.
        restarts: maximum number of restarts.
        note: shows a message to the user.
        start: starts a process; tests replace it.
    """
    command = [sys.executable, "-m", "areal_lab.cli.app", "train", "--resume", str(folder)]
    terminated, code = False, 0
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        if number == signal.SIGTERM:
            terminated = True
            if process is not None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for restarted in range(restarts + 1):
            process = start([*command, *overrides])
            if terminated:  # during the start
                process.terminate()
            code = process.wait()
            if code in FINAL_CODES or terminated or restarted == restarts:
                break
            if trained_steps(folder) and not checkpoints_of(folder):
                note(
                    f"no checkpoint yet: the run starts over; its files are in {set_aside(folder)}"
                )
            note(
                f"the run ended with {_cause(code)}; continuing it "
                f"({restarted + 1} of {restarts} restarts)"
            )
        return 128 - code if code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
