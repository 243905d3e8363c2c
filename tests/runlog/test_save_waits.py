"""How long training waited for checkpoints, by hand."""

from __future__ import annotations

from pathlib import Path

from areal_lab.control.events import (
    Action,
    CheckpointCopied,
    CheckpointDone,
    Event,
    RunStarted,
    Save,
    Train,
    TrainStepDone,
)
from areal_lab.runlog.file import EventLog, read_log_file
from areal_lab.runlog.records import RunHeader
from areal_lab.runlog.summary import save_waits


def waits(tmp_path: Path, *entries: tuple[float, Event | Action]) -> list[float]:
    now_s = 0.0
    header = RunHeader(mode="train", started_at=0.0, limits={}, processes=("trainer",))
    path = tmp_path / "events.jsonl"
    with EventLog(path, header, clock=lambda: now_s) as log:
        for at_s, entry in entries:
            now_s = at_s
            (log.action if isinstance(entry, Save | Train) else log.event)(entry)  # type: ignore[arg-type]
    return list(save_waits(read_log_file(path)))


def test_a_checkpoint_that_training_waits_for_costs_all_of_its_time(tmp_path: Path) -> None:
    assert waits(
        tmp_path,
        (0.0, RunStarted((0,))),
        (1.0, TrainStepDone(1)),
        (1.0, Save(1)),
        (3.5, CheckpointDone(1)),
        (9.0, TrainStepDone(2)),
        (9.0, Save(2)),
        (10.0, CheckpointDone(2)),
    ) == [2.5, 1.0]


def test_one_beside_training_costs_the_copy_and_what_was_left_of_the_one_before(
    tmp_path: Path,
) -> None:
    assert waits(
        tmp_path,
        (0.0, RunStarted((0,))),
        (1.0, TrainStepDone(1)),
        (1.0, Save(1)),
        (1.5, CheckpointCopied(1)),
        (1.5, Train(1, (1,))),
        (2.0, TrainStepDone(2)),  # while the first one is written, until
        (6.0, CheckpointDone(1)),
        (6.0, Save(2)),
        (6.5, CheckpointCopied(2)),
        (7.0, CheckpointDone(2)),  # before the next step ends
        (8.0, TrainStepDone(3)),
        (8.0, Save(3)),
        (8.25, CheckpointCopied(3)),
    ) == [0.5, 4.5, 0.25]


def test_a_checkpoint_that_a_kill_interrupted_does_not_count(tmp_path: Path) -> None:
    assert waits(
        tmp_path,
        (0.0, RunStarted((0,))),
        (1.0, TrainStepDone(1)),
        (1.0, Save(1)),
        (2.0, RunStarted((0,))),
        (5.0, TrainStepDone(1)),
        (5.0, Save(1)),
        (5.5, CheckpointDone(1)),
    ) == [0.5]
