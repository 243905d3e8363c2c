"""A run folder while its run writes it: summary, sinks and presence, however the run ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.host.claim import RunTaken
from areal_lab.live.presence import Present, read_presence
from areal_lab.runlog.folder import RunFolder
from areal_lab.shell.display import Display, Silent
from areal_lab.shell.recorded import Ending, RecordedRun, recorded, recorded_here
from areal_lab.shell.stop import StopSignal

Surround = Callable[[TrainConfig, RunFolder, Display, Ending, Callable[[RecordedRun], None]], None]


@dataclass
class Heard(Silent):
    """What a display is told."""

    phases: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


def on_a_loop(
    config: TrainConfig,
    folder: RunFolder,
    display: Display,
    ending: Ending,
    body: Callable[[RecordedRun], None],
) -> None:
    async def main() -> None:
        async with recorded(config, folder, display, ending, StopSignal()) as run:
            body(run)

    asyncio.run(main())


def here(
    config: TrainConfig,
    folder: RunFolder,
    display: Display,
    ending: Ending,
    body: Callable[[RecordedRun], None],
) -> None:
    with recorded_here(config, folder, display, ending, StopSignal()) as run:
        body(run)


@pytest.fixture(params=[on_a_loop, here])
def surround(request: pytest.FixtureRequest) -> Surround:
    found: Surround = request.param
    return found


def config_in(folder: Path, *overrides: str) -> TrainConfig:
    return load_config(None, [f"run_dir={folder}", *overrides])


def ending(draw: Callable[[Path], object] = lambda _: None) -> Ending:
    return Ending(draw=draw, pictures="one.png", failure=lambda _: {"steps": 3})


def summary_of(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder.path / "summary.json").read_text())
    return found


def test_a_complete_run_has_summary_pictures_and_the_reports_of_its_sinks(
    tmp_path: Path, surround: Surround
) -> None:
    config = config_in(tmp_path, "sinks=[tensorboard]")
    folder, heard = RunFolder.create(config), Heard()
    runs: list[RecordedRun] = []

    def body(run: RecordedRun) -> None:
        run.display.phase("training")
        presence = read_presence(folder.path)
        assert presence is not None
        assert (presence.alive, presence.phase) == (True, "training")
        run.summary = {"status": "complete"}
        runs.append(run)

    drawn: list[Path] = []
    surround(config, folder, heard, ending(drawn.append), body)
    assert drawn == [folder.path]
    assert heard.phases == ["training", "drawing one.png"]
    assert summary_of(folder) == runs[0].summary
    assert summary_of(folder)["status"] == "complete"
    assert summary_of(folder)["sinks"].keys() == {"tensorboard"}
    presence = read_presence(folder.path)
    assert presence is not None
    assert presence.ended


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (asyncio.CancelledError(), "stopped at once", "CancelledError"),
        (KeyboardInterrupt(), "stopped at once", "KeyboardInterrupt"),
        (KeyError(), "failed", "KeyError"),
        (RuntimeError("boom"), "failed", "boom"),
        (MemoryError(), "failed", "MemoryError"),
    ],
)
def test_an_error_is_in_the_summary_and_is_raised(
    tmp_path: Path, surround: Surround, error: BaseException, status: str, words: str
) -> None:
    config = config_in(tmp_path)
    folder, heard = RunFolder.create(config), Heard()

    def body(run: RecordedRun) -> None:
        run.summary = {"status": "complete"}
        raise error

    with pytest.raises(type(error)):
        surround(config, folder, heard, ending(), body)
    assert summary_of(folder) == {"steps": 3, "status": status, "error": words}
    assert heard.notes == []
    presence = read_presence(folder.path)
    assert presence is not None
    assert presence.ended


def test_a_summary_that_cannot_be_made_or_written_is_noted_and_the_error_stays(
    tmp_path: Path, surround: Surround
) -> None:
    config = config_in(tmp_path)
    folder, heard = RunFolder.create(config), Heard()

    def body(_: RecordedRun) -> None:
        shutil.rmtree(folder.path)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        surround(config, folder, heard, ending(), body)
    (line,) = (one for one in heard.notes if not one.startswith("requests to this run cannot be"))
    assert line.startswith("summary.json was not written: ")

    def failure(_: float) -> dict[str, Any]:
        raise ValueError("the log is damaged")

    folder, heard = RunFolder.create(config), Heard()
    unmade = Ending(draw=lambda _: None, pictures="", failure=failure)
    with pytest.raises(ZeroDivisionError):
        surround(config, folder, heard, unmade, lambda _: print(1 // 0))
    assert heard.notes == ["summary.json was not written: the log is damaged"]


def test_a_picture_that_cannot_be_drawn_leaves_the_summary(
    tmp_path: Path, surround: Surround
) -> None:
    config = config_in(tmp_path, "sinks=[tensorboard]")
    folder = RunFolder.create(config)

    def draw(_: Path) -> None:
        raise OSError("No space left on device")

    def body(run: RecordedRun) -> None:
        run.summary = {"status": "complete"}

    with pytest.raises(OSError, match="No space"):
        surround(config, folder, Silent(), ending(draw), body)
    assert summary_of(folder)["status"] == "complete"
    assert summary_of(folder)["sinks"].keys() == {"tensorboard"}


def test_a_run_that_another_process_continued_writes_no_summary(
    tmp_path: Path, surround: Surround
) -> None:
    config = config_in(tmp_path)
    folder = RunFolder.create(config)

    def body(run: RecordedRun) -> None:
        assert not run.taken
        other = Present(folder.path)
        (folder.path / "process.json").unlink()
        other.enter("continuing")
        assert run.taken
        raise ConnectionError("a consequence")

    heard = Heard()
    with pytest.raises(RunTaken):
        surround(config, folder, heard, ending(), body)
    assert heard.notes == []
    assert not (folder.path / "summary.json").exists()
    presence = read_presence(folder.path)
    assert presence is not None
    assert not presence.ended, "the other process has not ended"
