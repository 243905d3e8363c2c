"""Pictures for the cards of the gallery: the first large one of each notebook, 640 x 335 pixels."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Any, Final

from PIL import Image, ImageOps
from playwright.sync_api import Page

from tools.notebooks.files import THUMBNAIL_PX, existing, thumbnail
from tools.notebooks.pages import chromium, gallery, open_page, wait_until_drawn

_COLORS: Final = 128
_WIDTH_PX: Final = 1100
_FIRST_LARGE: Final = """
() => {
  const roots = [document], found = [];
  while (roots.length) {
    for (const one of roots.shift().querySelectorAll("*")) {
      if (one.shadowRoot) roots.push(one.shadowRoot);
      if (!one.matches("svg[role=img], .vega-embed svg, canvas")) continue;
      const { x, y, width, height } = one.getBoundingClientRect();
      if (width >= 300 && height >= 150) found.push([y, x, width, height]);
    }
  }
  return found.sort((one, other) => one[0] - other[0])[0];
}
"""
"""Top, left, width and height of the first picture of some size."""
_MARGIN_PX: Final = 8
_LOOK_MS: Final = 300


def draw(names: Iterable[str] | None = None) -> None:
    """Draw the pictures of these notebooks, or of all."""
    with chromium() as browser, gallery() as address:
        for name in existing() if names is None else names:
            print(f"drawing {name}", file=sys.stderr, flush=True)
            page_address = f"{address}/?file={name}.py"
            with open_page(browser, page_address, width_px=_WIDTH_PX) as watched:
                wait_until_drawn(watched)
                place = _at_rest(watched.page)
                shot = watched.page.screenshot(clip=place)
            picture = Image.open(io.BytesIO(shot)).convert("RGB")
            small = ImageOps.pad(picture, THUMBNAIL_PX, Image.Resampling.LANCZOS, color="white")
            thumbnail(name).parent.mkdir(parents=True, exist_ok=True)
            small.quantize(_COLORS).save(thumbnail(name), optimize=True)


def _at_rest(page: Page) -> Any:
    """Where the picture is, once nothing above it is still being drawn.

    Raises:
        playwright.sync_api.TimeoutError: there is no picture of that size.
    """
    page.wait_for_function(_FIRST_LARGE)
    before = None
    while (found := page.evaluate(_FIRST_LARGE)) != before:
        before = found
        page.wait_for_timeout(_LOOK_MS)
    top, left, width, height = found
    return {
        "x": left - _MARGIN_PX,
        "y": top - _MARGIN_PX,
        "width": width + 2 * _MARGIN_PX,
        "height": height + 2 * _MARGIN_PX,
    }
