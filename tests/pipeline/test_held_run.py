"""A run that is held: in this program, in another process, and by a program that ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import areal_lab
from areal_lab.config.problem import ConfigError
from areal_lab.control.events import (
    Drop,
    EtaRequested,
    PauseRequested,
    Request,
    ResumeRequested,
    StartGroup,
    StopRequested,
    Train,
)
from areal_lab.live.attach import AttachedRun
from areal_lab.live.mailbox import RequestRefused, RunEnded
from areal_lab.live.presence import read_presence
from areal_lab.pipeline import console
from areal_lab.pipeline.train import TrainingRun
from areal_lab.runlog.incidents import requests
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.replay import check_replay
from tests.pipeline.rewards import even_digits
from tests.pipeline.test_run import children_of, ends_within
from tests.pipeline.tiny_run import tiny_config, trained_samples
from tests.warm import ForkedPopen

SAMPLES, LONGEST = 4, 12
"""Samples of a group, and tokens of a response, as `tiny_config` has them."""
WAIT_S = 120.0
"""Longest wait for a run to get somewhere; it takes a few seconds on a quiet machine."""


def wait_until(run: AttachedRun | TrainingRun, reached: Callable[[], bool]) -> None:
    """Wait until the run gets there; fail if it ends first or takes too long."""
    for _ in range(int(WAIT_S / 0.05)):
        if reached():
            return
        if run.wait(0.05):
            break
    assert reached(), run.snapshot()


def check_that_nothing_is_lost(folder: Path) -> None:
    """Every group was trained on once, or dropped at the end; no token of theirs is missing."""
    log = read_events(folder)
    replay = check_replay(log)
    assert replay.agrees, replay.difference
    started = {r.action.group for r in log.actions if isinstance(r.action, StartGroup)}
    trained = [g for r in log.actions if isinstance(r.action, Train) for g in r.action.groups]
    dropped = {r.action.group: r.action.reason for r in log.actions if isinstance(r.action, Drop)}
    assert len(trained) == len(set(trained))
    assert started == set(trained) | dropped.keys()
    assert not set(trained) & dropped.keys()
    assert set(dropped.values()) <= {"run ended"}
    samples = [sample for step in trained_samples(folder) for sample in step]
    assert sorted((s["group"], s["sample"]) for s in samples) == sorted(
        (group, sample) for group in trained for sample in range(SAMPLES)
    )
    recorded = {group.group: group.segments for group in log.groups}
    for sample in samples:
        parts = [(part["version"], len(part["tokens"])) for part in sample["parts"]]
        assert tuple(parts) == recorded[sample["group"]][sample["sample"]]
        versions = [version for version, _ in parts]
        assert versions == sorted(versions)
        assert all(len(part["tokens"]) == len(part["logprobs"]) for part in sample["parts"])
        tokens = sum(count for _, count in parts)
        assert sample["finish_reason"] in ("stop", "length")
        assert tokens == LONGEST or sample["finish_reason"] == "stop"


def test_a_run_is_held_paused_resumed_and_stops_when_it_is_let_go(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "total_train_steps=100000", "eta=2")
    run = areal_lab.train(config, reward_fn=even_digits)
    assert (repr(run), run.reports, run.running) == ("<run, not started>", (), False)
    for early in ("pause", "stop", "snapshot", "wait"):
        with pytest.raises(RuntimeError, match="has not started"):
            getattr(run, early)()
    assert run.start() is run
    with pytest.raises(RuntimeError, match="is started once"):
        run.start()
    folder = run.folder
    assert (folder / "config.yaml").is_file()
    assert (run.snapshot().state, run.running, run.reports) == ("starting", True, ())
    assert run.pause() == "queued until training starts"
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = run.summary
    wait_until(run, lambda: run.snapshot().state == "paused")
    resting = run.snapshot()
    assert resting.waiting_for == "a request to resume"
    assert resting.counts is not None
    assert (resting.counts.started, resting.step) == (6, 0)
    assert not run.wait(0.5)
    later = run.snapshot()  # what was generated before the pause may still be scored
    assert later.counts is not None
    assert (later.state, later.counts.started, later.counts.trained) == ("paused", 6, 0)
    assert run.set_eta(0.5) == "eta is 0.5 (was 2)"
    with pytest.raises(RequestRefused, match="eta is -1"):
        run.set_eta(-1)
    assert run.resume() == "the run continues"
    steps = [report.step for report, _ in zip(run, range(3), strict=False)]
    assert steps == [1, 2, 3]  # from the first on, and leaving this loop stops nothing
    assert run.running
    assert len(run.reports) >= 3
    attached = areal_lab.attach_run(folder)
    assert "eta 0.5" in repr(run)
    assert attached.alive
    assert attached.pause() == "the run is paused"
    assert [one.folder for one in areal_lab.live_runs(config.run_dir)] == [folder]
    del run
    gc.collect()  # tracebacks of the errors above refer to it
    assert attached.wait(WAIT_S)
    ended = attached.snapshot()
    assert (ended.state, ended.status, ended.error) == ("ended", "stopped", "")
    check_that_nothing_is_lost(folder)
    asked = [request for _, request in requests(attached.read().log)]
    paused = [PauseRequested(), EtaRequested(0.5), ResumeRequested(), PauseRequested()]
    assert asked == [*paused, StopRequested()]
    assert attached.read().summary["pauses"] == 2
    with pytest.raises(RunEnded, match="is not alive"):
        attached.resume()


def test_an_error_of_a_held_run_is_kept_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise OSError("no engine starts here")

    monkeypatch.setattr("areal_lab.pipeline.run.start_run", fail)
    run = areal_lab.train(tiny_config(tmp_path)).start()
    with pytest.raises(OSError, match="no engine starts here"):
        run.wait()
    assert str(run.error) == "no engine starts here"
    assert not run.running
    with pytest.raises(OSError, match="no engine starts here"):
        _ = run.summary
    with pytest.raises(OSError, match="no engine starts here"):
        list(run)
    assert repr(run).endswith("ended (failed); no engine starts here>")


def test_a_run_that_is_stopped_at_once_before_it_began_has_ended(tmp_path: Path) -> None:
    run = areal_lab.train(tiny_config(tmp_path)).start()
    run.stop(at_once=True)
    with pytest.raises(asyncio.CancelledError):
        run.wait()
    assert run.snapshot().state == "ended"
    assert areal_lab.live_runs(tmp_path / "runs") == []


def test_a_program_that_ends_leaves_nothing_running(tmp_path: Path) -> None:
    tiny_config(tmp_path)  # writes the model
    program = textwrap.dedent(
        f"""
        import psutil, areal_lab
        from pathlib import Path
        from tests.pipeline.tiny_run import tiny_config
        run = areal_lab.train(tiny_config(Path({str(tmp_path)!r}), "total_train_steps=100000"))
        for report in run.start():
            break
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    children = [int(word) for word in done.stdout.split()]
    assert len(children) >= 3  # the trainer, an engine, a reward worker
    for child in children:
        assert ends_within(child, 15.0), f"process {child} outlived the program"
    (folder,) = (tmp_path / "runs").iterdir()
    ended = areal_lab.attach_run(folder).snapshot()
    assert (ended.state, ended.status) == ("ended", "stopped at once"), done.stderr


