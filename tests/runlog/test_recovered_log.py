"""The log of a run that was killed and continued: cut at a checkpoint, then RunStarted again."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    Action,
    EngineLost,
    Event,
    GroupFinished,
    PauseRequested,
    RunStarted,
    Save,
    TrainStepDone,
)
from areal_lab.control.frontier import Frontier, recovered_start
from areal_lab.control.schedule import asynchronous
from areal_lab.live.snapshot import Follower
from areal_lab.pipeline.resume.positions import cut_back
from areal_lab.runlog.activity import LOST, activity
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.frames import groups_frame
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.read_run import read_run
from areal_lab.runlog.records import (
    REWARDS,
    TRAINER,
    ActionRecord,
    EventRecord,
    GroupRecord,
    Log,
    Record,
    RunHeader,
    decode,
    encode,
)
from areal_lab.runlog.replay import check_replay, limits_to_fields
from areal_lab.runlog.summary import build_summary
from tests.control.shell import Shell
from tests.control.test_coordinator_properties import SEEDS

LIMITS = Limits(
    batch_groups=2, max_in_flight=3, train_steps=4, save_every_steps=1, schedule=asynchronous(1)
)


def header(limits: Limits) -> RunHeader:
    processes = (TRAINER, REWARDS, "engine 0", "engine 1")
    fields = limits_to_fields(limits)
    return RunHeader(mode="train", started_at=1e9, limits=fields, processes=processes)


def recorded(coordinator: Coordinator, event: Event, t_s: float) -> list[Record]:
    records: list[Record] = [EventRecord(t_s, event)]
    return [*records, *(ActionRecord(t_s, action) for action in coordinator.handle(event))]


def saving(limits: Limits, random: Random) -> tuple[list[Record], Frontier]:
    """A run until its first checkpoint."""
    shell = Shell(limits)
    while shell.newest_save is None:
        shell.run(random, events=1)
    coordinator, records = Coordinator(limits), []
    for number, event in enumerate(shell.events):
        records += recorded(coordinator, event, float(number))
    return records, shell.newest_save


@given(SEEDS, st.integers(0, 3), st.sampled_from([0, 7]))
@settings(max_examples=40)
def test_a_log_that_continues_replays(seed: int, cut: int, more_steps: int) -> None:
    random = Random(seed)
    records, frontier = saving(LIMITS, random)
    while cut and isinstance(records[-1], ActionRecord) and not _saves(records[-1].action):
        records.pop()  # the run was killed while it wrote these
        cut -= 1
    shell = Shell(LIMITS, started=recovered_start(frontier, (0,), train_steps=more_steps))
    shell.run(random, events=1000)
    coordinator = Coordinator(LIMITS)
    for number, event in enumerate(shell.events, start=100):
        records += recorded(coordinator, event, float(number))
    log = Log(header(LIMITS), tuple(decode(encode(record)) for record in records))
    assert check_replay(log).agrees, check_replay(log).difference
    steps = more_steps or 4
    assert [batch.version for batch in trained_batches(log)] == list(range(1, steps + 1))
    assert set(groups_frame(log)["outcome"]) == {"trained"}
    assert (
        build_summary(log, reward_before=None, reward_after=None, wall_s=1.0, backend="embedded")[
            "steps"
        ]
        == steps
    )


def _saves(action: Action) -> bool:
    return isinstance(action, Save)


def test_nothing_that_ran_before_a_kill_runs_after_it() -> None:
    coordinator = Coordinator(LIMITS)
    records = recorded(coordinator, RunStarted((0, 1)), 0.0)
    for event in (EngineLost(1), GroupFinished(0, 0, 0), GroupFinished(1, 0, 0)):
        records += recorded(coordinator, event, 1.0)
    records.append(_group(0, 1.0))
    records += recorded(coordinator, TrainStepDone(1), 2.0)
    frontier = coordinator.frontier()
    records += recorded(coordinator, PauseRequested(), 3.0)
    coordinator = Coordinator(LIMITS)
    records += recorded(coordinator, recovered_start(frontier, (1,)), 5.0)
    log = Log(header(LIMITS), tuple(records)).lasting(6.0)
    assert pauses(log) == [(3.0, 5.0)]
    last = {process: stretches[-1] for process, stretches in activity(log).items()}
    assert not last[TRAINER].busy
    assert last["engine 0"].name == LOST
    assert last["engine 1"].busy
    frame = groups_frame(log)
    assert dict(frame["outcome"]) == {
        **dict.fromkeys((0, 1), "trained"),
        **dict.fromkeys((2, 3, 4), "running"),  # 4 is new: the engines hold version 1 now
    }
    counters = [e for e in chrome_trace(log)["traceEvents"] if e["name"] == "groups in flight"]
    assert next(iter(counters[-1]["args"].values())) == 3


def _group(group: int, t_s: float) -> GroupRecord:
    return GroupRecord(
        group=group,
        engine=0,
        t_s=t_s,
        generated_s=t_s,
        end_s=t_s,
        rewards=(1.0,),
        segments=(((0, 3),),),
        finish_reasons=("stop",),
    )


def test_readers_follow_a_run_that_continues(tmp_path: Path) -> None:
    """They read a log, which is then cut to a checkpoint and grows again."""
    (tmp_path / "metrics.jsonl").touch()
    file = tmp_path / "events.jsonl"
    records, frontier = saving(LIMITS, Random(3))
    shell = Shell(LIMITS, started=recovered_start(frontier, (0,), train_steps=9))
    shell.run(Random(4), events=1000)
    before = [encode(record) for record in [header(LIMITS), *records]]
    late = encode(EventRecord(50.0, PauseRequested()))
    file.write_text("\n".join([*before, late]) + "\n")
    run, follower = read_run(tmp_path), Follower(file)
    follower.refresh()
    assert follower.snapshot(alive=False, ended=False).paused
    cut_back(tmp_path, {"events.jsonl": len("\n".join(before)) + 1, "metrics.jsonl": 0}, 1)
    coordinator = Coordinator(LIMITS)
    more: list[Record] = []
    for number, event in enumerate(shell.events, start=60):
        more += recorded(coordinator, event, float(number))
    with file.open("a") as log:
        log.writelines(encode(record) + "\n" for record in more)
    follower.refresh()
    snapshot = follower.snapshot(alive=False, ended=True)
    assert (snapshot.status, snapshot.step, snapshot.total_steps) == ("complete", 9, 9)
    assert not snapshot.paused
    assert snapshot.error == ""
    assert [batch.version for batch in run.refresh().batches] == list(range(1, 10))
