"""`areal-lab sweep` with real processes: complete, interrupted, killed, edited, failing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from areal_lab import read_sweep
from tests.warm import ForkedPopen, run_forked

STUDY = """
command: simulate
config: small
settings: {seeds: 1}
grid:
  eta: [0, 2]
  seed: [1, 2]
  workload.steps: [12]
figure: {metric: step_s, baseline: eta=0}
"""
ENDLESS = "grid.workload.steps=[12,3000000]"
"""A second simulation that outlasts the test."""
TIMEOUT_S = 60


def command(folder: Path, *overrides: str) -> list[str]:
    path = folder / "mine.yaml"
    if not path.exists():
        path.write_text(STUDY)
    program = [sys.executable, "-m", "areal_lab", "sweep", str(path)]
    return [*program, f"folder={folder / 'out'}", *overrides]


def swept(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_forked(command(folder, *overrides), timeout=TIMEOUT_S)


@contextmanager
def sweeping(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A sweep of which one cell is complete and one runs."""
    with (
        (folder / "output").open("w") as output,
        ForkedPopen(command(folder, *overrides), stdout=output, stderr=output) as sweep,
    ):
        try:
            wait_for(
                lambda: statuses(folder) == ["complete", "running"] and simulations(folder), sweep
            )
            yield sweep
        finally:
            sweep.kill()


def wait_for(condition: Callable[[], object], sweep: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not condition():
        assert sweep.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.05)


def statuses(folder: Path) -> list[str]:
    files = (folder / "out").glob("cells/*/cell.json")
    return sorted(json.loads(file.read_text())["status"] for file in files)


def simulations(folder: Path) -> list[psutil.Process]:
    """Runs of this study that are alive: leaders of sessions that write the log of a cell."""
    cells = folder / "out" / "cells"
    found = []
    for process in psutil.process_iter():
        # A process that has ended has no descriptors.
        with suppress(OSError):
            log = Path(f"/proc/{process.pid}/fd/2").readlink()
            if log.is_relative_to(cells) and os.getsid(process.pid) == process.pid:
                found.append(process)
    return found


def test_a_sweep_makes_the_same_table_whatever_ends_first(tmp_path: Path) -> None:
    # The first cell takes longer: with two at a time, the second one ends first.
    options = ("grid.workload.steps=[400,12]", "grid.eta=[0]", "figure.baseline=")
    first = swept(tmp_path, "workers=2", "grid.seed=[1]", *options)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == str(tmp_path / "out")
    table = (tmp_path / "out" / "cells.csv").read_bytes()
    assert (tmp_path / "out" / "figure.png").stat().st_size > 10_000
    again = swept(tmp_path, "workers=1", "grid.seed=[1]", *options)  # nothing is left to run
    assert "2 cells (2 workload.steps) of `simulate small`; 2 complete\n" in again.stderr
    assert again.stdout == first.stdout
    assert (tmp_path / "out" / "cells.csv").read_bytes() == table
    other = tmp_path / "other"
    other.mkdir()
    assert swept(other, "workers=1", "grid.seed=[1]", *options).returncode == 0
    assert (other / "out" / "cells.csv").read_bytes() == table


def test_ctrl_c_ends_the_runs_and_says_how_to_go_on(tmp_path: Path) -> None:
    with sweeping(tmp_path, "workers=1", ENDLESS, "grid.eta=[0]", "grid.seed=[1]") as sweep:
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(TIMEOUT_S) == 130
        assert simulations(tmp_path) == []
    told = (tmp_path / "output").read_text()
    assert "stopping: waiting for 1 run to end; Ctrl-C again kills it" in told
    assert "1 of 2 cells are complete; the same command runs the others: areal-lab sweep" in told
    assert statuses(tmp_path) == ["complete", "stopped"]


def test_a_killed_sweep_leaves_no_process_and_an_edited_study_keeps_what_fits(
    tmp_path: Path,
) -> None:
    options = ("workers=1", "grid.eta=[0]", "grid.seed=[1]")
    with sweeping(tmp_path, *options, ENDLESS) as sweep:
        (run,) = simulations(tmp_path)
        os.kill(sweep.pid, signal.SIGKILL)
        run.wait(TIMEOUT_S)
    (kept,) = (row for row in read_sweep(tmp_path / "out").rows if row.complete)
    written = (kept.stored.folder / "cell.json").stat().st_mtime_ns
    edited = swept(tmp_path, *options, "grid.workload.steps=[12,13]")
    assert edited.returncode == 0, edited.stderr
    assert "; 1 complete, 1 to run" in edited.stderr
    sweep_now = read_sweep(tmp_path / "out")
    assert [row.complete for row in sweep_now.rows] == [True, True]
    assert sweep_now.rows[0].stored.folder == kept.stored.folder
    assert (kept.stored.folder / "cell.json").stat().st_mtime_ns == written


def test_a_run_that_is_killed_fails_alone_and_is_made_again(tmp_path: Path) -> None:
    options = ("workers=1", "grid.eta=[0]", "grid.seed=[1]")
    with sweeping(tmp_path, *options, ENDLESS) as sweep:
        refused = swept(tmp_path)
        assert refused.returncode == 1
        assert "another sweep is running in" in refused.stderr
        simulations(tmp_path)[0].kill()
        assert sweep.wait(TIMEOUT_S) == 1
    told = (tmp_path / "output").read_text()
    assert "eta=0, seed=1, workload.steps=3000000 failed: killed by SIGKILL" in told
    assert (
        "; 1 complete, 1 to run (1 failed before), 1 at a time\n"
        in swept(tmp_path, *options, ENDLESS, "--dry-run").stderr
    )


BROKEN = """
import os

import psutil

for parent in psutil.Process().parents()[:2]:
    if "/cells/" in os.readlink(f"/proc/{parent.pid}/fd/2"):  # the log of a cell
        raise OSError("the disk of rewards is gone")


def advantages(rewards, groups):
    return rewards
"""


@pytest.mark.slow
def test_trainings_one_of_which_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "gone_later.py").write_text(BROKEN)
    paths = [str(tmp_path / "modules"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    (tmp_path / "mine.yaml").write_text(
        """
config: tiny
settings:
  total_train_steps: 2
  evaluation: {max_problems: 8, samples_per_problem: 1}
grid:
  advantages:
    broken: {actor.advantage_fn: "gone_later:advantages"}
    usual: {}
steps_table: true
"""
    )
    result = swept(tmp_path)
    assert result.returncode == 1, result.stderr
    assert "advantages=broken failed: exit code 2; the end of its output:\n" in result.stderr
    assert "the disk of rewards is gone" in result.stderr
    sweep = read_sweep(tmp_path / "out")
    assert list(sweep.cells["status"]) == ["failed", "complete"]
    assert list(sweep.cells["actor.advantage_fn"]) == ["gone_later:advantages", ""]
    run = sweep.rows[1].stored.run_folder
    assert run is not None
    summary = json.loads((run / "summary.json").read_text())
    assert sweep.cells["reward_after"][1] == summary["reward_after"]["mean"]
    assert list(sweep.steps["step"]) == [1, 2]
    assert (tmp_path / "out" / "steps.csv").read_text().startswith("advantages,step,version,")
