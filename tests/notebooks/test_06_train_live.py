"""A page that follows a run: a recorded one at first, and one that the test appends to."""

from __future__ import annotations

import gzip
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import marimo as mo
import pytest

from areal_lab.control.events import EtaRequested, PauseRequested, ResumeRequested, StopRequested
from areal_lab.live.attach import attach_run
from areal_lab.live.mailbox import open_mailbox
from areal_lab.live.presence import Present
from areal_lab.runlog.incidents import requests
from areal_lab.runlog.replay import check_replay

app = importlib.import_module("notebooks.06_train_live").app
RECORDED = Path(__file__).parents[2] / "notebooks" / "data" / "requests" / "events.jsonl.gz"


def opened(runs: Path, **defined: Any) -> Mapping[str, Any]:
    """The names of the page's cells, when its folder of runs is this one."""
    _, defs = app.run(defs={"runs_folder": mo.ui.text(str(runs)), **defined})
    names: Mapping[str, Any] = defs
    return names


@pytest.fixture(scope="module")
def before_any_run(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return opened(tmp_path_factory.mktemp("nothing"))


def test_six_batches_after_eta_became_0_every_token_is_8_versions_old(
    before_any_run: Mapping[str, Any],
) -> None:
    log, steps = before_any_run["log"], before_any_run["steps"]
    snapshot = before_any_run["snapshot"]
    assert (snapshot.state, snapshot.eta) == ("training", 0)
    assert [request for _, request in requests(log)] == [EtaRequested(0)]
    late = [step for step in steps if step.eta == 0]
    assert len(late) == 6
    assert {(step.lag_min, step.lag_max) for step in late} == {(8, 8)}
    # Eq. 3 with eta 0 admits fewer groups than were started.
    assert before_any_run["counted"].started == 624
    assert before_any_run["admitted"] == 608
    assert before_any_run["run"] is None


@pytest.mark.parametrize(
    ("moment", "lag", "batches"),
    [
        (20.7, 8, 0),  # just before
        (27.0, 8, 8),  # the last of those that eta 8 had admitted
        (27.8, 0, 9),  # and the first one after them
    ],
)
def test_the_lag_ends_after_as_many_batches_as_eta_was_large(
    tmp_path: Path, moment: float, lag: int, batches: int
) -> None:
    steps = opened(tmp_path, moment=moment)["steps"]
    assert steps[-1].lag_max == lag
    assert sum(step.eta == 0 for step in steps) == batches


def test_the_recorded_run_replays_and_has_what_the_page_says(
    before_any_run: Mapping[str, Any],
) -> None:
    log = before_any_run["recorded"]
    assert check_replay(log).agrees
    assert [type(request) for _, request in requests(log)] == [
        *(EtaRequested, EtaRequested, PauseRequested, ResumeRequested, StopRequested)
    ]


def test_the_strip_shows_a_minute_that_ends_now(before_any_run: Mapping[str, Any]) -> None:
    assert before_any_run["minute"] == (0.0, 60.0)
    strip = before_any_run["strip"].widget
    table = strip.table()
    assert list(table.index) == ["trainer", "engine 0"]
    cells = 25.4 / 60 * 600
    assert all(row[int(cells) + 2 :].max() == 0 for row in strip.rows)  # what is still to come
    assert all(row[: int(cells) - 2].max() > 0 for row in strip.rows)


class Live:
    """The recorded run once more, in a folder, by this process."""

    def __init__(self, runs: Path) -> None:
        self.folder = runs / "tiny-1"
        self.folder.mkdir(parents=True)
        open_mailbox(self.folder)
        self.present = Present(self.folder)
        self.present.enter("waiting for the trainer")
        self.lines = gzip.decompress(RECORDED.read_bytes()).splitlines(keepends=True)

    def append(self, steps: int) -> None:
        """Write the log until this many steps are done."""
        text = b""
        while steps:
            line = self.lines.pop(0)
            steps -= b'"TrainStepDone"' in line
            text += line
        with (self.folder / "events.jsonl").open("ab") as file:
            file.write(text)


def test_a_live_run_is_offered_followed_and_found_again(tmp_path: Path) -> None:
    live = Live(tmp_path)
    starting = opened(tmp_path)
    assert list(starting["choices"].values()) == [str(live.folder), ""]
    assert (starting["snapshot"].state, starting["snapshot"].phase) == (
        "starting",
        "waiting for the trainer",
    )
    assert "log" not in starting  # and its charts wait
    live.append(steps=12)
    first = opened(tmp_path)  # as after a restart of the notebook
    assert first["run"].folder == live.folder
    assert first["snapshot"].step == len(first["steps"]) == 12
    live.append(steps=3)
    second = opened(tmp_path)
    assert second["snapshot"].step == second["steps"][-1].step == 15
    assert second["log"].end_s > first["log"].end_s
    live.present.leave()
    assert opened(tmp_path)["run"] is None
    assert attach_run(live.folder).snapshot().state == "ended"


def test_opening_the_page_starts_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "runs")
    assert not list(tmp_path.iterdir())
