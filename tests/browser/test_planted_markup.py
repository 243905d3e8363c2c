"""Markup in a run of somebody else is text on every page that opens one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pipeline.test_foreign_run import copied
from tools.notebooks.pages import open_page, served

pytestmark = pytest.mark.browser

PLANTED = '<b data-planted onclick="x">*planted*</b> [link](javascript:x)'
COMMAND = ("-m", "marimo", "run", "--headless", "--no-token", "--host", "127.0.0.1")
WAIT_MS = 120_000


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder of runs, of which each text that a run may have is markup."""
    run = copied(tmp_path / "runs" / "b <b data-planted>x")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines[0]["limits"]["order"] = PLANTED
    lines[0]["processes"].append(PLANTED)
    for line in lines:
        if line["kind"] == "group":
            line["finish_reasons"] = [PLANTED for _ in line["finish_reasons"]]
        if line["kind"] == "span":
            line["name"] = PLANTED
    _write(run / "events.jsonl", lines)
    step = run / "trajectories" / "step-00001.jsonl"
    groups = [json.loads(line) for line in step.read_text().splitlines()]
    for group in groups:
        group |= {"prompt": PLANTED, "special": {"2": PLANTED}}
        for sample in group["samples"]:
            sample |= {"completion": PLANTED, "finish_reason": PLANTED, "rewards": {PLANTED: 1.0}}
            sample.pop("characters", None)
    _write(step, groups)
    fields = dict(np.load(step.with_suffix(".npz")))
    np.savez(step.with_suffix(".npz"), **fields, **{f"loss.{PLANTED}": fields["entropy"]})
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "backend": PLANTED}))
    presence = json.loads((run / "process.json").read_text())
    (run / "process.json").write_text(json.dumps({**presence, "phase": PLANTED}))
    _write(
        run / "requests.jsonl",
        [{"id": "a", "key": "k", "at_s": 1.0, "from": PLANTED, "ask": "pause"}],
    )
    return run.parent


def _write(file: Path, lines: list[Any]) -> None:
    file.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines))


def test_a_run_is_shown_as_text_in_notebook_7(browser: Any, planted: Path) -> None:
    (run,) = planted.iterdir()
    damaged = planted / "damaged"
    damaged.mkdir()
    (damaged / "events.jsonl").write_text(json.dumps({"kind": PLANTED}) + "\n{}\n")
    for folder, seen in ((run, "*planted*"), (damaged, "unknown kind")):
        page_command = [*COMMAND, "notebooks/07_trajectories.py", "--", "--run", str(folder)]
        with (
            served(page_command, ready="URL:") as address,
            open_page(browser, address) as watched,
        ):
            watched.page.get_by_text(seen).first.wait_for(timeout=WAIT_MS)
            watched.page.wait_for_load_state("networkidle")
            _nothing_planted(watched.page)


def test_a_live_run_is_shown_as_text_in_notebook_6(browser: Any, planted: Path) -> None:
    page_command = [*COMMAND, "notebooks/06_train_live.py", "--", "--runs", str(planted)]
    with served(page_command, ready="URL:") as address, open_page(browser, address) as watched:
        page = watched.page
        page.get_by_text("alive at the last look: 1").wait_for(timeout=WAIT_MS)
        page.get_by_role("button", name="Pause", exact=True).click()
        page.get_by_text("pause: ").first.wait_for(timeout=WAIT_MS)
        page.wait_for_load_state("networkidle")
        _nothing_planted(page)


def test_a_file_of_lengths_is_shown_as_text_in_notebook_9(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text(f"{PLANTED},b\n1,2\n")
    page_command = [*COMMAND, "notebooks/09_response_lengths.py"]
    with served(page_command, ready="URL:") as address, open_page(browser, address) as watched:
        upload = watched.page.locator("input[type=file]").first
        upload.wait_for(state="attached", timeout=WAIT_MS)
        upload.set_input_files(tmp_path / "lengths.csv")
        watched.page.get_by_text("*planted*").first.wait_for(timeout=WAIT_MS)
        _nothing_planted(watched.page)


def _nothing_planted(page: Any) -> None:
    assert page.locator("[data-planted]").count() == 0
    assert page.locator("a[href^='javascript']").count() == 0
