"""Pictures for the cards of the gallery: the first screen of each notebook, 640 x 335 pixels."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from PIL import Image

from tools.notebooks.files import FOLDER, existing
from tools.notebooks.pages import chromium, gallery, open_page, wait_until_drawn

SIZE_PX: Final = (640, 335)
_SCREEN_PX: Final = (1100, 576)
_COLORS = 128


def thumbnail(name: str) -> Path:
    """Where marimo looks for the picture of a notebook's card."""
    return FOLDER / "__marimo__" / "assets" / name / "opengraph.png"


def draw(names: Iterable[str] | None = None) -> None:
    """Draw the pictures of these notebooks, or of all."""
    with chromium() as browser, gallery() as address:
        for name in existing() if names is None else names:
            print(f"drawing {name}", file=sys.stderr, flush=True)
            page_address = f"{address}/?file={name}.py"
            with open_page(browser, page_address, width_px=_SCREEN_PX[0]) as watched:
                wait_until_drawn(watched)
                width, height = _SCREEN_PX
                shot = watched.page.screenshot(
                    clip={"x": 0, "y": 0, "width": width, "height": height}
                )
            picture = Image.open(io.BytesIO(shot)).convert("RGB")
            small = picture.resize(SIZE_PX, Image.Resampling.LANCZOS)
            thumbnail(name).parent.mkdir(parents=True, exist_ok=True)
            small.quantize(_COLORS).save(thumbnail(name), optimize=True)
