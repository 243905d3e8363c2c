"""Files of a run when the disk takes no more: each line is whole, each file is old or new."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineRetired
from areal_lab.host.durable import WriteError
from areal_lab.live.mailbox import Inbox, open_mailbox
from areal_lab.resolve.limits import limits_of
from areal_lab.runlog.file import EventLog, read_log_file
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward, append_held_out
from areal_lab.runlog.records import RunHeader
from areal_lab.runlog.replay import limits_to_fields
from areal_lab.runlog.token_columns import TokenFields, write_fields
from tests.fuzz import one_line

LIMIT = 9000


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit on the size of files, which the kernel enforces as it does the end of a disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def repeat(write: Callable[[], object]) -> None:
    """Write until it fails."""
    for _ in range(LIMIT):
        write()


def test_no_writer_of_a_run_leaves_half_a_line_or_half_a_file(tmp_path: Path) -> None:
    folder = RunFolder.create(TrainConfig(run_dir=str(tmp_path)))
    open_mailbox(folder.path)
    header = RunHeader(
        mode="train",
        started_at=0.0,
        limits=limits_to_fields(limits_of(TrainConfig())),
        processes=("trainer",),
    )
    column = np.random.default_rng(1).normal(size=LIMIT)
    fields = TokenFields(np.array([0]), np.array([LIMIT]), column[:1], *[column] * 3, {})
    samples = folder.path / "trajectories"
    with EventLog(folder.events, header, clock=lambda: 1.0) as log:
        writers: dict[str, Callable[[], object]] = {
            "events.jsonl": lambda: log.event(EngineRetired(0)),
            "metrics.jsonl": lambda: folder.append_metrics({"step": 1, "reward": 0.5}),
            "held_out.jsonl": lambda: append_held_out(
                folder.path, HeldOutReward([0.5, 1.0]).measured(1)
            ),
            "replies.jsonl": lambda: Inbox(folder.path, "key").reply("1", "x" * 50, done=True),
            "summary.json": lambda: folder.write_json("summary.json", {"text": "x" * LIMIT}),
            "trajectories/step-00001.npz": lambda: write_fields(samples / "step-00001.npz", fields),
        }
        with files_of_at_most(LIMIT):
            for name, write in writers.items():
                with pytest.raises(WriteError) as raised:
                    repeat(write)
                assert str(raised.value).startswith(f"{folder.path / name} cannot be written: it ")
                assert one_line(raised.value)
        for write in writers.values():  # there is room again
            write()
    for name in ("events.jsonl", "metrics.jsonl", "held_out.jsonl", "replies.jsonl"):
        lines = (folder.path / name).read_text().splitlines()
        assert LIMIT - 200 < (folder.path / name).stat().st_size < LIMIT + 200
        assert all(json.loads(line) for line in lines if line)
    assert len(read_log_file(folder.events).records) > 50
    assert not list(folder.path.rglob(".*"))
