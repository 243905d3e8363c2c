"""The writer of events.jsonl."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys

import pytest

from areal_lab.control.events import Interrupt, RunStarted, StartGroup
from areal_lab.runlog.activity import PAUSED
from areal_lab.runlog.file import EventLog, read_log_file
from areal_lab.runlog.records import GroupRecord, MetricRecord, RunHeader, SpanRecord

HEADER = RunHeader(
    mode="train", started_at=1000.0, limits={"eta": math.inf}, processes=("trainer", "engine 0")
)


class Clock:
    """Seconds since the epoch that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_what_is_written_is_read_in_seconds_since_the_start(tmp_path):
    clock = Clock()
    with EventLog(tmp_path / "events.jsonl", HEADER, clock=clock) as log:
        log.event(RunStarted((0,)))
        clock.now_s = 1002.5
        log.action(StartGroup(0, 0, 0))
        log.span("trainer", "forward/backward", 1001.0, 1002.0, {"tokens": 7.0})
        log.group(
            group=0,
            engine=0,
            start_s=1001.0,
            generated_s=1003.0,
            end_s=1004.0,
            samples=[{"segments": [[0, 2], [1, 3]], "reward": 1, "finish_reason": "stop"}],
        )
        log.metric("trainer", "peak_rss_bytes", 2.0)
    read = read_log_file(tmp_path / "events.jsonl")
    assert read.header == HEADER
    assert [record.t_s for record in read.events] == [0.0]
    assert [record.t_s for record in read.actions] == [2.5]
    assert read.records[2:] == (
        SpanRecord(
            process="trainer", name="forward/backward", t_s=1.0, end_s=2.0, args={"tokens": 7.0}
        ),
        GroupRecord(
            group=0,
            engine=0,
            t_s=1.0,
            generated_s=3.0,
            end_s=4.0,
            rewards=(1.0,),
            segments=(((0, 2), (1, 3)),),
            finish_reasons=("stop",),
        ),
        MetricRecord(process="trainer", name="peak_rss_bytes", t_s=2.5, value=2.0),
    )


def test_each_line_is_on_its_way_before_the_call_returns(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, HEADER, clock=Clock())
    for count in range(3):
        log.action(Interrupt())
        assert len(list(read_log_file(path).actions)) == count + 1
    log.close()


def test_a_log_is_never_appended_to_another_run(tmp_path):
    path = tmp_path / "events.jsonl"
    EventLog(path, HEADER, clock=Clock()).close()
    with pytest.raises(FileExistsError):
        EventLog(path, HEADER, clock=Clock())


def test_a_clock_that_is_set_back_does_not_set_the_log_back(tmp_path):
    clock = Clock()
    with EventLog(tmp_path / "events.jsonl", HEADER, clock=clock) as log:
        clock.now_s = 1005.0
        log.action(Interrupt())
        clock.now_s = 1001.0
        log.action(Interrupt())
        log.span("trainer", "save", 1004.0, 1003.0)
        log.span("trainer", "save", 900.0, 950.0)
    read = read_log_file(tmp_path / "events.jsonl")
    assert [record.t_s for record in read.actions] == [5.0, 5.0]
    assert [(span.t_s, span.end_s) for span in read.spans] == [(4.0, 4.0), (0.0, 0.0)]


def test_spans_of_doing_nothing_have_a_cause_or_are_left_to_the_events(tmp_path):
    with EventLog(tmp_path / "events.jsonl", HEADER, clock=Clock()) as log:
        log.span("engine 0", "paused", 1000.0, 1001.0)
        log.span("engine 0", "idle", 1001.0, 1002.0)
        log.span("engine 0", "load_weights", 1002.0, 1003.0)
        log.span("engine 0", "wait", 1003.0, 1004.0, cause="a port")
    spans = list(read_log_file(tmp_path / "events.jsonl").spans)
    assert [(span.name, span.cause) for span in spans] == [
        ("paused", PAUSED),
        ("load weights", ""),
        ("wait", "a port"),
    ]


WRITE_UNTIL_KILLED = """
import sys, time
from pathlib import Path
from areal_lab.runlog.records import RunHeader
from areal_lab.control.events import Drop
from areal_lab.runlog.file import EventLog
header = RunHeader(mode="train", started_at=0.0, limits={}, processes=())
log = EventLog(Path(sys.argv[1]), header, clock=time.time)
number = 0
while True:
    log.action(Drop(number, "x" * 3000))
    number += 1
    if number == 50:
        print("fifty", flush=True)
"""


def test_a_killed_writer_leaves_a_readable_log(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE
    )
    with writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
    groups = [record.action.group for record in read_log_file(path).actions]
    assert len(groups) >= 50
    assert groups == list(range(len(groups)))


def test_a_line_cut_inside_a_character_is_left_out(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path, HEADER, clock=Clock()) as log:
        log.action(Interrupt())
    path.write_bytes(path.read_bytes() + '{"kind":"metric","process":"ü'.encode()[:-1])
    read = read_log_file(path)
    assert read.cut
    assert len(read.records) == 1
