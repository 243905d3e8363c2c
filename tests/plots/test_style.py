"""Finished pictures: their style does not depend on who draws or saves them."""

from __future__ import annotations

import io
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from areal_lab.plots.curves import draw_reward, draw_staleness
from areal_lab.plots.picture import Picture
from areal_lab.plots.shares import draw_shares
from areal_lab.plots.style import COLUMN, entitle, finished, new_figure, save_picture
from areal_lab.plots.timeline import draw_timeline
from areal_lab.runlog.held_out import Measured
from areal_lab.runlog.read_run import read_events
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.report.plots import draw_lags, draw_steps, draw_utilization
from simulator.run.result import Replicated

if TYPE_CHECKING:
    from collections.abc import Callable


RECORDED = Path(__file__).parents[2] / "reproductions" / "recorded" / "asynchronous"
METRICS = [
    {"step": step, "reward_mean": step / 10, "time_s": 20.0 * step, "lag_token_mean": 1.0}
    for step in range(1, 10)
]
HELD_OUT = {"reward_before": {"mean": 0.1, "ci95": 0.05, "n": 100}}


@cache
def compared() -> list[Replicated]:
    return [
        replicate(load_simulation("small", [f"schedule.eta={eta}"]), processes=1) for eta in (1, 4)
    ]


DRAWN: dict[str, Callable[[float], Picture]] = {
    "timeline": lambda width: draw_timeline(read_events(RECORDED), width=width),
    "shares": lambda width: draw_shares(read_events(RECORDED), width=width),
    "reward": lambda width: draw_reward(METRICS, HELD_OUT, width=width),
    "staleness": lambda width: draw_staleness(read_events(RECORDED), width=width),
    "utilization": lambda width: draw_utilization(compared(), width=width),
    "lags": lambda width: draw_lags(compared(), width=width),
    "steps": lambda width: draw_steps(compared(), width=width),
}


def pixels(figure: Picture) -> np.ndarray:
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=60)
    return np.asarray(Image.open(written))


