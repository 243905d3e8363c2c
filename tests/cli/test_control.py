"""`areal-lab control` and `areal-lab runs`, with a run that answers in this process."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from areal_lab.cli.app import app
from areal_lab.cli.control import latest_run, run_watch
from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.schedule import asynchronous, synchronous
from areal_lab.live.presence import FILE
from areal_lab.live.watch_view import sparkline
from areal_lab.pipeline.requests import ControlChannel
from areal_lab.shell.display import Silent
from areal_lab.shell.recorded import entered
from areal_lab.shell.requests import make_reachable, replying
from areal_lab.shell.stop import StopSignal
from tests.pipeline.fake_run import write_fake_run


def areal_lab(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_runs_are_compared_as_text_and_json(tmp_path: Path) -> None:
    runs = [write_fake_run(tmp_path / name, LIMITS, seed=seed) for seed, name in enumerate("ab")]
    text = areal_lab("compare", *runs)
    assert text.exit_code == 0, text.output
    assert text.stdout.splitlines()[0].split() == ["a", "b"]
    found = json.loads(areal_lab("compare", *runs, "--json").stdout)
    assert found["names"] == ["a", "b"]
    assert found["results"]["status"] == ["complete", "complete"]
    wrong = areal_lab("compare", runs[0])
    assert (wrong.exit_code, wrong.stderr.strip()) == (
        2,
        "error: got 1 to compare; give two runs or more",
    )


class Starting:
    """A run that never gets beyond its start, and answers."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        folder.mkdir()
        make_reachable(folder)
        self.folder, self.stop = folder, StopSignal()
        self.channel = ControlChannel(Coordinator(limits), self.stop)
        self.loading = threading.Event()
        self.thread = threading.Thread(target=asyncio.run, args=(self._run(),))

    async def _run(self) -> None:
        with entered(self.folder, Silent()) as (display, present):
            async with replying(self.folder, present.key, self.channel.submit, display.note):
                display.phase("loading the model")
                self.loading.set()
                await self.stop.wait()


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    limits = Limits(batch_groups=2, max_in_flight=4, schedule=asynchronous(1))
    run = Starting(tmp_path / "one", limits)
    run.thread.start()
    assert run.loading.wait(60)
    yield run
    run.stop.request()
    run.thread.join()


def test_a_run_is_asked_and_its_reply_printed(starting: Starting) -> None:
    for request in ("pause", "eta=4", "eta=inf", "resume"):
        asked = areal_lab("control", starting.folder, request)
        assert (asked.exit_code, asked.output) == (0, "queued until training starts\n")
    stopped = areal_lab("control", starting.folder, "stop")
    assert (stopped.exit_code, stopped.output) == (0, "the run stops after the running step\n")
    starting.thread.join()
    late = areal_lab("control", starting.folder, "pause")
    assert late.exit_code == 1
    assert "is not alive" in late.output


def test_the_status_is_a_line_or_an_object_and_says_by_its_exit_code_if_the_run_is_alive(
    starting: Starting,
) -> None:
    line = areal_lab("control", starting.folder)
    assert (line.exit_code, line.output) == (0, "starting; loading the model\n")
    status = areal_lab("control", starting.folder, "status", "--json")
    assert status.exit_code == 0
    told = json.loads(status.output)
    assert (told["state"], told["alive"], told["phase"]) == ("starting", True, "loading the model")
    starting.stop.request()
    starting.thread.join()
    ended = areal_lab("control", starting.folder)
    assert (ended.exit_code, ended.output) == (1, "ended\n")


def test_a_refusal_ends_with_1_and_the_reason(tmp_path: Path) -> None:
    run = Starting(
        tmp_path / "one", Limits(batch_groups=2, max_in_flight=4, schedule=synchronous())
    )
    run.thread.start()
    try:
        refused = areal_lab("control", run.folder, "eta=4")
    finally:
        run.stop.request()
        run.thread.join()
    assert refused.exit_code == 1
    assert "error: schedule synchronous is eta 0" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["paus"], "'paus' is none of status, pause, resume, stop, eta=NUMBER; did you mean"),
        (["eta="], "'eta=' is none of"),
        (["eta=much"], "eta is 'much', but must be a number, or inf"),
        (["pause=1"], "'pause=1' is none of"),
        (["pause", "--json"], "--json has no effect with pause"),
    ],
)
def test_a_wrong_request_ends_with_2_and_one_line(
    starting: Starting, arguments: list[str], message: str
) -> None:
    wrong = areal_lab("control", starting.folder, *arguments)
    assert wrong.exit_code == 2
    assert message in wrong.output
    assert len(wrong.output.splitlines()) == 1


def test_a_folder_without_a_run_ends_with_2(tmp_path: Path) -> None:
    wrong = areal_lab("control", tmp_path, "pause")
    assert wrong.exit_code == 2
    assert "is not a run folder" in wrong.output


def test_live_runs_are_listed(
    starting: Starting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = areal_lab("runs", tmp_path)
    assert (listed.exit_code, listed.output) == (0, "one  starting; loading the model\n")
    starting.stop.request()
    starting.thread.join()
    assert areal_lab("runs", tmp_path).output == f"no run is alive in {tmp_path}\n"
    assert areal_lab("runs").output == "no run is alive in runs\n"


LIMITS = Limits(batch_groups=3, max_in_flight=6, train_steps=5, schedule=asynchronous(2))


@pytest.mark.parametrize("width", [80, 120])
def test_a_finished_run_fits_the_terminal(tmp_path: Path, width: int) -> None:
    folder = write_fake_run(tmp_path / "run", LIMITS, engines=2)
    out = io.StringIO()
    run_watch(str(folder), tmp_path, once=True, console=Console(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for part in ("step 5 of 5", "trainer", "engine 0", "busy", "no alarm"):
        assert part in text


def test_latest_is_the_run_that_was_written_last(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no run"):
        latest_run(tmp_path)
    written = [write_fake_run(tmp_path / name, LIMITS) for name in ("b", "c", "a")]
    for second, run in enumerate(written):
        for file in run.iterdir():
            os.utime(file, (second, second))
    assert latest_run(tmp_path) == written[-1]
    os.utime(written[0] / "events.jsonl", (5, 5))
    assert latest_run(tmp_path) == written[0]
    starting = tmp_path / "aa" / FILE
    starting.parent.mkdir()
    starting.touch()
    assert latest_run(tmp_path) == starting.parent, "a run that has no log yet"


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3], 8) == "▁▁"
    assert sparkline([], 8) == ""
