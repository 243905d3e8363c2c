"""The style of all pictures: colors, sizes, the title, and saving.

Colors are those of Okabe and Ito, which color-blind readers can distinguish. matplotlib is imported
when a picture is drawn, not when the command line starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE, BLACK = "#E69F00", "#D55E00", "#CC79A7", "#000000"
GREY = "#8C8C8C"

STYLE: dict[Any, Any] = {
    "figure.dpi": 130,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
}


def save_picture(draw: Callable[[], Figure], path: Path, title: str) -> Path:
    """Draw in the common style, add the title, and write the file, and its folder; returns it."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = draw()
        # A bold letter is about two thirds as wide as its size: a long title needs smaller ones.
        fitting = 0.98 * 72 * figure.get_figwidth() / (0.67 * max(1, len(title)))
        size = min(10.0, fitting)
        figure.suptitle(title, x=0.01, ha="left", fontsize=size, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    # Not pyplot, which keeps figures alive and needs a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def whole_numbers(axes: Axes) -> None:
    """Show only whole numbers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def nothing_yet(axes: Axes, text: str) -> None:
    """Write in the middle why the picture is empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
