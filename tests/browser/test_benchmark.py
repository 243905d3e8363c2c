"""What the benchmark of notebooks counts as a picture, and as its change."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import notebooks

PAGE = """<!doctype html><div id="at"></div><input type="range" role="slider" value="1" max="9">
<svg width="12" height="12" role="img"></svg>
<script>
const root = document.getElementById("at").attachShadow({ mode: "open" });
root.innerHTML = "<canvas width=300 height=100></canvas>";
const slider = document.querySelector("input");
const brush = root.querySelector("canvas").getContext("2d");
slider.oninput = () => setTimeout(() => brush.fillRect(0, 0, 10 * slider.value, 50), 100);
</script>"""


@pytest.mark.browser
def test_a_move_is_timed_until_a_canvas_of_a_widget_has_changed(browser: Any) -> None:
    with notebooks.stopwatch() as spent:
        page = browser.new_page()
        page.set_content(PAGE)
        page.add_script_tag(content=notebooks.PICTURES)
        assert page.evaluate("seen()").startswith("data:image/png")
        figures = notebooks.after_a_move(page, spent)
        page.close()
    assert figures["control"] == "[role=slider]"
    assert 0.1 <= figures["moved_wall_s"] < 10
    assert not math.isnan(figures["moved_python_cpu_s"])
