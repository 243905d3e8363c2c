"""Pictures that are controls: the point of notebook 1 is dragged, a tile of notebook 2 clicked."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tools.notebooks.pages import open_page, wait_until_drawn

pytestmark = pytest.mark.browser


def text_of(page: Any, said: str) -> Any:
    """The text marks of all charts that contain this."""
    return page.locator("svg.marks text", has_text=said)


def center(box: dict[str, float]) -> tuple[float, float]:
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_a_dragged_token_moves_the_sliders_and_the_arrows(
    browser: Any, gallery_address: str
) -> None:
    with open_page(browser, f"{gallery_address}/?file=01_ratio_and_clip.py") as watched:
        page = watched.page
        wait_until_drawn(watched)
        plane = page.locator("svg.marks").filter(has_text="only PPO")
        text_of(page, "r = 1.00, w = 1.50").wait_for()
        before = page.locator("[role=slider]").nth(1).get_attribute("aria-valuenow")
        x, y = center(text_of(page, "r = 1.00, w = 1.50").bounding_box())
        page.mouse.move(x, y + 16)
        page.mouse.down()
        box = plane.bounding_box()
        page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 0.8 * box["height"], steps=8)
        page.mouse.up()
        # Far to the right and below: three losses have no gradient, and the slider followed.
        text_of(page, "0, no gradient").nth(2).wait_for()
        assert text_of(page, "r = 1.00, w = 1.50").count() == 0
        expect(page.locator("[role=slider]").nth(1)).not_to_have_attribute("aria-valuenow", before)
    assert watched.problems == []


def test_a_clicked_tile_changes_its_row_and_the_tables(browser: Any, gallery_address: str) -> None:
    with open_page(browser, f"{gallery_address}/?file=02_advantages.py") as watched:
        page = watched.page
        wait_until_drawn(watched)
        tiles = page.locator("svg.marks").filter(has_text="of 8")
        assert tiles.get_by_text("1 of 8").count() == 1
        page.mouse.click(*center(tiles.get_by_text("820", exact=True).bounding_box()))
        tiles.get_by_text("2 of 8").wait_for()
        # GRPO: two right responses of eight have an advantage of 1.62 each.
        page.get_by_text("1.6", exact=True).first.wait_for()
        page.mouse.click(*center(tiles.get_by_text("820", exact=True).bounding_box()))
        tiles.get_by_text("1 of 8").wait_for()
    assert watched.problems == []
