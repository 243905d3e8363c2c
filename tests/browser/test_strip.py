"""The strip in a browser: what pixels show, and what pointer and keys do.

The page has nothing but `strip.js` and a model in place of the one that notebooks bring.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_lab.widgets.raster import codes_of_pixels
from areal_lab.widgets.strip import Strip

pytestmark = pytest.mark.browser

SCRIPT = (Path(__file__).parents[2] / "areal_lab" / "widgets" / "strip.js").read_text("utf-8")
PAGE = """<!doctype html><meta charset="utf-8">
<body style="margin: 20px; font-family: sans-serif"><div id="at" style="width: 800px"></div>
<script type="module">
const state = {state};
for (const name of ["_cells", "_ends"]) {
  state[name] = new DataView(Uint8Array.from(state[name]).buffer);
}
const listeners = {}, sent = [];
const model = {
  get: (name) => state[name],
  set(name, value) {
    state[name] = value;
    (listeners["change:" + name] ?? []).forEach((act) => act());
  },
  save_changes() { sent.push({ ...state }); },
  on(name, act) { (listeners[name] ??= []).push(act); },
  off() {},
};
Object.assign(window, { state, model, sent });
const source = new Blob([{script}], { type: "text/javascript" });
const { default: widget } = await import(URL.createObjectURL(source));
window.close_widget = widget.render({ model, el: document.getElementById("at") });
window.ready = true;
</script>"""
COLORS = ["#0072B2", "#E69F00", "#D55E00", "#808080 /", "transparent"]
ROW_PX = 18


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 900, "height": 700})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert errors == []


def shown(page: Any, rows: Sequence[Sequence[int]], **changed: Any) -> Any:
    """Put a strip on the page; returns its canvas."""
    selected = changed.pop("selected", None)
    strip = Strip(
        rows,
        **{
            "colors": COLORS,
            "labels": ["zero", "one", "two", "three", ""],
            "names": [f"row {number}" for number in range(len(rows))],
            "title": "Cells",
            **changed,
        },
    )
    strip.selected = selected
    state = {
        name: list(value) if isinstance(value, bytes) else value
        for name, value in strip.get_state().items()
        if not name.startswith(("_esm", "_view", "_model", "_dom", "_any", "layout", "tab", "tool"))
    }
    text = PAGE.replace("{script}", json.dumps(SCRIPT)).replace("{state}", json.dumps(state))
    page.set_content(text)
    page.wait_for_function("window.ready")
    canvas = page.locator("canvas")
    painted(page)
    return canvas


def painted(page: Any) -> None:
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")


def says(page: Any) -> str:
    return str(page.locator(".says").inner_text())


def sent(page: Any, name: str) -> Any:
    """The value that Python has after the last message, waited for."""
    page.wait_for_function(
        """(name) => {
          const last = window.sent.at(-1)?.[name];
          return last && last.length !== 0 && last === window.state[name];
        }""",
        arg=name,
    )
    return page.evaluate(f"() => window.state[{name!r}]")


def codes_along(page: Any, row: int) -> list[int]:
    """The code of each pixel along the middle of a row; -1 where nothing is drawn."""
    found = page.evaluate(
        """(y) => {
          const canvas = document.querySelector("canvas");
          return Array.from(canvas.getContext("2d").getImageData(0, y, canvas.width, 1).data);
        }""",
        int((row + 0.5) * ROW_PX),
    )
    pixels = np.array(found, dtype=np.uint8).reshape(-1, 4)
    known = {(0x00, 0x72, 0xB2): 0, (0xE6, 0x9F, 0x00): 1, (0xD5, 0x5E, 0x00): 2}
    return [known.get(tuple(pixel[:3].tolist()), -1) if pixel[3] else -1 for pixel in pixels]


def plot(page: Any) -> tuple[int, int]:
    """Left edge and width of the cells in pixels, by the first row, which must be full."""
    full = [at for at, code in enumerate(codes_along(page, 0)) if code >= 0]
    return full[0], full[-1] - full[0] + 1


@pytest.mark.parametrize("merge", ["most", "highest"])
@pytest.mark.parametrize("cells", [40, 5000])
def test_pixels_follow_the_same_rule_as_the_static_picture(
    page: Any, cells: int, merge: Any
) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.choice(3, cells, p=[0.8, 0.15, 0.05]) for _ in range(2)]
    shown(page, rows, merge=merge)
    left, width = plot(page)
    for number, row in enumerate(rows):
        codes = codes_along(page, number)
        expected = codes_of_pixels(
            row.astype(np.uint8), 0, cells, codes=5, pixels=width, merge=merge
        )
        assert codes[left : left + width] == expected.tolist()


def test_a_short_row_ends_and_transparent_cells_show_the_page(page: Any) -> None:
    shown(page, [[0] * 100, [1] * 50, [4] * 100])
    left, width = plot(page)
    codes = codes_along(page, 1)
    assert sum(code == 1 for code in codes) == pytest.approx(width / 2, abs=1)
    assert set(codes_along(page, 2)[left : left + width]) == {-1}


def test_the_line_below_says_what_is_under_the_pointer(page: Any) -> None:
    canvas = shown(page, [[0] * 10, [1] * 4 + [2] * 6], texts=[None, list("abcdefghij")])
    assert "Point at a cell" in says(page)
    left, width = plot(page)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + left + 0.55 * width, box["y"] + 27)
    assert says(page) == 'row 1, token 5: two, "f" (tokens 4 to 9)'
    assert sent(page, "hovered") == {"row": 1, "cell": 5}
    page.mouse.move(5, 5)
    assert "Point at a cell" in says(page)


def test_positions_are_in_the_unit_of_the_axis(page: Any) -> None:
    canvas = shown(page, [[0] * 10], unit="s", start=100.0, cell=0.25)
    left, width = plot(page)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + left + 0.55 * width, box["y"] + 9)
    assert says(page) == "row 0, 101.25 s: zero (100.00 to 102.50 s)"


def test_a_click_selects_and_escape_clears(page: Any) -> None:
    canvas = shown(page, [[0] * 10, [1] * 10])
    left, width = plot(page)
    canvas.click(position={"x": left + 0.35 * width, "y": 27})
    assert sent(page, "selected") == {"row": 1, "cell": 3}
    page.keyboard.press("Escape")
    page.wait_for_function("() => window.sent.at(-1).selected === null")


def test_the_wheel_zooms_at_the_pointer_and_the_page_scrolls_at_the_widest_view(page: Any) -> None:
    canvas = shown(page, [[0] * 1000])
    left, width = plot(page)
    canvas.hover(position={"x": left + 0.25 * width, "y": 9})
    page.mouse.wheel(0, -100)
    first, last = sent(page, "view")
    assert last - first < 1000
    assert (250 - first) / (last - first) == pytest.approx(0.25, abs=0.01)
    page.mouse.wheel(0, 1000)
    page.wait_for_function("() => JSON.stringify(window.state.view) === '[0,1000]'")
    refused = canvas.evaluate(
        """(canvas) => {
          const event = new WheelEvent("wheel", { deltaY: 100, cancelable: true, bubbles: true });
          canvas.dispatchEvent(event);
          return event.defaultPrevented;
        }"""
    )
    assert not refused


def test_dragging_moves_the_view_and_selects_nothing(page: Any) -> None:
    canvas = shown(page, [[0] * 1000])
    page.evaluate("() => window.model.set('view', [400, 600])")
    painted(page)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 9, steps=4)
    page.mouse.up()
    page.wait_for_function("() => window.state.view[0] > 400")
    first, last = page.evaluate("() => window.state.view")
    assert last - first == pytest.approx(200)
    assert page.evaluate("() => window.state.selected") is None


def test_keys_go_from_cell_to_cell_and_select(page: Any) -> None:
    canvas = shown(page, [[0, 0, 1, 1, 2], [2, 2]])
    canvas.focus()
    expected = {
        "ArrowRight": "row 0, token 0: zero (tokens 0 to 1)",
        "Shift+ArrowRight": "row 0, token 2: one (tokens 2 to 3)",
        "End": "row 0, token 4: two",
        "ArrowDown": "row 1, token 1: two (tokens 0 to 1)",
        "Home": "row 1, token 0: two (tokens 0 to 1)",
        "ArrowLeft": "row 1, token 0: two (tokens 0 to 1)",
        "ArrowUp": "row 0, token 0: zero (tokens 0 to 1)",
    }
    for key, text in expected.items():
        page.keyboard.press(key)
        assert says(page) == text
    page.keyboard.press("Enter")
    assert sent(page, "selected") == {"row": 0, "cell": 0}


def test_keys_zoom_and_move_the_view(page: Any) -> None:
    canvas = shown(page, [[0] * 1000])
    canvas.focus()
    page.keyboard.press("w")
    first, last = sent(page, "view")
    assert last - first == pytest.approx(700)
    page.keyboard.press("d")
    page.wait_for_function(f"() => window.state.view[0] > {first}")
    page.keyboard.press("0")
    page.wait_for_function("() => JSON.stringify(window.state.view) === '[0,1000]'")


def test_a_key_goes_to_cells_out_of_sight(page: Any) -> None:
    canvas = shown(page, [[0] * 1000])
    page.evaluate("() => window.model.set('view', [0, 50])")
    canvas.focus()
    page.keyboard.press("End")
    page.wait_for_function("() => window.state.view[1] === 1000")
    assert says(page).startswith("row 0, token 999")


def test_many_rows_scroll(page: Any) -> None:
    canvas = shown(page, [[number % 3] * 10 for number in range(500)])
    assert canvas.bounding_box()["height"] < 400
    canvas.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(120):
        page.keyboard.press("ArrowDown")
    assert says(page).startswith("row 120,")
    painted(page)
    canvas.hover(position={"x": 400, "y": 335})
    assert int(says(page).split(",")[0].removeprefix("row ")) == pytest.approx(120, abs=1)


def test_python_can_set_the_view_the_selection_and_other_cells(page: Any) -> None:
    shown(page, [[0] * 100])
    page.evaluate("() => window.model.set('selected', { row: 0, cell: 7 })")
    assert says(page).startswith("Selected: row 0, token 7: zero")
    page.evaluate(
        """() => {
          window.model.set("_cells", new DataView(Uint8Array.from(Array(100).fill(1)).buffer));
          window.model.set("_labels", ["a", "changed", "c", "d", ""]);
        }"""
    )
    painted(page)
    painted(page)
    assert says(page).startswith("Selected: row 0, token 7: changed")
    assert 1 in codes_along(page, 0)
    assert page.locator("li").all_inner_texts() == ["changed"]


def test_a_selection_from_the_start_is_said(page: Any) -> None:
    """As in an exported page, or a cell that ran again."""
    shown(page, [[0] * 100], cell=0.123456789, unit="s", selected={"row": 0, "cell": 50})
    assert says(page) == "Selected: row 0, 6.17 s: zero (0.00 to 12.35 s)"


def test_the_widget_has_a_name_a_role_and_a_focus_ring(page: Any) -> None:
    canvas = shown(page, [[0, 1, 2]], alt="Three cells.")
    assert canvas.get_attribute("aria-label") == "Three cells."
    assert canvas.get_attribute("role") == "application"
    page.keyboard.press("Tab")
    while not canvas.evaluate("(canvas) => document.activeElement === canvas"):
        page.keyboard.press("Tab")
    assert canvas.evaluate("(canvas) => getComputedStyle(canvas).outlineStyle") == "solid"
    assert page.locator("li").all_inner_texts() == ["zero", "one", "two"]


def test_the_color_of_text_follows_the_theme(page: Any) -> None:
    shown(page, [[0] * 10, [1] * 10], colors=["#0072B2", "currentColor"], labels=["a", "b"])
    middle = """() => { const c = document.querySelector("canvas");
      return Array.from(c.getContext("2d").getImageData(c.width / 2, 27, 1, 1).data); }"""
    assert page.evaluate(middle) == [0, 0, 0, 255]
    page.evaluate("() => { document.body.style.color = 'rgb(250, 251, 252)'; }")
    page.wait_for_function(f"() => ({middle})()[0] === 250")


def test_a_closed_widget_no_longer_listens(page: Any) -> None:
    shown(page, [[0] * 10])
    page.evaluate("() => { window.close_widget(); window.dispatchEvent(new WheelEvent('wheel')); }")


def test_a_strip_without_rows_says_so(page: Any) -> None:
    canvas = shown(page, [], names=[])
    canvas.focus()
    page.keyboard.press("ArrowRight")
    assert canvas.is_visible()


@pytest.mark.usefixtures("timeline")
class TestPlaying:
    """Time of these pages moves by `run_for` only."""

    @pytest.fixture
    def timeline(self, page: Any) -> Any:
        page.clock.install(time=0)
        rows = [[0] * 50 + [1] * 50, [1] * 100, [4] * 100]
        canvas = shown(page, rows, names=["", "", ""], unit="s", start=100.0, cell=0.3)
        page.clock.pause_at(1_000_000)
        return canvas

    def pale(self, page: Any, row: int) -> list[bool]:
        """For each pixel along a row, whether it is drawn in a pale color."""
        y = int((row + 0.5) * ROW_PX)
        alphas = page.evaluate(
            f"""() => {{ const c = document.querySelector("canvas");
              const data = c.getContext("2d").getImageData(0, {y}, c.width, 1).data;
              return Array.from(data).filter((_, at) => at % 4 === 3); }}"""
        )
        return [0 < alpha < 255 for alpha in alphas]

    def test_the_clock_moves_over_the_visible_time_and_later_cells_are_pale(
        self, page: Any
    ) -> None:
        left, width = plot(page)
        page.get_by_role("button", name="play").click()
        for seconds in (3, 6):
            page.clock.run_for(3000)
            pale = self.pale(page, 1)[left : left + width]
            assert pale.index(True) / width == pytest.approx(seconds / 15, abs=0.02)
            assert all(pale[pale.index(True) :])
        assert page.locator(".says").get_attribute("aria-live") == "off"
        assert says(page).endswith(" s: zero (1), one (1)")
        assert float(says(page).split(" s")[0]) == pytest.approx(100 + 6 / 15 * 30, abs=0.3)
        page.get_by_role("button", name="pause").click()
        at = says(page)
        page.clock.run_for(3000)
        assert says(page) == at
        assert page.locator(".says").get_attribute("aria-live") == "polite"
        page.get_by_role("button", name="play").click()
        page.clock.run_for(3000)
        assert says(page).endswith(" s: one (2)"), "it did not continue where it was paused"
        page.clock.run_for(60_000)
        assert says(page) == "130.0 s: one (2)"
        assert not any(self.pale(page, 1))
        assert page.get_by_role("button", name="play").is_visible()

    def test_keys_play_pause_and_rewind(self, page: Any, timeline: Any) -> None:
        timeline.focus()
        page.keyboard.press("p")
        page.clock.run_for(3000)
        page.keyboard.press("p")
        at = says(page)
        assert at.startswith("106.0") or at.startswith("105.9")
        page.clock.run_for(3000)
        assert says(page) == at
        page.keyboard.press("Escape")
        page.clock.run_for(100)
        assert "Play, pause: P." in says(page)
        assert not any(self.pale(page, 1))

    def test_a_zoomed_view_is_played_slower_and_nothing_beyond_it(self, page: Any) -> None:
        page.evaluate("() => window.model.set('view', [40, 60])")
        page.get_by_role("button", name="play").click()
        page.clock.run_for(3000)
        assert float(says(page).split(" s")[0]) == pytest.approx(112 + 3 / 15 * 6, abs=0.1)
        page.clock.run_for(60_000)
        assert says(page).startswith("118.0 s")
        assert page.evaluate("() => window.state.view") == [40, 60]

    def test_reduced_motion_gets_a_picture_a_second(self, page: Any) -> None:
        page.emulate_media(reduced_motion="reduce")
        page.get_by_role("button", name="play").click()
        seen = []
        for _ in range(30):
            page.clock.run_for(100)
            seen.append(says(page))
        assert len(set(seen)) == 3
        assert float(seen[-1].split(" s")[0]) == pytest.approx(100 + 2 / 15 * 30, abs=0.3)

    def test_other_rows_keep_the_clock_while_they_have_its_time(self, page: Any) -> None:
        page.get_by_role("button", name="play").click()
        page.clock.run_for(3000)
        page.evaluate("() => { model.set('_labels', ['a', 'b', 'c', 'd', '']); }")
        page.clock.run_for(100)
        assert says(page).endswith("a (1), b (1)")
        page.evaluate("() => { model.set('_start', 500.0); }")
        page.clock.run_for(100)
        assert "Point at a cell" in says(page)
        assert not any(self.pale(page, 1))


def test_tokens_have_no_time_to_play(page: Any) -> None:
    canvas = shown(page, [[0] * 10])
    assert not page.get_by_role("button", name="play").is_visible()
    canvas.focus()
    page.keyboard.press("p")
    assert "Play" not in says(page)
