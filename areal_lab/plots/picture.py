"""A figure that keeps the common style when it is drawn, and has a description in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from areal_lab.host.terminal import printable

MOST_LETTERS: Final = 400
"""Maximum letters of one text; longer ones are cut, because drawing them would take minutes."""


@final
class Picture(Figure):
    """A figure with a style, as returned by the functions `draw_*`."""

    style: Mapping[Any, Any] = {}
    """Its matplotlib settings."""
    alt: str = ""
    """Description in a sentence or two, for readers without sight; also in saved files."""

    def draw(self, renderer: Any) -> None:
        """Draw in its style, which ticks and hatches read only now.

        Texts may be names from a run, so they have no formulas and no control characters, which SVG
        does not have. Powers of ten on logarithmic axes are formulas.
        """
        with matplotlib.rc_context(dict(self.style)):
            for text in self.findobj(Text):
                plain = printable(text.get_text()[:MOST_LETTERS])
                if plain != text.get_text():
                    text.set_text(plain)
            for axis in (one for axes in self.axes for one in (axes.xaxis, axes.yaxis)):
                if isinstance(axis.get_major_formatter(), LogFormatter):
                    for label in axis.get_ticklabels(which="both"):
                        label.set_parse_math(True)
            super().draw(renderer)
