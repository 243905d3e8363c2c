"""Runs in processes of their own: ranks equal one process, stops, errors, sinks, the command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.offline import OfflineConfig
from areal_lab.config.problem import ConfigError
from areal_lab.host.processes import Child, ChildDied, start_child
from areal_lab.live.presence import read_presence
from areal_lab.offline import console
from areal_lab.offline.console import perform
from areal_lab.offline.resume import find_resumable
from areal_lab.offline.start import begin, resolve_offline
from areal_lab.shell.display import Silent
from areal_lab.shell.stop import StopSignal
from tests.offline.rank_checks import CASES, RANKS
from tests.offline.small import config_for, metrics_of, run_here, write_rows
from tests.training.tiny import save_model
from tests.warm import ForkedPopen

ROOT = Path(__file__).parents[2]


class Heard(Silent):
    """Keeps what is shown, and may act on it."""

    def __init__(self, act: Callable[[str], object] = lambda _: None) -> None:
        self.lines: list[str] = []
        self._act = act

    def phase(self, text: str) -> None:
        """Keep a phase."""
        self.note(text)

    def note(self, text: str) -> None:
        """Keep a note."""
        self.lines.append(text)
        self._act(text)


def in_processes(
    config: OfflineConfig,
    *,
    heard: Heard | None = None,
    stop: StopSignal | None = None,
    resume: Path | None = None,
) -> tuple[dict[str, Any], Path]:
    """Run a config in processes of its own."""
    found = None if resume is None else find_resumable("sft", resume)
    job = begin(resolve_offline(config), found)
    summary = asyncio.run(perform(job, display=heard or Heard(), stop=stop or StopSignal()))
    return summary, job.folder


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    for kind in CASES:
        save_model(tmp_path / kind)
    ranks = [
        ForkedPopen(
            [sys.executable, "-m", "tests.offline.rank_checks", str(tmp_path), str(rank)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(t[-2000:] for t in told)


@pytest.mark.slow
def test_a_run_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    one, there = run_here(config_for("sft", tmp_path))
    heard = Heard()
    two, folder = in_processes(config_for("sft", tmp_path, actor__processes=2), heard=heard)
    assert two["processes"] == 2
    assert two["held_out_after"]["loss"] == pytest.approx(one["held_out_after"]["loss"], abs=1e-5)
    for left, right in zip(metrics_of(folder), metrics_of(there.folder), strict=True):
        assert left["step"] == right["step"]
        for name in ("loss", "grad_norm", "held_out_loss", "trained_tokens", "epoch"):
            assert left.get(name) == pytest.approx(right.get(name), abs=1e-5)
    assert any(line.startswith("step   5/5") for line in heard.lines)
    assert not list(folder.glob(".ranks-*"))
    presence = read_presence(folder)
    assert presence is not None
    assert presence.ended


def test_a_requested_stop_saves_and_the_run_continues(tmp_path: Path) -> None:
    config = config_for("sft", tmp_path, total_train_steps=2000)
    stop = StopSignal()
    heard = Heard(lambda text: stop.request() if text.startswith("step") else None)
    summary, folder = in_processes(config, heard=heard, stop=stop)
    assert summary["status"] == "stopped"
    done = summary["steps"]
    assert 1 <= done < 2000
    assert (folder / "model").resolve().name == f"step-{done:05d}"
    goal = {"total_train_steps": done + 2}
    again, _ = in_processes(config.with_settings(goal), resume=folder)
    assert [line["step"] for line in metrics_of(folder)][: done + 1] == list(range(done + 1))
    assert again["status"] in ("complete", "stopped")


def test_data_that_cannot_be_used_is_an_error_of_settings(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        *({"prompt": f"{n}+1=", "response": "1" * 300} for n in range(20)),
    )
    config = config_for("sft", tmp_path, dataset__type="jsonl", dataset__path=str(path))
    with pytest.raises(ConfigError, match="has 306 tokens, but a row may have at most 256"):
        in_processes(config)
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "has 306 tokens" in summary["error"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    config = config_for("sft", tmp_path, total_train_steps=5000, actor__processes=2)
    started: list[Child] = []

    async def start(*arguments: Any, **options: Any) -> Child:
        started.append(await start_child(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(console, "start_child", start)
    heard = Heard(
        lambda text: os.kill(started[rank].pid, signal.SIGKILL) if text[:4] == "step" else None
    )
    name = "trainer rank 1" if rank else "trainer"
    with pytest.raises(ChildDied, match=f"{name} .*was killed by SIGKILL"):
        in_processes(config, heard=heard)
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] >= 1
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(child.pid, 0)
