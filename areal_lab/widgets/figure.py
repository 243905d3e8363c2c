"""A matplotlib figure as inline SVG that follows the theme of the page, light or dark.

in the figure            on the page
black                    the page's text color (`currentColor`)
a grey                   the text color, more transparent the lighter the grey
white, but not text      the page's background; of the whole figure and its axes: transparent
other colors             unchanged
text                     text in the page's font, not outlines
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

_SVG: Final = "http://www.w3.org/2000/svg"
_LINK: Final = "{http://www.w3.org/1999/xlink}href"
_PAPER: Final = "var(--background, var(--md-default-bg-color, Canvas))"
"""Background of marimo's pages, of Material's and Zensical's, and of any other page."""
_LARGEST: Final = 1.8
"""Largest size on the page, in CSS pixels per point: letters of 9 pt are then 16 px high."""
_NARROW, _WIDE = 3.6, 7.0
"""Inches of a phone's column, and of a notebook's."""
_PHONE_PX: Final = 600
_COLOR: Final = re.compile(r"(?<![\w-])(fill|stroke): ?(#[0-9a-f]{6})", re.IGNORECASE)
_OPACITY: Final = re.compile(r"(?<![\w-])(fill-opacity|stroke-opacity): ?([\d.]+);?")
_REFERENCE: Final = re.compile(r"url\(#([^)]+)\)")
_LONG_NUMBER: Final = re.compile(r"(\.\d\d)\d+")
_FONT: Final = re.compile(r"font-family: ?[^;]+;?")
_SHORT_FONT: Final = re.compile(r"font: ?([^;]*?)([\d.]+)px [^;]+;?")
_numbers = itertools.count(1)


class Markup(str):
    """HTML as a string that marimo and Jupyter show as what it describes."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(self)

    def _display_(self) -> object:
        """Display for marimo, which would show a plain string as text."""
        return _Shown(self)


class _Shown:
    def __init__(self, markup: str) -> None:
        self._markup = markup

    def _repr_html_(self) -> str:
        return str(self._markup)


class Svg(Markup):
    """Markup of one picture."""

    __slots__ = ()


def svg(figure: Figure, *, alt: str | None = None) -> Svg:
    """Convert a figure into inline SVG as wide as its column, for light and dark pages.

    Show the result, or put it into an f-string of `mo.md`. Several figures may be on one page. Draw
    about 7 inches wide: a notebook's column then shows letters in their intended size. The figure
    is not changed. `alt` describes it in a sentence or two, for readers without sight; None takes
    the one of this library's pictures.
    """
    alt = getattr(figure, "alt", "") if alt is None else alt
    if not alt.strip():
        raise ValueError("alt is empty; say in a sentence what the figure shows")
    markup = _rendered(figure)
    root = _plain(ElementTree.fromstring(markup))
    _make_unique(root, hashlib.sha256(markup).hexdigest()[:8])
    for element in root.iter():
        _follow_theme(element)
    view = root.attrib["viewBox"]
    root.attrib.clear()
    largest_px = _LARGEST * 72 * figure.get_figwidth()
    root.attrib.update(
        {
            "xmlns": _SVG,
            "viewBox": view,
            "role": "img",
            "aria-label": alt,
            "fill": "currentColor",
            "style": f"display: block; width: 100%; height: auto; max-width: {largest_px:.0f}px; "
            "stroke-linejoin: round; stroke-linecap: butt",
        }
    )
    return Svg(re.sub(r"\s*\n\s*", " ", ElementTree.tostring(root, encoding="unicode")))


def fluid_svg(draw: Callable[..., Figure]) -> Markup:
    """Convert a figure into SVG with readable letters on a phone, too: drawn for two widths.

    `draw(width=...)` makes the figure, `width` in inches; the page shows the one that fits.
    """
    narrow, wide = svg(draw(width=_NARROW)), svg(draw(width=_WIDE))
    name = f"fluid-{next(_numbers)}"
    first, last = f".{name} > :first-child", f".{name} > :last-child"
    return Markup(
        f"<style>{first} {{ display: none }} @media (max-width: {_PHONE_PX}px) "
        f"{{ {first} {{ display: block }} {last} {{ display: none }} }}</style>"
        f'<div class="{name}"><div>{narrow}</div><div>{wide}</div></div>'
    )


def _rendered(figure: Figure) -> bytes:
    import matplotlib

    written = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "areal_lab"}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return written.getvalue()


def _plain(root: ElementTree.Element) -> ElementTree.Element:
    """Remove namespaces from names, and anything that affects the page or tells the time of
    drawing.
    """
    for element in root.iter():
        for child in list(element):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                element.remove(child)
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        if _LINK in element.attrib:
            element.set("href", element.attrib.pop(_LINK))
    return root


def _make_unique(root: ElementTree.Element, digest: str) -> None:
    """Rename referenced ids, so other figures of the page have other names.

    Ids without references are dropped.
    """
    prefix = f"f{next(_numbers)}-{digest}-"
    used: set[str] = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            if "url(#" in value:
                used.update(_REFERENCE.findall(value))
                element.set(name, _REFERENCE.sub(rf"url(#{prefix}\1)", value))
            elif name == "href" and value.startswith("#"):
                used.add(value[1:])
                element.set(name, f"#{prefix}{value[1:]}")
    for element in root.iter():
        if (own := element.attrib.pop("id", None)) in used:
            element.set("id", f"{prefix}{own}")


def _follow_theme(element: ElementTree.Element) -> None:
    """Replace black, white and greys in the element's style."""
    is_text = element.tag in ("text", "tspan")
    for attribute in ("fill", "stroke"):  # hatches have attributes
        value = element.get(attribute, "")
        if value.startswith("#"):
            color, opacity = _themed(value, is_text=is_text)
            element.set(attribute, color)
            if opacity < 1:
                element.set(f"{attribute}-opacity", f"{opacity:.2f}")
    if "d" in element.attrib:  # hundredths of a point are enough, and half of the size
        element.set("d", _LONG_NUMBER.sub(r"\1", element.attrib["d"]))
    style = element.get("style")
    if style is None:
        return
    if is_text:
        style = _FONT.sub("", _SHORT_FONT.sub(r"font-size: \2px;", style))
    if _COLOR.search(style):
        given = {name: float(value) for name, value in _OPACITY.findall(style)}
        replaced = {"fill": 1.0, "stroke": 1.0}

        def replace(found: re.Match[str]) -> str:
            color, replaced[found[1]] = _themed(found[2], is_text=is_text)
            return f"{found[1]}: {color}"

        style = _COLOR.sub(replace, style)
        for name, opacity in replaced.items():
            if opacity < 1:
                whole = f"{name}-opacity"
                style = re.sub(rf"(?<![\w-]){whole}: ?[\d.]+;?", "", style).rstrip("; ")
                style += f"; {whole}: {opacity * given.get(whole, 1.0):.2f}"
    element.set("style", style)


def _themed(color: str, *, is_text: bool) -> tuple[str, float]:
    """Color on the page, and its opacity.

    The opacity of a grey is that with which black on white has this grey.
    """
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    if not red == green == blue:
        return color, 1.0
    if red == 255:
        return ("#ffffff" if is_text else _PAPER), 1.0
    return "currentColor", 1 - red / 255
