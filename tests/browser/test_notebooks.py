"""Every notebook as an app: readable, no errors, no requests to others, controls that work."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tools.notebooks.files import app_title, existing, source
from tools.notebooks.pages import HEIGHT_PX, Watched, open_page, served, wait_until_drawn

pytestmark = pytest.mark.browser

WIDTHS_PX = (1400, 820, 390)
BRIGHT, MOST_BRIGHT = 235, 0.03
"""Gray level from which a pixel is bright, and the share of a dark page that may be."""
PICTURES = "svg[role=img], canvas, marimo-vega img, .vega-embed svg, img[src^='data:image']"
CONTROLS = "[role=slider], select, [role=switch], [role=checkbox], [role=radio]"
SMALLEST_PX = 8.0
"""Size of letters, on the screen, that can be read."""
LETTERS = """
() => {
  const found = [], roots = [document];
  while (roots.length) {
    for (const one of roots.pop().querySelectorAll("*")) {
      if (one.shadowRoot) roots.push(one.shadowRoot);
      const text = [...one.childNodes].filter((child) => child.nodeType === Node.TEXT_NODE)
        .map((child) => child.textContent).join("").replace(/[\\s\\u200b]/g, "");
      const box = one.getBoundingClientRect();
      if (!text || one.matches("style, script") || !box.width || !box.height) continue;
      const drawn = one.getScreenCTM?.();
      const scale = drawn ? Math.hypot(drawn.a, drawn.b) : 1;
      found.push([parseFloat(getComputedStyle(one).fontSize) * scale, text]);
    }
  }
  return found;
}
"""
"""Size in pixels and text of every element with letters; those of a canvas are not known."""
CUT = """
() => {
  const found = [], roots = [document];
  while (roots.length) {
    for (const one of roots.pop().querySelectorAll("*")) {
      if (one.shadowRoot) roots.push(one.shadowRoot);
      const box = one.getBoundingClientRect();
      const kind = "svg.marks, svg[role=img], canvas, select, pre, code, "
        + ".katex-display .base, [role=radiogroup]";
      const frame = one.matches("svg.marks text") && one.closest("svg").getBoundingClientRect();
      if (!box.width || one.closest("table")) continue;
      if ((one.matches(kind) && box.right > innerWidth + 1)
          || (frame && (box.right > frame.right + 1 || box.left < frame.left - 1)))
        found.push(`${one.tagName} ends at ${Math.round(box.right)}: ${one.textContent}`);
    }
  }
  return found;
}
"""
"""Pictures, formulas, code and choices that leave the window, and text of a chart that leaves the
chart; a table of data scrolls."""
MOST_TRIES, TRY_MS = 300, 100
SETTLED = 5
"""Looks at the pictures, one after another, that have to find the same."""
FIRST_CONTROL: dict[str, str] = {
    "06_train_live": "[role=slider]",  # the menu of runs has one entry
    "01_ratio_and_clip": "[role=slider]",  # the radio in front of it is the one that is chosen
    "03_staleness": "[role=slider]",  # the radio in front of it is the reader's guess
}
"""Which control to use, where the first one changes no picture."""


@dataclass(frozen=True, slots=True)
class App:
    """A notebook as an app, open in a light page as wide as the first of the widths."""

    name: str
    watched: Watched


@pytest.fixture(scope="module", params=existing())
def app(request: pytest.FixtureRequest, browser: Any, gallery_address: str) -> Iterator[App]:
    """Each app in turn: opening one runs its notebook."""
    address = f"{gallery_address}/?file={request.param}.py"
    with open_page(browser, address, width_px=WIDTHS_PX[0]) as watched:
        wait_until_drawn(watched)
        yield App(request.param, watched)


def test_the_gallery_names_every_notebook_and_shows_its_picture(
    browser: Any, gallery_address: str
) -> None:
    with open_page(browser, gallery_address) as watched:
        for name in existing():
            title = app_title(source(name))
            assert title is not None
            watched.page.get_by_text(title).first.wait_for()
        watched.page.wait_for_function("[...document.images].every((image) => image.complete)")
        broken = "[...document.images].filter((image) => !image.naturalWidth).length"
        assert watched.page.evaluate(broken) == 0
    assert watched.problems == []


def test_an_app_is_readable_when_its_window_gets_narrower(app: App, screenshots: Path) -> None:
    for width_px in WIDTHS_PX:
        shot_of(app.watched, width_px, screenshots / f"{app.name}-{width_px}-light.png")
    assert app.watched.problems == []


def test_a_control_changes_a_picture(app: App) -> None:
    page = app.watched.page
    before = resized(page, WIDTHS_PX[0])
    control = page.locator(FIRST_CONTROL.get(app.name, CONTROLS)).first
    if control.get_attribute("role") == "slider":
        control.press("ArrowRight")
    elif control.evaluate("(element) => element.tagName") == "SELECT":
        control.select_option(index=control.locator("option").count() - 1)
    else:
        control.click()
    wait_for(page, lambda: pictures(page) != before, "no picture has changed")
    assert app.watched.problems == []


FAILS = """
import marimo
app = marimo.App()

