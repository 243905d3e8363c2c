"""`areal-lab watch`: a run in the terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from areal_lab.cli.watch import latest_run, run_watch
from areal_lab.control.coordinator import Limits
from areal_lab.control.schedule import asynchronous
from areal_lab.live.watch_view import sparkline
from tests.pipeline.fake_run import write_fake_run

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
    folder = write_fake_run(tmp_path / "run", LIMITS)
    assert latest_run(tmp_path) == folder


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3], 8) == "▁▁"
    assert sparkline([], 8) == ""