def drawn_texts(figure: Picture) -> list[Text]:
    """The texts that reach the renderer, without ticks outside the axes' limits."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts: dict[Text, None] = {}

    def note(*_: object, mtext: Text, **__: object) -> None:
        texts[mtext] = None

    renderer.draw_text = note  # type: ignore[method-assign]
    figure.draw(renderer)
    return list(texts)


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("width", [COLUMN, 12.0])
def test_a_picture_is_finished_when_it_is_returned(name: str, width: float) -> None:
    """No label is cut off, no title lies over another text, letters have 9 points, and it is told
    in words what is shown."""
    figure = DRAWN[name](width)
    texts = drawn_texts(figure)
    titles = [figure._suptitle, *(axes._left_title for axes in figure.axes)]  # type: ignore[attr-defined]
    boxes = {text: text.get_window_extent() for text in texts}
    for text, box in boxes.items():
        assert figure.bbox.x0 - 1 <= box.x0, text
        assert box.x1 <= figure.bbox.x1 + 1, text
    for title in (title for title in titles if title in boxes):
        for text, box in boxes.items():
            assert text is title or not boxes[title].overlaps(box), (title, text)
    assert min(text.get_fontsize() for text in texts) >= 9
    assert figure.get_figwidth() == width
    assert len(figure.alt) > 20
    assert figure.alt.endswith(".")


@pytest.mark.parametrize("name", DRAWN)
def test_the_callers_settings_change_nothing(name: str) -> None:
    usual = pixels(DRAWN[name](COLUMN))
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "hatch.linewidth": 4}):
        other = pixels(DRAWN[name](COLUMN))
    assert usual.shape == other.shape
    assert (usual == other).all()


@pytest.mark.parametrize("run", ["asynchronous", "synchronous"])
def test_shares_of_lags_have_ticks_up_to_100_at_whole_versions(run: str) -> None:
    axes = draw_staleness(read_events(RECORDED.parent / run)).axes[0]
    shares, lags = axes.get_yticks(), axes.get_xticks()
    assert 0 <= min(shares) < max(shares) <= 100
    assert all(float(lag).is_integer() for lag in lags)


def test_a_narrow_picture_has_fewer_panels() -> None:
    assert len(draw_lags(compared(), width=12).axes) == 3
    assert len(draw_lags(compared(), width=COLUMN).axes) == 1
    assert len(draw_steps(compared(), width=12).axes) == 2
    assert len(draw_steps(compared(), width=COLUMN).axes) == 1


def test_the_title_can_be_replaced() -> None:
    assert draw_lags(compared()).get_suptitle() == "Lag of the trained tokens and samples"
    assert draw_lags(compared(), title="mine").get_suptitle() == "mine"


def test_a_long_title_stays_inside() -> None:
    figure = entitle(new_figure(5, 3), "a title that is much too long " * 4, alt="Nothing.")
    FigureCanvasAgg(figure).draw()
    title = figure._suptitle  # type: ignore[attr-defined]
    assert title.get_fontsize() >= 9
    assert title.get_window_extent().x1 <= figure.bbox.x1


def test_no_word_of_a_title_stands_alone_in_a_line() -> None:
    long = "arithmetic-20261124-014857  |  asynchronous, eta 2  |  30 steps of 8 groups  |  49 s"
    for width in (4.0, 5.0, 6.0, 7.0, 8.0):
        lines = entitle(new_figure(width, 3), long, alt="Nothing.").get_suptitle().split("\n")
        assert " ".join(" ".join(lines).split()) == " ".join(long.split())
        assert min(map(len, lines)) > max(map(len, lines)) / 2
    assert len(lines) == 1


@pytest.mark.parametrize("width", [5.0, 8.0, 12.0])
@pytest.mark.parametrize(("first_s", "step_s"), [(16.8, 1.1), (5.2, 1.4), (0.1, 0.1), (900, 40)])
def test_seconds_above_the_steps_do_not_overlap(
    first_s: float, step_s: float, width: float
) -> None:
    metrics = [
        {"step": step, "reward_mean": 0.5, "time_s": first_s + step_s * step} for step in range(30)
    ]
    figure = draw_reward(metrics, {}, width=width)
    FigureCanvasAgg(figure).draw()
    (top,) = figure.axes[0].child_axes
    labels = [label for label in top.get_xticklabels() if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    assert len(boxes) >= 3
    assert labels[0].get_text() == "0"
    for left, right in pairwise(boxes):
        assert left.x1 + 3 < right.x0


@finished
def drawn_line(value: float) -> Picture:
    figure = new_figure(4, 3)
    figure.subplots().plot([0, value])
    return entitle(figure, "A line", alt="One line that rises.")


def test_a_saved_picture_holds_its_description(tmp_path: Path) -> None:
    path = save_picture(drawn_line(2.0), tmp_path / "new" / "line.png")
    assert Image.open(path).text["Description"] == "One line that rises."  # type: ignore[attr-defined]
    path = save_picture(drawn_line(2.0), tmp_path / "line.svg")
    assert "One line that rises." in path.read_text(encoding="utf-8")
    assert save_picture(drawn_line(2.0), tmp_path / "line.pdf").stat().st_size > 1000


def test_a_picture_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match=r"width is 2 inches, but must be at least 3; 7 fits"):
        draw_lags(compared(), width=2)


@pytest.mark.parametrize("draw", [draw_lags, draw_steps, draw_utilization])
def test_too_many_simulations_are_refused(draw: Callable[..., Picture]) -> None:
    with pytest.raises(ValueError, match="got 0 simulations, but a picture shows 1 to 6"):
        draw([])
    with pytest.raises(ValueError, match="got 8 simulations"):
        draw(compared() * 4)


def test_the_reward_picture_says_what_was_measured_during_training() -> None:
    measured = [
        Measured(0, 0.1),  # drawn as the one before training
        Measured(3, 0.4, 0.05, 100),
        Measured(6, 0.7, 0.05, 100, versions=(6, 8), later_tokens=0.5, mean_version=6.8),
    ]
    summary = {**HELD_OUT, "best": {"version": 3, "reward": 0.4}}
    figure = draw_reward(METRICS, summary, measured)
    assert "2 measurements on held-out problems during training, the last one 0.700." in figure.alt
    assert figure.alt.endswith("The best checkpoint is that of step 3.")
    labels = {text.get_text() for text in drawn_texts(figure)}
    assert {"held-out problems", "held-out problems, tokens of several versions"} <= labels
    assert "best checkpoint: step 3, 0.400" in labels
    assert draw_reward(METRICS, HELD_OUT).alt == draw_reward(METRICS, HELD_OUT, []).alt


PAGE = Path(__file__).parents[2] / "docs" / "pictures.md"


def test_the_examples_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert (tmp_path / "shares.png").stat().st_size > 10_000
    assert names["picture"].alt.startswith("Shares of time")
    assert names["tokens"].widget.rows[0].tolist() == names["samples"][0].lags.tolist()
