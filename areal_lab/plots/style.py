"""The style of all pictures: colors, sizes, the title, and saving.

A function `draw_*` that users call is written like this, and its picture is finished:

    @finished
    def draw_reward(metrics, *, width: float = 8.0, title: str | None = None) -> Picture:
        figure = new_figure(width, 4.2)
        ...
        return entitle(figure, title or "Reward of each training step", alt="A line that ...")

`width` is in inches; a figure below `NARROW` has fewer panels. `picture.alt` describes the picture
in words. Colors are those of Okabe and Ito, which color-blind readers can distinguish. matplotlib
is imported when a picture is drawn, not when the command line starts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from areal_lab.host.durable import replacing
from areal_lab.host.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from areal_lab.plots.picture import Picture

P = ParamSpec("P")
R = TypeVar("R")

BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE, BLACK = "#E69F00", "#D55E00", "#CC79A7", "#000000"
GREY = "#8C8C8C"

COLUMN: Final = 7.0
"""Width in inches of a notebook's column, in which letters have the size of the text."""
NARROW: Final = 9.0
"""Pictures of less than this width, in inches, have fewer panels and columns."""

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
    "legend.fontsize": 9,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # user texts may have dollars; `Picture` sets it for log axes
}

_LEAST_LETTERS: Final = 9.0
"""Smallest letters of a title, in points; a longer one takes two lines."""


def finished(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in the common style, whatever the caller's settings are."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def new_figure(width: float, height: float) -> Picture:
    """An empty figure; sizes in inches."""
    # Not pyplot, which keeps figures alive and needs a display.
    from areal_lab.plots.picture import Picture

    if not width >= 3:
        raise ValueError(f"width is {width:g} inches, but must be at least 3; 7 fits a notebook")
    figure = Picture(figsize=(width, height))
    figure.style = STYLE
    return figure


def entitle(figure: Picture, title: str, *, alt: str) -> Picture:
    """Set the title, as large as the width permits, and the description in words."""
    from areal_lab.plots.picture import MOST_LETTERS

    title, alt = printable(title)[:MOST_LETTERS], printable(alt)
    room = 0.97 * 72 * figure.get_figwidth()  # in points
    size = max(_LEAST_LETTERS, min(10.0, room / _bold_width(title)))
    figure.suptitle(
        _in_lines(title, room / size), x=0.01, ha="left", fontsize=size, fontweight="bold"
    )
    figure.alt = alt
    return figure


def _bold_width(text: str) -> float:
    """Width in units of the size of the letters; never 0."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    # Spaces at the ends have no outline, and a `$` would begin a formula.
    outline = TextPath((0, 0), text.replace("$", "S"), size=1, prop=FontProperties(weight="bold"))
    return max(1.0, float(outline.get_extents().width))


def _in_lines(title: str, room: float) -> str:
    """Title in the fewest lines that fit, of similar length: no word is alone in a line."""
    lines = [title]
    for count in range(math.ceil(_bold_width(title) / room), len(title.split()) + 1):
        letters = math.ceil(len(title) / count)
        while len(lines := textwrap.wrap(title, letters)) > count:
            letters += 1
        if all(_bold_width(line) <= room for line in lines):
            break
    return "\n".join(lines)


def save_picture(figure: Picture, path: Path) -> Path:
    """Write the file, and its folder; returns the path. PNG and SVG include the description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix.removeprefix(".").lower() or "png"
    metadata = {"Description": figure.alt} if figure.alt and kind in ("png", "svg") else None
    with replacing(path) as file:
        figure.savefig(file, format=kind, metadata=metadata)
    return path


def whole_numbers(axes: Axes) -> None:
    """Show only whole numbers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def nothing_yet(axes: Axes, text: str) -> None:
    """Write the reason for an empty picture into its middle."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
