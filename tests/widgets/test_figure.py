"""Figures as inline SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from areal_lab.widgets.figure import fluid_svg, svg


def drawn(*, title: str = "seconds < hours") -> Figure:
    figure = Figure(figsize=(7, 3))
    axes = figure.subplots()
    axes.set_title(title)
    axes.grid(color="#E6E6E6")
    axes.plot([0, 1, 5], [0, 2, 1], color="#000000", marker="o")  # markers are used by reference
    axes.fill_between([0, 1], [1, 1], color="#0072B2", alpha=0.5)
    axes.bar([2], [1], color="#FFFFFF", hatch="//", edgecolor="#777777")
    axes.text(2, 0.5, "white", color="#FFFFFF")
    axes.set_xlim(0, 2)  # so that the line is clipped
    return figure


def ids(markup: str) -> set[str]:
    return set(re.findall(r'(?<!\w)id="([^"]*)"', markup))


def references(markup: str) -> set[str]:
    found = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', markup)
    return {link or clip for link, clip in found}


def test_it_is_one_picture_with_a_description() -> None:
    markup = svg(drawn(), alt='Lag "rises" & falls <slowly>')
    root = ElementTree.fromstring(markup)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'Lag "rises" & falls <slowly>'
    assert "\n" not in markup  # an f-string of Markdown would break it at an empty line
    assert markup._repr_html_() == markup


def test_text_stays_text_in_the_font_of_the_page() -> None:
    markup = svg(drawn(title="a title"), alt="A figure.")
    assert ">a title</text>" in markup
    assert "font-family" not in markup
    assert "DejaVu" not in markup


def test_it_is_as_wide_as_its_column() -> None:
    root = ElementTree.fromstring(svg(drawn(), alt="A figure."))
    assert root.get("viewBox") == "0 0 504 216"
    assert root.get("width") is root.get("height") is None
    assert "width: 100%" in root.attrib["style"]


def test_black_white_and_greys_follow_the_theme_and_colors_stay() -> None:
    markup = svg(drawn(), alt="A figure.")
    assert not re.search(r"#0{6}|#e6e6e6|#777777", markup)
    assert "fill: #0072b2" in markup
    assert "fill: #0072b2; fill-opacity: 0.5" in markup
    grid = 1 - 0xE6 / 255
    lines = re.findall(r"stroke: currentColor;[^\"]*stroke-opacity: ([\d.]+)", markup)
    assert f"{grid:.2f}" in lines
    assert re.findall(r"<(\w+)[^>]*#ffffff", markup) == ["text"]  # on a bar of some color
    assert ElementTree.fromstring(markup).get("fill") == "currentColor"  # black is not written


def test_a_white_face_is_the_background_of_the_page() -> None:
    markup = svg(drawn(), alt="A figure.")
    pattern = re.findall(r"<pattern.*?</pattern>", markup)
    assert len(pattern) == 1
    assert 'fill="var(--background' in pattern[0]


def test_the_figure_and_its_axes_have_no_background() -> None:
    figure = Figure(figsize=(7, 3))
    figure.subplots()
    assert "var(--background" not in svg(figure, alt="Empty axes.")
    assert figure.get_facecolor() == (1, 1, 1, 1)  # the figure itself is not changed


def test_two_figures_on_one_page_share_no_id() -> None:
    figure = drawn()
    first, second = svg(figure, alt="A figure."), svg(figure, alt="A figure.")
    assert ids(first)
    assert ids(first).isdisjoint(ids(second))
    for markup in (first, second):
        assert references(markup) == ids(markup)


def test_nothing_applies_to_the_rest_of_the_page() -> None:
    markup = svg(drawn(), alt="A figure.")
    assert "<style" not in markup
    assert "<metadata" not in markup


def test_a_figure_without_a_description_is_refused() -> None:
    with pytest.raises(ValueError, match="alt is empty; say in a sentence"):
        svg(drawn(), alt=" ")


def test_a_fluid_picture_is_drawn_for_a_phone_and_for_a_column() -> None:
    widths: list[float] = []

    def draw(*, width: float) -> Figure:
        widths.append(width)
        figure = Figure((width, 1))
        figure.alt = "a line"  # type: ignore[attr-defined]
        return figure

    markup = fluid_svg(draw)
    assert widths == [3.6, 7.0]
    assert markup.count("<svg") == 2
    assert "@media (max-width: 600px)" in markup
