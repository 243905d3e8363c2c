"""Progress output without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from areal_lab.shell.display import Lines


def test_reminders_come_after_10_20_and_40_seconds() -> None:
    out, now_s, waiting = io.StringIO(), 0.0, ""
    lines = Lines(Console(file=out), lambda: waiting, clock=lambda: now_s)
    lines.phase("waiting for 1 sglang server(s) to start")
    for second in range(1, 61):
        now_s = float(second)
        lines.remind()
        if second == 50:
            lines.note("training")
            waiting = "the trainer (step 1)"
    assert out.getvalue().splitlines() == [
        "[   0.0 s] waiting for 1 sglang server(s) to start",
        "[  10.0 s] still: waiting for 1 sglang server(s) to start (10 s)",
        "[  20.0 s] still: waiting for 1 sglang server(s) to start (20 s)",
        "[  40.0 s] still: waiting for 1 sglang server(s) to start (40 s)",
        "[  50.0 s] training",
        "[  60.0 s] still waiting for the trainer (step 1) (10 s)",
    ]
