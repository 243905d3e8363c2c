"""A run folder that grows, seen from outside: without a run, by appending what one has written."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import areal_lab
from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    EngineJoined,
    EngineLost,
    EtaRequested,
    Finish,
    PauseRequested,
    ResumeRequested,
    RunStarted,
    StopRequested,
)
from areal_lab.control.schedule import asynchronous
from areal_lab.live.attach import OUTPUT, AttachedRun, attach_run, live_runs
from areal_lab.live.mailbox import RunEnded, open_mailbox
from areal_lab.live.presence import FILE, Present, new_presence, write_presence
from areal_lab.live.snapshot import Snapshot, snapshot_of
from areal_lab.runlog.activity import PAUSED_BY_HAND, activity
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import ActionRecord, EventRecord, GroupRecord, RunHeader, decode
from tests.pipeline.fake_run import HELD_OUT_S, write_fake_run

LIMITS = Limits(batch_groups=3, max_in_flight=6, train_steps=5, schedule=asynchronous(2))
ASKED = (
    (3.0, PauseRequested()),
    (9.0, EtaRequested(1)),
    (9.5, ResumeRequested()),
    (14.0, EngineLost(1, tokens_kept=True, returns=True)),
    (14.5, EngineJoined(1)),
    (15.0, EtaRequested(math.inf)),
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was paused, lost an engine, and got two other etas."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return write_fake_run(folder, LIMITS, requests=ASKED, engines=2)


class Growing:
    """A copy of a run folder whose log is written again, line by line."""

    def __init__(self, recorded: Path, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.lines = (recorded / "events.jsonl").read_text().splitlines(keepends=True)
        self.present = Present(folder)
        self.present.enter("loading the model")

    def grow(self) -> Iterator[RunHeader | EventRecord | ActionRecord | GroupRecord]:
        """Append the log, line by line, in two pieces each; yields what counts."""
        for line in self.lines:
            middle = len(line) // 2
            for piece in (line[:middle], line[middle:]):
                with (self.folder / "events.jsonl").open("a") as file:
                    file.write(piece)
            record = decode(line)
            if isinstance(record, RunHeader | EventRecord | ActionRecord | GroupRecord):
                yield record


def test_a_snapshot_says_what_the_coordinator_of_the_run_says(
    recorded: Path, tmp_path: Path
) -> None:
    growing = Growing(recorded, tmp_path / "run")
    run = attach_run(growing.folder)
    assert str(run.snapshot()) == "starting; loading the model"
    coordinator, tokens, states = Coordinator(LIMITS), 0, set()
    for record in growing.grow():
        now = run.snapshot()
        match record:
            case EventRecord(event=event):
                coordinator.handle(event)
                if isinstance(event, EngineLost):
                    assert now.lost_engines == (1,)
            case GroupRecord():
                tokens += sum(n for sample in record.segments for _, n in sample)
            case ActionRecord(action=Finish()):
                assert now.state == "ending"
                break
            case RunHeader():
                assert now.state == "starting"
                assert (now.eta, now.total_steps) == (2, 5)
                continue
            case _:
                continue
        states.add(now.state)
        assert now.alive is True
        assert now.counts == coordinator.counts
        assert now.engine_loads == coordinator.engine_loads
        assert now.eta == coordinator.limits.schedule.eta
        assert now.paused == coordinator.paused == (now.state == "paused")
        assert now.generated_tokens == tokens
        assert (now.step, now.total_steps) == (coordinator.counts.trained_version, 5)
        if now.state != "ending":
            assert now.waiting_for == coordinator.waiting_for()
            assert now.waiting_for in str(now)
    assert states >= {"training", "paused"}
    assert now.lost_engines == ()
    assert tokens > 0


def test_the_end_of_a_run_is_told_from_its_death(recorded: Path, tmp_path: Path) -> None:
    growing = Growing(recorded, tmp_path / "run")
    run = attach_run(growing.folder)
    for record in growing.grow():
        if isinstance(record, EventRecord) and isinstance(record.event, PauseRequested):
            break
    assert not run.wait(timeout_s=0)
    dead = new_presence(os.getpid(), "training")
    earlier = dead.process.started_ticks - 1
    gone = type(dead.process)(
        host=dead.process.host, boot=dead.process.boot, pid=os.getpid(), started_ticks=earlier
    )
    write_presence(
        run.folder, type(dead)(key="k", process=gone, started_s=0, phase="", phase_since_s=0)
    )
    assert run.wait()
    killed = run.snapshot()
    assert (killed.state, killed.alive, killed.waiting_for) == ("killed", False, "")
    assert str(killed).startswith("killed; step ")
    (run.folder / OUTPUT).parent.mkdir()
    (run.folder / OUTPUT).write_text("loading\nMemoryError: too large\n")
    assert run.snapshot().error == "MemoryError: too large"
    with pytest.raises(RunEnded, match="is not alive"):
        run.resume()
    summary = {"status": "failed", "error": "the trainer broke\nTraceback"}
    (run.folder / "summary.json").write_text(json.dumps(summary))
    failed = run.snapshot()
    assert (failed.state, failed.status) == ("ended", "failed")
    assert str(failed).endswith("; the trainer broke")
    assert str(failed).startswith("ended (failed); ")


def test_a_stop_shows_before_the_end(tmp_path: Path) -> None:
    limits = Limits(batch_groups=3, max_in_flight=6, schedule=asynchronous(2))
    source = write_fake_run(tmp_path / "source", limits, requests=((8.0, StopRequested()),))
    growing = Growing(source, tmp_path / "run")
    run, states = attach_run(growing.folder), []
    for _ in growing.grow():
        states.append(run.snapshot().state)
    assert list(dict.fromkeys(states)) == ["starting", "training", "ending"]
    assert run.snapshot().status == "stopped"
    growing.present.leave()
    assert run.snapshot().state == "ended"


def test_a_run_of_another_machine_may_be_alive(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    Growing(recorded, folder)
    elsewhere = json.loads((folder / FILE).read_text())
    elsewhere["process"] |= {"host": "elsewhere", "boot": "another boot"}
    (folder / FILE).write_text(json.dumps(elsewhere))
    run = attach_run(folder)
    assert run.alive is None
    assert "as far as can be seen from this machine" in str(run.snapshot())
    assert [one.folder for one in live_runs(tmp_path)] == [folder]
    open_mailbox(folder)
    with pytest.raises(TimeoutError, match="did not reply"):
        run.pause(timeout_s=0.1)


def test_live_runs_are_those_whose_process_runs_newest_first(
    recorded: Path, tmp_path: Path
) -> None:
    assert live_runs(tmp_path / "nowhere") == []
    folders = [tmp_path / name for name in ("first", "ended", "second")]
    for folder in folders:
        Growing(recorded, folder)
    ended = Present(folders[1])
    ended.enter("starting")
    ended.leave()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / FILE).write_text("{")
    shutil.copytree(recorded, tmp_path / "older")
    found = areal_lab.live_runs(str(tmp_path))
    assert [run.folder for run in found] == [folders[2], folders[0]]
    assert isinstance(found[0], AttachedRun)
    assert repr(found[0]) == "<run second: starting; loading the model>"


def test_a_run_that_is_older_than_requests_can_be_read_and_not_asked(recorded: Path) -> None:
    run = areal_lab.attach_run(str(recorded))
    assert run.alive is False
    assert run.wait()
    with pytest.raises(areal_lab.RunEnded, match=r"has no process\.json: the run is older"):
        run.stop()
    now = run.snapshot()
    assert isinstance(now, Snapshot)
    assert (now.step, now.status) == (5, "complete")


def test_what_was_recorded_is_read_once(recorded: Path, tmp_path: Path) -> None:
    growing = Growing(recorded, tmp_path / "run")
    run = attach_run(growing.folder)
    with pytest.raises(ValueError, match=r"has no events\.jsonl"):
        run.read()
    steps = []
    for record in growing.grow():
        if isinstance(record, EventRecord) and not isinstance(record.event, RunStarted):
            steps.append(len(run.read().batches))
    assert steps == sorted(steps)
    assert steps[-1] == 5
    assert run.read() is run.read()


def test_a_recorded_run_says_what_it_waited_for_at_any_moment(recorded: Path) -> None:
    log = read_events(recorded)
    coordinator = Coordinator(LIMITS)
    for record in log.records:
        if isinstance(record, EventRecord):
            coordinator.handle(record.event)
    whole = snapshot_of(log)
    assert (whole.state, whole.status, whole.alive) == ("ended", "complete", False)
    assert whole.counts == coordinator.counts
    paused = snapshot_of(log.until(HELD_OUT_S + 8.9))
    assert (paused.state, paused.waiting_for, paused.eta) == ("paused", "a request to resume", 2)
    assert snapshot_of(log.until(1.0)).state == "starting"


def test_the_log_of_a_live_run_lasts_until_now_and_that_of_an_ended_one_does_not(
    recorded: Path, tmp_path: Path
) -> None:
    growing = Growing(recorded, tmp_path / "run")
    for record in growing.grow():
        if isinstance(record, EventRecord) and isinstance(record.event, PauseRequested):
            break
    run = attach_run(growing.folder)
    written_s = run.read().log.end_s
    now = run.log_until_now()
    assert written_s < now.end_s < written_s + 60  # since the last line was written
    assert pauses(now)[-1][1] == now.end_s
    assert activity(now)["engine 0"][-1].name == PAUSED_BY_HAND
    growing.present.leave()
    assert run.log_until_now().end_s == written_s


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a folder \(looked in"):
        attach_run(tmp_path / "nothing")
    with pytest.raises(ValueError, match="is not a run folder: it has no"):
        attach_run(tmp_path)


def test_a_log_that_cannot_be_followed_says_why(recorded: Path, tmp_path: Path) -> None:
    growing = Growing(recorded, tmp_path / "run")
    text = "".join(growing.lines)
    twice = next(line for line in growing.lines if '"TrainStepDone"' in line)
    (growing.folder / "events.jsonl").write_text(text.replace(twice, twice + twice))
    now = attach_run(growing.folder).snapshot()
    assert "cannot be followed" in now.error
    assert "version 2 was expected" in now.error
