"""The benchmark of notebooks: its clocks and its arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import notebooks
from benchmarks.harness import parse


def test_a_script_is_timed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("sum(range(3_000_000))")
    figures = notebooks.as_script(script)
    assert figures["script_cpu_s"] > 0
    assert figures["script_wall_s"] > 0


def test_the_clock_counts_the_processes_below_this_one() -> None:
    with notebooks.stopwatch() as spent:
        spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
        with subprocess.Popen(
            [sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            seconds = spent()
            child.communicate(b"\n")
    # The kernel counts whole ticks, of user and of system time.
    assert seconds.python_cpu_s > 0.3 - 2 / os.sysconf("SC_CLK_TCK")
    assert seconds.browser_cpu_s == 0


def test_notebooks_can_be_named() -> None:
    chosen = parse("", argv=["--only", "03_staleness"], add_own=notebooks.add_own)
    assert chosen.own.only == ["03_staleness"]