# --- in another process --------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AttachedRun]]:
    """Starts runs in other processes, and ends those that a failing test leaves behind."""
    runs: list[AttachedRun] = []

    def popen(command: list[str], **options: Any) -> ForkedPopen:
        assert options["start_new_session"]  # a forked command has one in any case
        return ForkedPopen(command, **options)

    monkeypatch.setattr(
        console, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
    )

    def start_run(*overrides: str) -> AttachedRun:
        config = tiny_config(
            tmp_path, "reward.fn=tests.pipeline.rewards:even_digits", "eta=2", *overrides
        )
        runs.append(areal_lab.start_run(config))
        return runs[-1]

    yield start_run
    for run in runs:
        presence = read_presence(run.folder)
        if presence is not None and presence.alive:
            os.killpg(presence.process.pid, signal.SIGKILL)


def ask_something(run: AttachedRun, random: Random) -> None:
    """One sequence: a few requests with more or less of the run between them, then a resume.

    A run of few steps may reach its last one while it is asked.
    """
    for _ in range(random.randint(1, 4)):
        match random.choice(["pause", "pause", "resume", "eta"]):
            case "pause":
                run.pause()
            case "resume":
                run.resume()
            case _:
                run.set_eta(random.choice([0, 0.5, 1, 3, float("inf")]))
        if random.random() < 0.5:
            run.wait(random.choice([0.01, 0.1, 0.3]))
    run.resume()
    before = run.snapshot().step
    wait_until(run, lambda: (now := run.snapshot()).step > before or now.step == now.total_steps)


