"""Run a training in a process of its own, and continue it after a crash: `train --restart N`.

    this process --starts--> areal-lab train --resume RUN --crash--> again, at most N times
                                                          --exit 0, 2, 130--> the end

So the run also survives the end of its own process, such as a kill for lack of memory.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

FINAL_CODES: Final = frozenset({0, 2, 130})
"""Exit codes after which a run is not continued: complete; wrong settings, or continued by another
process; stopped by a person."""


def run_with_restarts(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    restarts: int,
    note: Callable[[str], None],
    start: Callable[[Sequence[str]], subprocess.Popen[bytes]] = subprocess.Popen,
) -> int:
    """Run to the end, with restarts after a crash; returns the last exit code.

    Ctrl-C reaches the run as without this process; SIGTERM is passed on to it, and ends the
    restarts.

    Args:
        folder: of the run; a fresh one has only its configuration.
        overrides: changed settings.
        restarts: largest number of restarts.
        note: tells the user of a restart.
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
            if terminated:  # while it was started
                process.terminate()
            code = process.wait()
            if code in FINAL_CODES or terminated or restarted == restarts:
                break
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
