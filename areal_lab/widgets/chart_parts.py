"""Common parts of altair charts in notebooks: rows sent as one text, axes, colors for both themes.

A notebook cannot know whether its page is light or dark; marimo recolors axes and titles, but no
marks. So marks have colors that are visible on both, and text has the `currentColor` of the page.

A chart is as wide as its column. Vega gives a fluid width to single charts only, and none to
concatenated ones: charts that belong together are a sequence, which `columns` puts on the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import altair as alt
from altair.utils import schemapi

from areal_lab.widgets.figure import Markup

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
MARKS_ON_CANVAS: Final = {"embedOptions": {"renderer": "hybrid"}}
"""`usermeta` of a chart with thousands of marks, none of them in `currentColor`: only its text is
SVG."""


@contextmanager
def quickly() -> Iterator[None]:
    """Skip the check of every part against the schema, which takes half of the time; tests check
    a whole. For a function, as `@quickly()`, or for lines of a notebook, as `with quickly():`.
    """
    with schemapi.debug_mode(False):
        yield


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
    """Make a chart as wide as its column, without a background, a slab on a dark page.

    The chart is changed in place: `chart.properties` copies all of it, a quarter of the time.
    """
    standard = {"background": "transparent", "usermeta": _AS_SVG, "width": "container"}
    for name, value in (standard | properties).items():
        setattr(chart, name, value)
    object.__setattr__(chart, "_repr_mimebundle_", partial(_bundle, chart))  # no part of the chart
    page: alt.TopLevelMixin = chart
    return page


def _bundle(chart: alt.TopLevelMixin, *args: Any, **settings: Any) -> Any:
    """Forms of a chart for displays; none for marimo, which converts charts by itself.

    It asks for them nevertheless, and altair checks the whole chart against the schema for them:
    four fifths of the time that a chart takes to come onto a page.
    """
    marimo = sys.modules.get("marimo")
    if marimo is not None and marimo.running_in_notebook():
        return {}
    return type(chart)._repr_mimebundle_(chart, *args, **settings)


def titled(text: str) -> alt.TitleParams:
    """A title above the left end of a chart; a line of the text is a line of the title."""
    return alt.TitleParams(text.splitlines(), anchor="start", fontSize=13, fontWeight="normal")


class Html(Protocol):
    """A part of a page, such as `marimo.as_html(chart)`."""

    @property
    def text(self) -> str:
        """Its markup."""


def columns(*parts: Html, least_px: int = 300) -> Markup:
    """Parts of a page beside each other, or below each other where a column would be too narrow.

    `least_px` is the least width of a column in CSS pixels. For charts: `columns(*map(mo.as_html,
    charts))`.
    """
    cells = "".join(f'<div style="min-width:0">{one.text}</div>' for one in parts)
    tracks = f"repeat(auto-fit,minmax(min(100%,{least_px}px),1fr))"
    style = f"display:grid;gap:1rem;align-items:center;grid-template-columns:{tracks}"
    return Markup(f'<div style="{style}">{cells}</div>')


def legend(colors: Mapping[str, str], *, shapes: Mapping[str, str] | None = None) -> str:
    """One legend for several charts as HTML that wraps: colors of lines, then signs of points.

    `colors` are CSS colors by name, `shapes` letters by name.
    """
    parts = [
        f'<span style="color:{color};font-size:1.4em">&#9473;</span>&nbsp;{name}'
        for name, color in colors.items()
    ]
    parts += [f"{sign}&nbsp;{name}" for name, sign in (shapes or {}).items()]
    return " ".join(
        f'<span style="margin-right:1.2em;white-space:nowrap">{part}</span>' for part in parts
    )


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
