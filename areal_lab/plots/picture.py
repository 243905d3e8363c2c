"""A figure that keeps the common style when it is drawn, and says in words what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import matplotlib
from matplotlib.figure import Figure


@final
class Picture(Figure):
    """A figure with a style; functions called `draw_*` return one, ready to be shown."""

    style: Mapping[Any, Any] = {}
    """matplotlib's settings for it."""
    alt: str = ""
    """What it shows, in a sentence or two, for readers without sight; also in saved files."""

    def draw(self, renderer: Any) -> None:
        """Draw in its style: ticks and hatches take theirs only now."""
        with matplotlib.rc_context(dict(self.style)):
            super().draw(renderer)
