"""Rows of colored cells with pointer and keyboard control: tokens of responses, or a timeline.

    row    one response                a process
    cell   a token                     a piece of time, `cell` seconds long
    code   its lag, version, ...       main activity of the process in it

A cell is one byte, the number of its color. `strip.js` draws them on a canvas, half a million at 30
frames a second; `Strip.figure` and `Strip.table` show the same without a browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from areal_lab.extras import require
from areal_lab.plots.style import COLUMN, entitle, finished, new_figure
from areal_lab.widgets.raster import PATTERNS, Merge, parsed_color, rasterize

require("areal_lab.widgets.strip", "notebooks", "anywidget")

import anywidget  # noqa: E402 - after the check that it is installed
import traitlets  # noqa: E402 - comes with anywidget

if TYPE_CHECKING:
    import pandas

    from areal_lab.plots.picture import Picture

_COLOR: Final = re.compile(r"(#[0-9a-fA-F]{6}([0-9a-fA-F]{2})?|transparent|currentColor)( (.))?")
_MOST_CODES: Final = 256
_BETWEEN_TEXTS: Final = "\x1f"
_LEAST_HEIGHT_PX: Final = 18
_SCRIPT: Final = Path(__file__).with_name("strip.js")
_ALONE: Final = """<div id="{at}"></div>
<script type="module">
{script}
const state = {state};
for (const name of ["_cells", "_ends"]) {
  state[name] = Uint8Array.from(atob(state[name]), (one) => one.charCodeAt(0));
}
const set = (name, value) => { state[name] = value; };
const model = { get: (name) => state[name], set, save_changes() {}, on() {}, off() {} };
render({ model, el: document.getElementById("{at}") });
</script>
"""


class Strip(anywidget.AnyWidget):
    """Rows of colored cells with an axis, a legend, and a line about the cell under the pointer.

    In marimo: `mo.ui.anywidget(Strip(...))`; cells that read the element run again when the pointer
    rests, a cell is selected, or the view has moved. Wheel and W/S zoom, dragging and A/D move,
    arrow keys go from cell to cell (with Shift to the next color), a click or Enter selects, Escape
    clears. An axis in seconds can be played: a button or P moves a clock over the visible time in
    15 s, and what comes later is pale; with `prefers-reduced-motion` it moves once per second.

    Attributes:
        hovered: None, or `{"row": ..., "cell": ...}` where the pointer rests.
        selected: None, or `{"row": ..., "cell": ...}`; can be set.
        view: `[first, last]` visible cells, of any row; can be set. Empty shows all.
    """

    _esm = _SCRIPT

    _cells = traitlets.Bytes(b"").tag(sync=True)
    _ends = traitlets.Bytes(b"").tag(sync=True)
    _colors = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _names = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    _title = traitlets.Unicode().tag(sync=True)
    _unit = traitlets.Unicode().tag(sync=True)
    _start = traitlets.Float().tag(sync=True)
    _cell = traitlets.Float(1.0).tag(sync=True)
    _alt = traitlets.Unicode().tag(sync=True)
    _height = traitlets.Int(0).tag(sync=True)
    _merge = traitlets.Unicode("most").tag(sync=True)
    hovered = traitlets.Any(default_value=None, allow_none=True).tag(sync=True)
    selected = traitlets.Any(default_value=None, allow_none=True).tag(sync=True)
    view = traitlets.List(traitlets.Float()).tag(sync=True)

    def __init__(
        self,
        rows: Sequence[ArrayLike],
        *,
        colors: Sequence[str],
        labels: Sequence[str],
        names: Sequence[str],
        title: str,
        unit: str = "token",
        start: float = 0.0,
        cell: float = 1.0,
        texts: Sequence[Sequence[str] | None] | None = None,
        alt: str | None = None,
        height: int | None = None,
        merge: Merge = "most",
    ) -> None:
        """Show rows of cells."""
        super().__init__()
        if merge not in ("most", "highest"):
            raise ValueError(f"merge is {merge!r}, but must be 'most' or 'highest'")
        if height is not None and height < _LEAST_HEIGHT_PX:
            raise ValueError(f"height is {height} pixels, but must be at least {_LEAST_HEIGHT_PX}")
        self._given_alt, self._rule = alt, merge
        with self.hold_sync():
            self._height, self._merge, self._unit = height or 0, merge, unit
            self.show(
                rows,
                colors=colors,
                labels=labels,
                names=names,
                title=title,
                start=start,
                cell=cell,
                texts=texts,
            )

    # --- other data ------------------------------------------------------------------------------

    def show(
        self,
        rows: Sequence[ArrayLike],
        *,
        colors: Sequence[str] | None = None,
        labels: Sequence[str] | None = None,
        names: Sequence[str] | None = None,
        title: str | None = None,
        start: float | None = None,
        cell: float | None = None,
        texts: Sequence[Sequence[str] | None] | None = None,
    ) -> None:
        """Show other rows in the same widget; arguments of None change nothing, except `texts`.

        The view stays if the longest row still reaches into it; the selection if its cell exists.
        """
        colors = self._colors if colors is None else list(colors)
        labels = self._labels if labels is None else list(labels)
        names = self._names if names is None else list(names)
        start, cell = (
            (self._start if start is None else start),
            (self._cell if cell is None else cell),
        )
        _check_colors(colors, labels)
        codes = _checked_rows(rows, len(colors))
        if len(names) != len(codes):
            raise ValueError(f"got {len(names)} names for {len(codes)} rows; give one per row")
        if not (math.isfinite(start) and math.isfinite(cell) and cell > 0):
            raise ValueError(f"start is {start}, cell is {cell}; both must be finite and cell > 0")
        joined = _joined_texts(texts, codes)
        longest = max((len(row) for row in codes), default=0)
        ends = np.cumsum([len(row) for row in codes], dtype="<i4")
        with self.hold_sync():
            self._cells = b"".join(row.tobytes() for row in codes)
            self._ends = ends.tobytes()
            self._colors, self._labels, self._names = colors, labels, names
            self._texts, self._start, self._cell = joined, float(start), float(cell)
            self._title = self._title if title is None else title
            self._alt = self._described() if self._given_alt is None else self._given_alt
            if self.view and self.view[1] > longest:
                self.view = []
            if self.selected is not None and not self._exists(self.selected):
                self.selected = None
            if self.hovered is not None and not self._exists(self.hovered):
                self.hovered = None

    def recolor(
        self, rows: Sequence[ArrayLike], colors: Sequence[str], labels: Sequence[str]
    ) -> None:
        """Show the same cells by another quantity; view, selection and texts stay."""
        lengths = [len(row) for row in self.rows]
        given = [len(np.atleast_1d(row)) for row in rows]
        if given != lengths:
            raise ValueError(
                f"recolor() got rows of {_few(given)} cells, but shows rows of {_few(lengths)}; "
                "other cells are shown by show()"
            )
        _check_colors(list(colors), list(labels))
        codes = _checked_rows(rows, len(colors))
        with self.hold_sync():
            self._cells = b"".join(row.tobytes() for row in codes)
            self._colors, self._labels = list(colors), list(labels)

    def look_at(self, start: float, end: float) -> None:
        """Move the view to a part of the axis, in its unit, limited to the rows."""
        longest = max((len(row) for row in self.rows), default=0)
        first = max(0.0, (start - self._start) / self._cell)
        last = min(float(longest), (end - self._start) / self._cell)
        if not first < last:
            raise ValueError(
                f"{start:g} to {end:g} {self._unit} is not in sight of rows from {self._start:g} "
                f"to {self._start + longest * self._cell:g} {self._unit}"
            )
        self.view = [first, last]

    # --- what is shown ---------------------------------------------------------------------------

    @property
    def rows(self) -> list[NDArray[np.uint8]]:
        """Codes, one array per row."""
        ends = np.frombuffer(self._ends, dtype="<i4")
        cells = np.frombuffer(self._cells, dtype=np.uint8)
        return np.split(cells, ends[:-1]) if len(ends) else []

    @property
    def alt(self) -> str:
        """Description of the content, in a sentence."""
        return str(self._alt)

    def table(self) -> pandas.DataFrame:
        """The same in numbers: the name of each row, its length, and the amount of each label.

        Labels without cells are left out; all numbers are in the strip's unit.
        """
        import pandas

        counts = np.array(
            [np.bincount(row, minlength=len(self._colors)) for row in self.rows], dtype=float
        ).reshape(len(self._names), len(self._colors))
        columns: dict[str, Any] = {f"length ({self._unit})": self._cell * counts.sum(axis=1)}
        for code, label in enumerate(self._labels):
            if label and counts[:, code].any():
                columns[label] = columns.get(label, 0) + self._cell * counts[:, code]
        frame = pandas.DataFrame(columns, index=pandas.Index(self._names, name="row"))
        return frame.astype(int) if self._cell.is_integer() else frame.round(9)

    @finished
    def figure(self, *, width: float = COLUMN) -> Picture:
        """The visible part of the rows as a picture, with axis and legend."""
        from matplotlib.patches import Patch

        rows = self.rows
        first, last = self.view or (0.0, max((len(row) for row in rows), default=1))
        shown = sorted({int(code) for row in rows for code in np.unique(row)})
        listed = [c for c in shown if self._labels[c] and self._colors[c] != "transparent"]
        columns = max(
            1, int(width / (0.5 + 0.085 * max([len(self._labels[c]) for c in listed], default=1)))
        )
        legend_in = 0.2 * -(-len(listed) // columns)
        figure = new_figure(width, min(9.0, 0.9 + legend_in + 0.22 * max(1, len(rows))))
        axes = figure.subplots()
        extent = (
            *(self._start + first * self._cell, self._start + last * self._cell),
            *(len(rows) - 0.5, -0.5),
        )
        if rows:
            image = rasterize(rows, first, last, self._colors, merge=self._rule)
            axes.imshow(image, extent=extent, aspect="auto", interpolation="nearest")
        every = -(-len(rows) // 40)
        axes.set_yticks(range(0, len(rows), max(1, every)), self._names[:: max(1, every)])
        axes.set_xlabel(self._unit)
        axes.grid(visible=False)
        handles = [
            Patch(
                facecolor="none" if hatch else color, edgecolor=color, hatch=4 * hatch, linewidth=0
            )
            for color, hatch in (parsed_color(self._colors[code]) for code in listed)
        ]
        if handles:
            labels = [self._labels[code] for code in listed]
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        return entitle(figure, self._title, alt=self._alt)

    def html(self) -> str:
        """The strip as a piece of HTML that needs no other file, no Python and no network.

        Pointer, keys and the play button work. Its text has the color of the page around it.
        """
        state = {name: getattr(self, name) for name in sorted(Strip.class_own_traits(sync=True))}
        for name in ("_cells", "_ends"):
            state[name] = base64.b64encode(state[name]).decode()
        given = json.dumps(state).replace("</", "<\\/")
        at = f"strip-{hashlib.sha256(given.encode()).hexdigest()[:12]}"
        script = _SCRIPT.read_text(encoding="utf-8").replace("export default { render };", "")
        return _ALONE.replace("{at}", at).replace("{script}", script).replace("{state}", given)

    # --- checks ----------------------------------------------------------------------------------

    @traitlets.validate("selected")
    def _check_selected(self, proposal: Any) -> Any:
        value = proposal["value"]
        if value is not None and not self._exists(value):
            raise ValueError(
                f'selected is {value}, but must be None or {{"row": ..., "cell": ...}} of a cell '
                f"that exists; there are {len(self._names)} rows"
            )
        return value

    @traitlets.validate("view")
    def _check_view(self, proposal: Any) -> Any:
        value = list(proposal["value"])
        if value and not (len(value) == 2 and value[0] < value[1]):
            raise ValueError(f"view is {value}, but must be [first, last] with first < last, or []")
        return value

    def _exists(self, at: Any) -> bool:
        ends = np.frombuffer(self._ends, dtype="<i4")
        row, cell = at.get("row"), at.get("cell")
        if not (isinstance(row, int) and isinstance(cell, int) and 0 <= row < len(ends)):
            return False
        return bool(0 <= cell < ends[row] - (ends[row - 1] if row else 0))

    def _described(self) -> str:
        rows = self.rows
        longest = self._cell * max((len(row) for row in rows), default=0)
        meant = ", ".join(dict.fromkeys(label for label in self._labels if label))
        return (
            f"{self._title}: {len(rows)} rows of up to {longest:g} {self._unit}. Colors: {meant}."
        )


def _check_colors(colors: Sequence[str], labels: Sequence[str]) -> None:
    if not 1 <= len(colors) <= _MOST_CODES:
        raise ValueError(f"got {len(colors)} colors, but needs 1 to {_MOST_CODES}")
    if len(labels) != len(colors):
        raise ValueError(f"got {len(labels)} labels for {len(colors)} colors; give one per color")
    for color in colors:
        found = _COLOR.fullmatch(color)
        if not found or (found[4] and found[4] not in PATTERNS):
            raise ValueError(
                f"color {color!r} must be #rrggbb, #rrggbbaa, transparent or currentColor, and for "
                f"a pattern a blank and one of {' '.join(PATTERNS)}; "
                "matplotlib.colors.to_hex makes #rrggbb of any other"
            )


def _checked_rows(rows: Sequence[ArrayLike], codes: int) -> list[NDArray[np.uint8]]:
    checked = []
    for number, given in enumerate(rows):
        row = np.asarray(given)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "uib"):
            raise ValueError(
                f"row {number} has shape {row.shape} and type {row.dtype}, but must be one line of "
                "integers, the number of a color each"
            )
        if row.size and not 0 <= row.min() <= row.max() < codes:
            raise ValueError(
                f"row {number} has codes from {row.min()} to {row.max()}, but there are {codes} "
                f"colors, so they must be 0 to {codes - 1}"
            )
        checked.append(row.astype(np.uint8))
    return checked


def _joined_texts(
    texts: Sequence[Sequence[str] | None] | None, rows: Sequence[NDArray[np.uint8]]
) -> list[str]:
    """One string per row, its cells separated by a control character; empty without texts."""
    if texts is None:
        return [""] * len(rows)
    if len(texts) != len(rows):
        raise ValueError(f"got texts of {len(texts)} rows for {len(rows)} rows; give one per row")
    joined = []
    for number, (some, row) in enumerate(zip(texts, rows, strict=True)):
        if some is not None and len(some) != len(row):
            raise ValueError(f"row {number} has {len(row)} cells, but {len(some)} texts")
        plain = (
            text.replace(_BETWEEN_TEXTS, "\N{SYMBOL FOR UNIT SEPARATOR}") for text in some or ()
        )
        joined.append(_BETWEEN_TEXTS.join(plain))
    return joined


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
