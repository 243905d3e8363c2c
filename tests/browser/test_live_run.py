"""Notebook 6 starts, pauses, resumes, changes and stops a real run, and finds it again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_lab.control.events import EtaRequested, PauseRequested, ResumeRequested, StopRequested
from areal_lab.live.attach import attach_run, live_runs
from areal_lab.live.presence import read_presence
from areal_lab.runlog.incidents import requests
from areal_lab.runlog.replay import check_replay
from tools.notebooks.pages import open_page, served

pytestmark = pytest.mark.browser

NOTEBOOK = "notebooks/06_train_live.py"
WAIT_MS = 180_000


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """The folder of the page's runs; ends those that a failing test leaves behind."""
    yield tmp_path
    for run in live_runs(tmp_path):
        presence = read_presence(run.folder)
        assert presence is not None
        os.killpg(presence.process.pid, signal.SIGKILL)


def test_a_real_run_is_started_paused_resumed_changed_found_again_and_stopped(
    browser: Any, runs: Path
) -> None:
    command = ["-m", "marimo", "run", "--headless", "--no-token", "--host", "127.0.0.1"]
    with (
        served([*command, NOTEBOOK, "--", "--runs", str(runs)], ready="URL:") as address,
        open_page(browser, address) as watched,
    ):
        page = watched.page

        def press(name: str) -> None:
            page.get_by_role("button", name=name, exact=True).click()

        def see(text: str) -> None:
            page.get_by_text(re.compile(text)).first.wait_for(timeout=WAIT_MS)

        recorded = page.get_by_text(re.compile("^training waits for the trainer .step 38."))
        recorded.first.wait_for(timeout=WAIT_MS)
        press("Start a run")
        see("alive at the last look: 1")
        # That it starts is seen only by a page that looks in time.
        recorded.first.wait_for(state="hidden", timeout=WAIT_MS)
        see("^training waits for ")
        (run,) = live_runs(runs)
        press("Pause")
        see("^pause: the run is paused")
        see("^paused waits for a request to resume")
        assert run.snapshot().state == "paused"
        press("Resume")
        see("^resume: the run continues")
        press("Set eta")
        see(r"^eta: eta is 0 \(was 8\)")
        page.reload()  # another session, as after a restart of the notebook
        see("alive at the last look: 1")
        see("^training waits for ")
        press("Stop")
        see("^stop: the run stops after the running step")
        see(r"^ended \(stopped\)")
        see("eta 0 +eta is 0 .was 8.")  # what was done by hand, with the reply
    assert watched.problems == []
    log = attach_run(run.folder).read().log
    asked = [type(request) for _, request in requests(log)]
    assert asked == [PauseRequested, ResumeRequested, EtaRequested, StopRequested]
    assert check_replay(log).agrees
