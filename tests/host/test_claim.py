"""A run folder is that of the process that wrote process.json last."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.host.claim import Claim, RunTaken, claim_of
from areal_lab.live.presence import Present, new_presence, write_presence
from areal_lab.pipeline.resume.checkpoints import apply_retention
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import RunHeader

HEADER = RunHeader(mode="train", started_at=0.0, limits={}, processes=("trainer",))


def continue_elsewhere(folder: Path) -> None:
    """Another host continues the run."""
    mine = new_presence(os.getpid(), "starting")
    process = replace(mine.process, host="elsewhere", boot="another", pid=7)
    write_presence(folder, replace(mine, process=process))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture
def present(tmp_path: Path) -> Present:
    found = Present(tmp_path)
    found.enter("starting")
    return found


def test_what_this_process_writes_itself_leaves_its_claim(tmp_path: Path, present: Present) -> None:
    claim = present.claim
    claim.check()
    present.phase("training")
    claim.check()
    present.leave()
    assert not claim.taken
    assert claim_of(tmp_path).key == present.key
    (tmp_path / "process.json").unlink()
    claim.check()


def test_the_one_that_has_it_is_named(tmp_path: Path, present: Present) -> None:
    claim = present.claim
    claim.check()
    continue_elsewhere(tmp_path)
    with pytest.raises(RunTaken, match=f"process 7 on host elsewhere .* the run {tmp_path}"):
        claim.check()
    assert claim.taken
    assert not claim_of(tmp_path).taken


WRITERS: dict[str, Callable[[RunFolder, EventLog, Present], object]] = {
    "event": lambda _folder, log, _present: log.metric("trainer", "peak_rss_bytes", 1.0),
    "summary": lambda folder, _log, _present: folder.write_json("summary.json", {}),
    "metrics": lambda folder, _log, _present: folder.append_metrics({"step": 1}),
    "trajectories": lambda folder, _log, _present: folder.write_trajectories(1, [], [], special={}),
    "link": lambda folder, _log, _present: folder.point("model", folder.checkpoint(1)),
    "retention": lambda folder, _log, _present: apply_retention(folder, keep=1),
    "phase": lambda _folder, _log, present: present.phase("training"),
    "end": lambda _folder, _log, present: present.leave(),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_nothing_is_written_into_the_folder_of_another_process(
    tmp_path: Path, present: Present, write: Callable[[RunFolder, EventLog, Present], object]
) -> None:
    folder = RunFolder(tmp_path, present.claim)
    for name in ("trajectories", "checkpoints/step-00001", "checkpoints/step-00002"):
        (tmp_path / name).mkdir(parents=True)
    with EventLog(folder.events, HEADER, clock=lambda: 1.0, claim=folder.claim) as log:
        continue_elsewhere(tmp_path)
        before = contents(tmp_path)
        with pytest.raises(RunTaken):
            write(folder, log, present)
    assert contents(tmp_path) == before
    assert (tmp_path / "checkpoints" / "step-00001").exists()


def test_a_folder_without_a_claim_is_written(tmp_path: Path) -> None:
    continue_elsewhere(tmp_path)
    RunFolder(tmp_path).append_metrics({"step": 1})
    Claim(tmp_path / "of another host", "key").check()