def ask_much(run: AttachedRun, random: Random, sequences: int) -> None:
    wait_until(run, lambda: run.snapshot().state == "training")
    for _ in range(sequences):
        ask_something(run, random)


@pytest.mark.slow
def test_random_requests_from_another_process_lose_no_sample(
    start: Callable[..., AttachedRun],
) -> None:
    run, random = start("total_train_steps=100000", "rollout.max_concurrent_rollouts=8"), Random(1)
    ask_much(run, random, sequences=5)
    run.pause()  # a stop ends a pause as well
    assert run.stop() == "the run stops after the running step"
    assert run.wait(WAIT_S)
    check_that_nothing_is_lost(run.folder)
    assert run.snapshot().status == "stopped"
    kinds: set[type[Request]] = {type(request) for _, request in requests(run.read().log)}
    assert kinds == {PauseRequested, ResumeRequested, EtaRequested, StopRequested}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_hundred_random_sequences_of_requests_lose_no_sample(
    start: Callable[..., AttachedRun], seed: int
) -> None:
    """Ten in each of ten runs: half of them are stopped, half train all their steps."""
    random, completes = Random(seed), seed % 2 == 0
    steps = 60 if completes else 100000
    order = ("oldest_finished_first", "strict_start_order")[seed % 2]
    interruptible = "true" if seed % 3 else "false"
    run = start(
        f"total_train_steps={steps}",
        f"rollout.batch_order={order}",
        f"rollout.interruptible={interruptible}",
        "rollout.max_concurrent_rollouts=8",
        f"seed={seed}",
    )
    try:
        ask_much(run, random, sequences=10)
    except RequestRefused as refused:  # a run of few steps may train its last one while it is asked
        if not completes or "training is over" not in str(refused):
            raise
    except RunEnded:  # or end before it reads the request
        if not completes:
            raise
    if not completes:
        random.choice([run.pause, run.resume])()
        run.stop()
    assert run.wait(WAIT_S)
    check_that_nothing_is_lost(run.folder)
    assert run.snapshot().status == ("complete" if completes else "stopped")
    if completes:
        assert len(trained_samples(run.folder)) == steps


def test_a_detached_run_survives_its_starter_and_a_killed_one_is_not_alive(
    tmp_path: Path, start: Callable[..., AttachedRun]
) -> None:
    run = start("total_train_steps=100000")
    presence = read_presence(run.folder)
    assert presence is not None
    pid = presence.process.pid
    assert os.getpgid(pid) == pid != os.getpgid(0)  # Ctrl-C in this terminal does not reach it
    wait_until(run, lambda: run.snapshot().step >= 1)
    assert read_presence(run.folder).key == presence.key  # type: ignore[union-attr]
    run.pause()
    children = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert run.wait(WAIT_S)
    killed = run.snapshot()
    assert (killed.state, killed.alive) == ("killed", False)
    assert areal_lab.live_runs(tmp_path / "runs") == []
    with pytest.raises(RunEnded):
        run.resume()
    for child in children:
        assert ends_within(child, 15.0), f"process {child} outlived the run"


def test_a_detached_run_that_cannot_start_says_why(
    tmp_path: Path, start: Callable[..., AttachedRun]
) -> None:
    with pytest.raises(ConfigError, match="ppo_n_minibatches"):
        start("actor.ppo_n_minibatches=999")
    assert not (tmp_path / "runs").exists()
    run = start()
    (run.folder / "config.yaml").write_text("not a config")
    assert run.wait(WAIT_S)
    assert run.snapshot().state == "killed"
    assert run.snapshot().error
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a process that was not waited for is a warning
        del run