@app.cell
def _():
    import marimo as mo
    slider = mo.ui.slider(0, 4, label="last")
    mo.vstack([slider, mo.md("# The code")])
    return mo, slider

@app.cell
def _(mo, slider):
    mo.stop(slider.value > 1)
    below = 1 / (1 - slider.value)
    return (below,)

@app.cell
def _(below):
    after = below
    return
"""


def test_a_cell_that_fails_is_a_problem_and_one_that_stops_is_none(
    browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    command = ["-m", "marimo", "run", "--headless", "--no-token", "--host", "127.0.0.1"]
    serving = served([*command, str(tmp_path / "fails.py")], ready="URL: ")
    with serving as address, open_page(browser, address) as watched:
        wait_until_drawn(watched)
        assert watched.problems == []
        watched.page.locator("[role=slider]").press("End")
        wait_for(watched.page, lambda: watched.runs > 1, "the cells did not run again")
        assert watched.problems == []
        for _ in range(3):
            watched.page.locator("[role=slider]").press("ArrowLeft")
        wait_for(watched.page, lambda: bool(watched.problems), "no failure was noticed")
    assert "internal" in watched.problems[0]


@pytest.mark.parametrize("name", existing())
def test_a_dark_app_is_readable_when_its_window_gets_wider(
    browser: Any, gallery_address: str, screenshots: Path, name: str
) -> None:
    narrow_first = WIDTHS_PX[::-1]
    address = f"{gallery_address}/?file={name}.py"
    with open_page(browser, address, width_px=narrow_first[0], scheme="dark") as watched:
        wait_until_drawn(watched)
        for width_px in narrow_first:
            shot = shot_of(watched, width_px, screenshots / f"{name}-{width_px}-dark.png")
            assert bright_share(shot) < MOST_BRIGHT, f"{width_px} px: white on dark"
    assert watched.problems == []


def shot_of(watched: Watched, width_px: int, path: Path) -> bytes:
    """A picture of an app in a window of this width, in which it must be readable."""
    page = watched.page
    resized(page, width_px)
    shot: bytes = page.screenshot(path=path)
    assert page.get_by_text("internal error").count() == 0
    wider = "document.documentElement.scrollWidth - window.innerWidth"
    assert page.evaluate(wider) <= 0, f"{width_px} px: wider than the window"
    assert page.evaluate(CUT) == [], f"{width_px} px: cut at the right"
    letters = page.evaluate(LETTERS)
    assert len(letters) > 50
    small = [text for size_px, text in letters if size_px < SMALLEST_PX]
    assert small == [], f"{width_px} px: letters under {SMALLEST_PX} px"
    return shot


def resized(page: Any, width_px: int) -> str:
    """Its pictures in a window of this width; charts draw themselves again."""
    page.set_viewport_size({"width": width_px, "height": HEIGHT_PX})
    seen = [pictures(page)]

    def settled() -> bool:
        seen.append(pictures(page))
        return len(seen) > SETTLED and len(set(seen[-SETTLED:])) == 1

    wait_for(page, settled, "its pictures keep changing")
    return seen[-1]


def wait_for(page: Any, condition: Callable[[], bool], otherwise: str) -> None:
    for _ in range(MOST_TRIES):
        if condition():
            return
        page.wait_for_timeout(TRY_MS)
    pytest.fail(otherwise)


def pictures(page: Any) -> str:
    """All pictures of a page as text; locators reach into the shadow roots of widgets."""
    one = "one.tagName === 'CANVAS' ? one.toDataURL() : one.outerHTML"
    content: str = page.locator(PICTURES).evaluate_all(f"(all) => all.map((one) => {one}).join()")
    return content


def bright_share(shot: bytes) -> float:
    """Share of pixels that are nearly white."""
    gray = np.asarray(Image.open(io.BytesIO(shot)).convert("L"))
    return float((gray > BRIGHT).mean())
