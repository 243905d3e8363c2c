"""The strip of cells as Python sees it; tests/browser/test_strip.py has what the page does."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from areal_lab.widgets.figure import svg
from areal_lab.widgets.raster import PATTERNS, codes_of_pixels, parsed_color, rasterize
from areal_lab.widgets.strip import Strip

COLORS = ("#0072B2", "#E69F00", "transparent")


def strip(rows: Any = ((0, 1, 1), (0,)), **changed: Any) -> Strip:
    settings: dict[str, Any] = {
        "colors": COLORS,
        "labels": ("fresh", "stale", ""),
        "names": [f"response {number}" for number in range(len(rows))],
        "title": "Tokens by lag",
        **changed,
    }
    return Strip([np.array(row, dtype=np.int64) for row in rows], **settings)


def test_a_cell_is_one_byte_on_its_way_to_the_page() -> None:
    state = strip().get_state()
    assert state["_cells"] == bytes([0, 1, 1, 0])
    assert np.frombuffer(state["_ends"], dtype="<i4").tolist() == [3, 4]
    assert (state["hovered"], state["selected"], state["view"]) == (None, None, [])


def test_the_html_has_the_cells_and_ends_no_script_early() -> None:
    page = strip(title="</script><b>", texts=[["a", "\u2028", "</script>"], None]).html()
    assert page.count("</script>") == 1
    state = json.loads(page.split("const state = ")[1].split(";\n")[0])
    assert base64.b64decode(state["_cells"]) == bytes([0, 1, 1, 0])
    assert (state["_title"], state["_unit"], state["view"]) == ("</script><b>", "token", [])
    assert "export default" not in page


def test_the_rows_come_back_as_they_were_given() -> None:
    assert [row.tolist() for row in strip([[2, 1], [], [0]]).rows] == [[2, 1], [], [0]]
    assert strip([], names=[]).rows == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": [[0, 3]]}, r"row 0 has codes from 0 to 3, but there are 3 colors.* 0 to 2"),
        ({"rows": [[-1]]}, r"row 0 has codes from -1 to -1"),
        ({"rows": [[[0]]]}, r"row 0 has shape \(1, 1\) and type int64, but must be one line"),
        ({"names": ["one"]}, r"got 1 names for 2 rows; give one per row"),
        ({"labels": ["one"]}, r"got 1 labels for 3 colors; give one per color"),
        ({"colors": [], "labels": []}, r"got 0 colors, but needs 1 to 256"),
        ({"colors": ["red"] * 3}, r"color 'red' must be #rrggbb.*matplotlib.colors.to_hex makes"),
        ({"colors": ["#112233 ?"] * 3}, r"color '#112233 \?' must be #rrggbb"),
        ({"cell": 0.0}, r"start is 0.0, cell is 0.0; both must be finite and cell > 0"),
        ({"texts": [["a"]]}, r"got texts of 1 rows for 2 rows"),
        ({"texts": [["a"], ["a"]]}, r"row 0 has 3 cells, but 1 texts"),
        ({"merge": "mean"}, r"merge is 'mean', but must be 'most' or 'highest'"),
        ({"height": 3}, r"height is 3 pixels, but must be at least 18"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strip(**changed)


def test_a_row_of_fractions_is_refused() -> None:
    with pytest.raises(ValueError, match="type float64, but must be one line of integers"):
        Strip([np.array([0.5])], colors=COLORS, labels=COLORS, names=["a"], title="t")


def test_selection_and_view_can_be_set_and_are_checked() -> None:
    one = strip()
    one.selected, one.view = {"row": 1, "cell": 0}, [0.0, 2.0]
    with pytest.raises(ValueError, match=r"selected is .*'cell': 1.* there are 2 rows"):
        one.selected = {"row": 1, "cell": 1}
    with pytest.raises(ValueError, match=r"view is \[2.0, 1.0\], but must be \[first, last\]"):
        one.view = [2.0, 1.0]
    assert (one.selected, one.view) == ({"row": 1, "cell": 0}, [0.0, 2.0])


def test_the_view_can_be_set_in_the_unit_of_the_axis() -> None:
    one = strip([[0] * 100], names=["a"], unit="s", start=10.0, cell=0.5)
    one.look_at(15.0, 20.0)
    assert one.view == [10.0, 20.0]
    one.look_at(0.0, 11.0)
    assert one.view == [0.0, 2.0]
    with pytest.raises(ValueError, match=r"70 to 80 s is not in sight of rows from 10 to 60 s"):
        one.look_at(70.0, 80.0)


def test_a_new_coloring_keeps_view_selection_and_texts() -> None:
    one = strip(texts=[["a", "b", "c"], None])
    one.selected, one.view = {"row": 0, "cell": 2}, [1.0, 3.0]
    one.recolor([[0, 0, 0], [1]], ["#112233", "#445566"], ["low", "high"])
    state = one.get_state()
    assert state["_cells"] == bytes([0, 0, 0, 1])
    assert state["_labels"] == ["low", "high"]
    assert state["_texts"] == ["a\x1fb\x1fc", ""]
    assert (one.selected, one.view) == ({"row": 0, "cell": 2}, [1.0, 3.0])


def test_a_new_coloring_of_other_cells_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"recolor\(\) got rows of 2 cells, but shows rows of 3, 1"
    ):
        strip().recolor([[0, 0]], ["#112233"], ["low"])


def test_other_rows_keep_view_and_selection_where_they_still_exist() -> None:
    one = strip()
    one.selected, one.view = {"row": 0, "cell": 2}, [0.0, 2.0]
    one.show([[0, 0, 0, 0], [1]])
    assert (one.selected, one.view) == ({"row": 0, "cell": 2}, [0.0, 2.0])
    one.show([[0], [1]])
    assert (one.selected, one.view) == (None, [])


def test_rows_that_are_refused_change_nothing() -> None:
    one = strip()
    before = one.get_state()
    with pytest.raises(ValueError, match="row 0 has codes"):
        one.show([[7], [1]], title="other")
    assert one.get_state() == before


def test_other_data_is_one_message_to_the_page() -> None:
    """Otherwise the page would draw new cells with old row ends."""
    one = strip()
    sent: list[set[str]] = []

    def send(*_: object, data: dict[str, Any], **__: object) -> None:
        sent.append({*data["state"], *(name for (name,) in data["buffer_paths"])})

    one.comm.send = send  # type: ignore[union-attr]
    one.show([[0], [1], [0]], names=["a", "b", "c"])
    assert len(sent) == 1
    assert {"_cells", "_ends", "_names"} <= sent[0]


def test_a_separator_in_a_text_does_not_shift_the_others() -> None:
    (first, _) = strip(texts=[["a\x1fb", "c", "d"], None]).get_state()["_texts"]
    assert first.split("\x1f") == ["a\N{SYMBOL FOR UNIT SEPARATOR}b", "c", "d"]


def test_the_table_has_the_extent_of_each_label_in_the_unit() -> None:
    table = strip([[0, 1, 1, 2], [0]], unit="s", cell=0.5).table()
    assert table.index.tolist() == ["response 0", "response 1"]
    assert table.to_dict("list") == {
        "length (s)": [2.0, 0.5],
        "fresh": [0.5, 0.5],
        "stale": [1.0, 0.0],
    }
    assert strip().table()["stale"].tolist() == [2, 0]


def test_the_description_counts_rows_and_names_colors_unless_given() -> None:
    assert strip().alt == ("Tokens by lag: 2 rows of up to 3 token. Colors: fresh, stale.")
    given = strip(alt="Two responses.")
    given.show([[0], [0]], title="other")
    assert given.alt == "Two responses."


# --- the static picture ---------------------------------------------------------------------------


def test_the_picture_shows_axis_names_legend_and_description() -> None:
    one = strip(start=10.0, cell=2.0, unit="s")
    figure = one.figure()
    (axes,) = figure.axes
    assert axes.get_xlim() == (10.0, 16.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["response 0", "response 1"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["fresh", "stale"]
    assert figure.alt == one.alt
    assert svg(figure).startswith("<svg")


def test_the_picture_shows_what_is_in_view() -> None:
    one = strip([[0] * 50 + [1] * 50], names=["a"])
    one.view = [50.0, 100.0]
    assert one.figure().axes[0].get_xlim() == (50.0, 100.0)
    image = rasterize(one.rows, 50.0, 100.0, COLORS)
    assert (image[0, :, :3] == (0xE6, 0x9F, 0x00)).all()


def test_an_empty_strip_can_be_drawn() -> None:
    written = io.BytesIO()
    strip([], names=[]).figure().savefig(written, format="png")
    assert Image.open(written).size[0] > 100
    assert len(strip([], names=[]).table()) == 0


@given(
    row=st.lists(st.integers(0, 3), max_size=60),
    first=st.floats(0, 40),
    span=st.floats(0.5, 80),
    pixels=st.integers(1, 30),
    merge=st.sampled_from(["most", "highest"]),
)
def test_pixels_show_the_cells_they_cover(
    row: list[int], first: float, span: float, pixels: int, merge: Any
) -> None:
    codes = codes_of_pixels(
        np.array(row, dtype=np.uint8), first, first + span, codes=4, pixels=pixels, merge=merge
    )
    per_pixel = (first + span - first) / pixels
    for pixel, code in enumerate(codes.tolist()):
        if per_pixel <= 1:
            at = int(np.floor(first + (pixel + 0.5) * per_pixel))
            covered = row[at : at + 1]
        else:
            edges = np.floor(first + np.arange(pixels + 1) * per_pixel).astype(int)
            covered = row[edges[pixel] : edges[pixel + 1]]
        if not covered:
            assert code == -1
        elif merge == "highest":
            assert code == max(covered)
        else:
            assert code == min(covered, key=lambda one: (-covered.count(one), one))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_leaves_the_background_visible(pattern: str) -> None:
    row = np.zeros(10, dtype=np.uint8)
    image = rasterize([row], 0, 10, [f"#0072B2 {pattern}"])
    covered = (image[:-1, :, 3] > 0).mean()
    assert 0.05 < covered < 0.5


def test_the_color_of_text_is_a_grey_that_both_themes_show() -> None:
    assert parsed_color("currentColor /") == ("#8C8C8C", "/")
    image = rasterize([np.zeros(4, dtype=np.uint8)], 0, 4, ["transparent"])
    assert not image.any()
