"""Pictures of simulations, and excerpts of logs for them."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from areal_lab.plots.timeline import draw_timeline
from areal_lab.runlog.activity import activity
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import REWARDS, Log
from simulator.assembly.simulate import replicate, simulated_log
from simulator.config.load import load_simulation
from simulator.report.plots import draw_lags, draw_steps, draw_utilization, write_plots
from simulator.report.tables import engines_of, only_engines
from simulator.run.result import Replicated

RECORDED = Path(__file__).parents[3] / "reproductions" / "recorded" / "synchronous"


@cache
def small(*overrides: str) -> Replicated:
    return replicate(load_simulation("small", ["seeds=3", *overrides]), processes=1)


@cache
def logged(*overrides: str) -> Log:
    return simulated_log(load_simulation("small", overrides))


def test_every_bar_fills_100_percent() -> None:
    for runs in ([small()], [small(), small("schedule.name=synchronous")]):
        axes = draw_utilization(runs).axes[0]
        rows: dict[float, float] = {}
        for bar in axes.patches:
            assert isinstance(bar, Rectangle)
            rows[bar.get_y()] = rows.get(bar.get_y(), 0.0) + bar.get_width()
        assert len(rows) == 2 * len(runs)
        assert list(rows.values()) == pytest.approx([100] * len(rows), abs=0.2)


def test_shares_of_lags_sum_to_1() -> None:
    for axes in draw_lags([small()]).axes:
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        assert sum(bar.get_height() for bar in bars) == pytest.approx(100)


def test_steps_show_every_seed_and_the_mean_after_warm_up() -> None:
    seconds, tokens = draw_steps([small()]).axes
    for axes in (seconds, tokens):
        full = [line for line in axes.lines if len(line.get_xydata()) == 12]
        assert len(full) == 4  # three seeds and their mean
    averages = [line for line in seconds.lines if len(line.get_xydata()) == 2]
    assert averages[0].get_ydata()[0] == pytest.approx(small().step_s.mean)
    legend = seconds.get_legend()
    assert legend is not None
    said = [text.get_text() for text in legend.get_texts()]
    assert "warm-up, excluded" in said
    assert "thin: each seed; thick: their mean" in said
    assert any(text.endswith(" s after warm-up (dashed)") for text in said)


def test_pictures_are_written_into_a_new_folder(tmp_path: Path) -> None:
    runs = [small(), small("schedule.name=synchronous", "cluster.placement=colocated")]
    paths = write_plots(runs, tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["utilization.png", "lags.png", "steps.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_an_excerpt_keeps_the_activity_of_its_engines() -> None:
    log = logged()
    excerpt = only_engines(log, [1], rewards=False)
    assert engines_of(log) == (0, 1)
    assert engines_of(excerpt) == (1,)
    assert list(activity(excerpt)) == [
        name for name in activity(log) if name not in ("engine 0", REWARDS)
    ]
    whole, part = activity(log)["engine 1"], activity(excerpt)["engine 1"]
    busy = [sum(s.end_s - s.start_s for s in stretches if s.busy) for stretches in (whole, part)]
    assert busy[0] == pytest.approx(busy[1])
    assert {group.engine for group in excerpt.groups} == {1}


def test_a_timeline_can_be_drawn_of_an_excerpt_with_failures() -> None:
    log = logged("faults.node_mtbf_h=0.01", "faults.restart_s=1", "faults.detection_s=1")
    figure = draw_timeline(only_engines(log, [0]), zoom_s=5)
    assert all("seconds" in axes.get_xlabel() for axes in figure.axes)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "engine 0" in names
    assert "engine 1" not in names


def test_each_look_has_one_entry_in_the_legend_of_a_timeline() -> None:
    (legend,) = draw_timeline(read_events(RECORDED)).legends
    labels = [text.get_text() for text in legend.get_texts()]
    looks = [(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()]
    assert len(set(looks)) == len(looks) == len(labels)
    assert "idle: request in transit or at a tool" in labels
    assert "idle: request on its way" not in labels


@pytest.mark.parametrize("zoom_s", [2.0, 20.0, 500.0])
def test_versions_in_a_timeline_are_named_from_the_left_edge_on_and_apart(zoom_s: float) -> None:
    below = draw_timeline(read_events(RECORDED), zoom_s=zoom_s).axes[2]
    start_s, end_s = below.get_xlim()
    named = [text for text in below.texts if text.get_text().startswith("v")]
    places_s = [text.get_position()[0] for text in named]
    room_s = 0.025 * (end_s - start_s)
    assert places_s[0] <= start_s + room_s
    assert all(later - earlier >= room_s for earlier, later in pairwise(places_s))
