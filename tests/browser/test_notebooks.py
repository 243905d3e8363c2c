"""Every notebook as an app and as an offline page: no errors, no requests, controls that work."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from tools.notebooks.export import export
from tools.notebooks.files import app_title, existing, source
from tools.notebooks.pages import files, open_page, wait_until_drawn

pytestmark = pytest.mark.browser

WIDTHS_PX = (1280, 820)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
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
MOST_TRIES, TRY_MS = 300, 100
FIRST_CONTROL: dict[str, str] = {
    "06_train_live": "[role=slider]",  # the menu of runs has one entry
    "01_ratio_and_clip": "[role=slider]",  # the radio in front of it is the one that is chosen
    "03_staleness": "[role=slider]",  # the radio in front of it is the reader's guess
}
"""Which control to use, where the first one changes no picture."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("notebooks")
    export(folder)
    with files(folder) as address:
        yield address


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


@pytest.mark.parametrize("name", existing())
def test_an_app_is_readable_at_every_width_and_scheme(
    browser: Any, gallery_address: str, screenshots: Path, name: str
) -> None:
    for width_px in WIDTHS_PX:
        for scheme in SCHEMES:
            address = f"{gallery_address}/?file={name}.py"
            with open_page(browser, address, width_px=width_px, scheme=scheme) as watched:
                page = watched.page
                wait_until_drawn(watched)
                shot = page.screenshot(path=screenshots / f"{name}-{width_px}-{scheme}.png")
                assert page.get_by_text("internal error").count() == 0
                wider = "document.documentElement.scrollWidth - window.innerWidth"
                assert page.evaluate(wider) <= 0, f"{width_px} px: wider than the window"
                letters = page.evaluate(LETTERS)
                assert len(letters) > 50
                small = [text for size_px, text in letters if size_px < SMALLEST_PX]
                assert small == [], f"{width_px} px: letters under {SMALLEST_PX} px"
            assert watched.problems == [], f"{width_px} px, {scheme}"
            if scheme == "dark":
                assert bright_share(shot) < MOST_BRIGHT, f"{width_px} px: white on dark"


@pytest.mark.parametrize("name", existing())
def test_an_exported_page_shows_its_pictures_without_the_network(
    browser: Any, exported: str, name: str
) -> None:
    with open_page(browser, f"{exported}/{name}.html") as watched:
        watched.page.get_by_role("heading", name="The code").wait_for()
        watched.page.locator(PICTURES).first.wait_for()
    assert watched.problems == []


@pytest.mark.parametrize("name", existing())
def test_a_control_changes_a_picture(browser: Any, gallery_address: str, name: str) -> None:
    with open_page(browser, f"{gallery_address}/?file={name}.py") as watched:
        page = watched.page
        wait_until_drawn(watched)
        before = pictures(page)
        control = page.locator(FIRST_CONTROL.get(name, CONTROLS)).first
        if control.get_attribute("role") == "slider":
            control.press("ArrowRight")
        elif control.evaluate("(element) => element.tagName") == "SELECT":
            control.select_option(index=control.locator("option").count() - 1)
        else:
            control.click()
        tries = 0
        while pictures(page) == before:
            tries += 1
            assert tries < MOST_TRIES, "no picture has changed"
            page.wait_for_timeout(TRY_MS)
    assert watched.problems == []


def pictures(page: Any) -> str:
    """All pictures of a page as text; locators reach into the shadow roots of widgets."""
    one = "one.tagName === 'CANVAS' ? one.toDataURL() : one.outerHTML"
    content: str = page.locator(PICTURES).evaluate_all(f"(all) => all.map((one) => {one}).join()")
    return content


def bright_share(shot: bytes) -> float:
    """Share of pixels that are nearly white."""
    gray = np.asarray(Image.open(io.BytesIO(shot)).convert("L"))
    return float((gray > BRIGHT).mean())
