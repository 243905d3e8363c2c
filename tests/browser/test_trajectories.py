"""Notebook 7 in a browser: the text of a token under the pointer, its group after a click."""

from __future__ import annotations

import re
from typing import Any

import pytest

from areal_lab.runlog.compare import groups_by_contrast
from areal_lab.runlog.read_run import read_run
from benchmarks.large_run import RECORDED
from tools.notebooks.pages import open_page, wait_until_drawn

pytestmark = pytest.mark.browser


def test_the_pointer_shows_a_token_and_a_click_its_group(
    browser: Any, gallery_address: str
) -> None:
    run = read_run(RECORDED)
    group = int(groups_by_contrast(run).index[0])
    labels = run.tokens.labels(int(run.samples.index[run.samples["group"] == group][0]))
    with open_page(browser, f"{gallery_address}/?file=07_trajectories.py") as watched:
        page = watched.page
        wait_until_drawn(watched)
        strip = page.locator("canvas[tabindex]").first
        # In the first row, a quarter of the way to the longest response.
        at = {"x": strip.bounding_box()["width"] / 3, "y": 9}
        strip.hover(position=at)
        line = page.get_by_text(f"group {group}.0, reward").last
        line.wait_for()
        found = re.search(r"token (\d+):", line.inner_text())
        assert found is not None
        token = int(found[1])
        assert labels[token].strip() in line.inner_text()
        strip.click(position=at)
        page.get_by_text(f"group {group}, sample 3, step").wait_for()
        outlined = page.locator(f"span[title*='token {token}'][style*='outline']")
        assert outlined.inner_text().strip() == labels[token].strip()
    assert watched.problems == []
