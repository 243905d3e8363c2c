"""The aggregated timeline, and the looks that all pictures share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection

from areal_lab.plots.looks import Looks
from areal_lab.plots.shares import draw_shares
from areal_lab.runlog import activity
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import Log
from areal_lab.runlog.time_cells import State
from areal_lab.widgets.timeline import timeline_rows, timeline_strip
from simulator.assembly.simulate import simulated_log
from simulator.config.load import load_simulation

RECORDED = Path(__file__).parents[2] / "reproductions" / "recorded" / "asynchronous"
CAUSES = [
    value
    for name, value in vars(activity).items()
    if name.isupper()
    and isinstance(value, str)
    and name not in ("IMPORTED", "PIPELINE", "REWARDS", "TRAINER")
]


@cache
def logged(*overrides: str) -> Log:
    return simulated_log(load_simulation("small", overrides))


@pytest.mark.parametrize("gpus", [2, 12])
def test_engines_are_one_panel_however_many_there_are(gpus: int) -> None:
    log = logged(f"cluster.gpus={gpus + 2}", f"cluster.rollout_gpus={gpus}")
    figure = draw_shares(log)
    titles = [axes.get_title(loc="left").split(",")[0] for axes in figure.axes]
    assert sorted(titles) == sorted(["trainer", f"{gpus} engines"])
    assert f"{gpus} engines busy" in figure.alt


def test_the_areas_of_a_panel_fill_it() -> None:
    for axes in draw_shares(logged(), cells=50).axes:
        area = 0.0
        for one in axes.collections:
            assert isinstance(one, FillBetweenPolyCollection)
            for path in one.get_paths():
                x, y = path.vertices[:-1].T
                area += abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
        start_s, end_s = axes.get_xlim()
        assert area == pytest.approx(100 * (end_s - start_s), rel=1e-3)


def test_a_recorded_run_is_drawn_too() -> None:
    figure = draw_shares(read_events(RECORDED), width=7)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert any("prefill" in text for text in texts)
    assert any(text.startswith("idle: ") for text in texts)


def test_a_log_with_a_header_only_is_drawn() -> None:
    header = logged().header
    assert draw_shares(Log(header, ())).axes[0].texts[0].get_text() == "the log has no process"


def test_a_window_outside_of_time_is_refused() -> None:
    with pytest.raises(ValueError, match="must end after it starts"):
        draw_shares(logged(), window=(3.0, 2.0))


def test_idle_causes_have_patterns_or_greys_and_differ() -> None:
    states = [State(cause, busy=False) for cause in CAUSES]
    looks = Looks(dict.fromkeys(states, 1.0))
    shown = [state for state in states if not state.blank]
    for state in shown:
        face = looks.of[state]["facecolor"]
        assert face[1:3] == face[3:5] == face[5:7], state
    drawn = [(look["facecolor"], look["hatch"]) for look in looks.of.values()]
    assert len(set(drawn)) == len(drawn) - 1  # two kinds of requests in transit
    cells = [looks.cell_color(state) for state in shown]
    assert len(set(cells)) == len(cells) - 1
    assert {looks.cell_color(state) for state in states if state.blank} == {"transparent"}


def test_an_unknown_activity_gets_a_color_of_its_own() -> None:
    states = [State(name, busy=True) for name in ("decode", "dream", "sing")]
    looks = Looks(dict.fromkeys(states, 1.0))
    assert len({look["facecolor"] for look in looks.of.values()}) == 3
    assert [looks.cell_label(state) for state in states] == ["decode", "dream", "sing"]


def test_rows_of_a_strip_have_the_seconds_of_each_state() -> None:
    log = logged()
    table = timeline_strip(log, cells=20_000).table()
    assert list(table.index) == ["trainer", "engine 0", "engine 1"]  # no rewards: nothing to score
    uses = activity.idle_by_cause(log)
    for process in table.index:
        for name, seconds in uses[process].busy_s.items():
            if seconds > 0.5:
                assert table.loc[process, name] == pytest.approx(seconds, rel=0.02)
        for name, seconds in uses[process].idle_s.items():
            if seconds > 0.5:
                found = table.loc[process, f"idle: {activity.label(name)}"]
                assert found == pytest.approx(seconds, rel=0.02)


def test_rows_of_a_strip_show_a_part_of_the_time() -> None:
    rows = timeline_rows(logged(), window=(10.0, 20.0), cells=100)
    assert (rows["start"], rows["cell"]) == (10.0, 0.1)
    assert [len(row) for row in rows["rows"]] == [100] * 3
    assert timeline_strip(logged(), window=(10.0, 20.0)).figure().axes[0].get_xlim() == (10, 20)


def test_a_strip_of_a_log_with_a_header_only_has_no_rows() -> None:
    assert timeline_strip(Log(logged().header, ())).rows == []
