"""Common parts of altair charts in notebooks: rows sent as one text, axes, colors for both themes.

A notebook cannot know whether its page is light or dark; marimo recolors axes and titles, but no
marks. So marks have colors that are visible on both, and text has the `currentColor` of the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Final, TypeVar

import altair as alt
from altair.utils import schemapi

GREY: Final = "#8C8C8C"
"""Color of neutral lines, 3.4:1 on white and 5.1:1 on the dark page."""
BLUE: Final = "#2787C9"
"""Okabe and Ito's blue, lighter: 3.9:1 on white and 4.4:1 on the dark page."""
RED: Final = "#D55E00"
"""Okabe and Ito's vermilion, 3.9:1 on white and 4.5:1 on the dark page."""
ORANGE: Final = "#E69F00"
"""Color of areas only."""
GREEN: Final = "#009E73"
"""3.4:1 on white and 5.0:1 on the dark page."""
PURPLE: Final = "#B86A99"
"""Okabe and Ito's purple, darker: 3.8:1 on white and 4.6:1 on the dark page."""
_AS_SVG: Final = {"embedOptions": {"renderer": "svg"}}
"""Not onto a canvas, where `currentColor` is black; programs can also read SVG text."""

_Made = TypeVar("_Made", bound=Callable[..., alt.TopLevelMixin])


def quickly(make: _Made) -> _Made:
    """Skip the check of every part against the schema, which takes half of the time; tests check
    a whole.
    """

    @wraps(make)
    def made(*args: Any, **settings: Any) -> alt.TopLevelMixin:
        with schemapi.debug_mode(False):
            return make(*args, **settings)

    return made  # type: ignore[return-value] # the same arguments


def table(rows: Iterable[Mapping[str, object]]) -> alt.InlineData:
    """Rows as data of a chart.

    As one JSON text: altair copies and looks at each number of a list, 0.4 s for 3,000 rows.
    """
    text = json.dumps([dict(row) for row in rows])
    return alt.InlineData(values=text, format=alt.JsonDataFormat(type="json"))


def words(chart: alt.Chart, **settings: Any) -> alt.Chart:
    """Text marks in the color of the page's text."""
    text: alt.Chart = chart.mark_text(color="currentColor", **({"fontSize": 13} | settings))
    return text


def on_page(chart: Any, **properties: Any) -> alt.TopLevelMixin:
    """Remove the background of a chart, which would be a slab on a dark page.

    The chart is changed in place: `chart.properties` copies all of it, a quarter of the time.
    """
    for name, value in {"background": "transparent", "usermeta": _AS_SVG, **properties}.items():
        setattr(chart, name, value)
    page: alt.TopLevelMixin = chart
    return page


def plain_axis(**settings: Any) -> alt.Axis:
    """An axis without a grid, with readable letters at 820 pixels."""
    standard: dict[str, Any] = {
        "grid": False,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 240,
    }
    return alt.Axis(**(standard | settings))
