"""The pictures of a run folder: reward.png, timeline.png, staleness.png."""

from __future__ import annotations

from pathlib import Path

from areal_lab.plots.reward import draw_reward
from areal_lab.plots.staleness import draw_staleness
from areal_lab.plots.style import save_picture
from areal_lab.plots.timeline import draw_timeline
from areal_lab.runlog.read_run import RecordedRun


def draw_all(run: RecordedRun, folder: Path) -> list[Path]:
    """Draw every picture of a run into `folder`; returns their paths."""
    pictures = {
        "reward.png": lambda: draw_reward(run.metrics, run.summary),
        "timeline.png": lambda: draw_timeline(run.log),
        "staleness.png": lambda: draw_staleness(run.log),
    }
    return [save_picture(draw, folder / name, run.title) for name, draw in pictures.items()]
