"""Seconds until the notebooks show pictures, and after a control moves; frames of a large strip.

Each notebook has a server and a page of its own, so that what it imports is counted. Clocks begin
when the page is asked for, from a server that answers already. CPU seconds are of the server
(`python_`) and of Chromium (`browser_`); wall seconds depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from playwright.sync_api import TimeoutError

from benchmarks.harness import Arguments, Figures, parse, report, spread
from tools.notebooks.files import FOLDER, existing
from tools.notebooks.pages import chromium, gallery, open_page, served, wait_until_drawn

STRIP_ROWS: Final = 500
STRIP_CELLS: Final = 1000
ZOOM_S: Final = 3.0
SERVER: Final = ("-m", "marimo", "run", "--headless", "--no-token", "--host", "127.0.0.1")
MOST_TRIED: Final = 3
MOST_WAITED_MS: Final = 10_000
CONTROLS: Final = ("[role=slider]", "select", "[role=switch], [role=checkbox], [role=radio]")
"""What is moved: the first of these kinds that the page has."""

PICTURES = """
function seen() {
  const found = [], roots = [document];
  while (roots.length) {
    const root = roots.pop();
    for (const one of root.querySelectorAll("*")) {
      if (one.shadowRoot) roots.push(one.shadowRoot);
      const picture = one.tagName === "CANVAS" || one.matches("svg[role=img], .vega-embed svg")
        || one.matches("img[src^='data:image']");
      const box = picture && one.getBoundingClientRect();
      if (box && box.width > 100 && box.height > 30)
        found.push(one.tagName === "CANVAS" ? one.toDataURL() : one.outerHTML);
    }
  }
  return found.join();
}
"""
"""All pictures of the page as text, those in widgets included; icons are smaller."""

_STRIP_PAGE = """
import marimo
app = marimo.App(width="medium")

@app.cell
def _():
    import marimo as mo
    import numpy as np
    from areal_lab.widgets.strip import Strip

    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 5, {cells}, dtype=np.uint8) for _ in range({rows})]
    names = [str(row) for row in range({rows})]
    colors = ["#440154", "#3b528b", "#21918c", "#5ec962", "#fde725"]
    labels = [f"lag {{lag}}" for lag in range(5)]
    mo.ui.anywidget(Strip(rows, colors=colors, labels=labels, names=names, title="Tokens"))
    return
"""
_EMPTY_PAGE = """
import marimo
app = marimo.App(width="medium")

@app.cell
def _():
    import marimo as mo
    mo.Html('<svg role="img" width="400" height="200"><rect width="300" height="100"/></svg>')
    return
"""
_WATCH = """
() => {
  const before = seen();
  let began = null;
  window.changed = null;
  const begin = () => { began ??= performance.now(); };
  for (const event of ["keydown", "pointerdown", "change"])
    document.addEventListener(event, begin, { capture: true });
  const look = () => {
    if (window.look !== look) return;
    const from = performance.now();
    if (began !== null && seen() !== before) window.changed = performance.now() - began;
    else setTimeout(look, Math.max(10, 4 * (performance.now() - from)));  // a fifth of the time
  };
  window.look = look;
  look();
}
"""
_FRAMES = """
() => {
  window.frames_ms = [];
  requestAnimationFrame(function note(now) {
    window.frames_ms.push(now);
    requestAnimationFrame(note);
  });
}
"""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds since some moment."""

    wall_s: float
    python_cpu_s: float
    browser_cpu_s: float


def main() -> None:
    """Measure and report."""
    arguments = parse(
        __doc__,
        repeats=3,
        quick_repeats=1,
        add_own=add_own,
    )
    report(measure(arguments), arguments)


def add_own(parser: argparse.ArgumentParser) -> None:
    """Arguments that only this benchmark has."""
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these notebooks, such as 03_staleness"
    )
    parser.add_argument(
        "--gallery", action="store_true", help="as `make notebooks` serves them, one per server"
    )


def measure(arguments: Arguments) -> Figures:
    """All figures; the quick form has one notebook."""
    names = arguments.own.only or existing()[: 1 if arguments.quick else None]
    rows: list[dict[str, Any]] = []
    spreads: dict[str, dict[str, float]] = {}
    with chromium() as browser:
        for name in names:
            print(f"measuring {name}", file=sys.stderr, flush=True)
            notebook, served_by = FOLDER / f"{name}.py", arguments.own.gallery
            rounds = [
                of_notebook(browser, notebook, in_gallery=served_by)
                for _ in range(arguments.repeats)
            ]
            columns = {key: [one[key] for one in rounds] for key in rounds[0] if key != "control"}
            medians = {key: statistics.median(values) for key, values in columns.items()}
            rows.append({"notebook": name, **medians, "control": rounds[0]["control"]})
            spreads |= {f"{name}.{key}": spread(values) for key, values in columns.items()}
        strip = [of_strip(browser) for _ in range(arguments.repeats)]
        empty = [of_empty(browser) for _ in range(arguments.repeats)]
    return {
        "rows": rows,
        "empty_first_wall_s": statistics.median(empty),
        "strip_tokens": STRIP_ROWS * STRIP_CELLS,
        "strip_frames_per_s": statistics.median(strip),
        "spread": {
            **spreads,
            "strip_frames_per_s": spread(strip),
            "empty_first_wall_s": spread(empty),
        },
    }


def of_notebook(browser: Any, notebook: Path, *, in_gallery: bool) -> dict[str, Any]:
    """Seconds of one notebook: as a script, and as an app in a browser."""
    figures = as_script(notebook)
    server = own_gallery(notebook) if in_gallery else own_server(notebook)
    with server as address, stopwatch() as spent:
        with open_page(browser, address) as watched:
            page = watched.page
            wait_for_a_picture(page)
            figures |= _named("first", spent())
            wait_until_drawn(watched)
            figures |= _named("last", spent())
            figures |= after_a_move(page, spent)
        assert not watched.problems, watched.problems
    return figures


def as_script(notebook: Path) -> dict[str, Any]:
    """Seconds of `python NOTEBOOK`, which computes every picture and shows none."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(notebook)], cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"script_wall_s": time.perf_counter() - began, "script_cpu_s": cpu_s}


def after_a_move(page: Any, spent: Callable[[], Spent]) -> dict[str, Any]:
    """Seconds from a key on a control to the first picture that is different.

    Controls without an effect on pictures are passed over; nan if there is no other.
    """
    for kind in CONTROLS:
        for control in page.locator(kind).all()[:MOST_TRIED]:
            page.evaluate(_WATCH)
            before = spent()
            _move(control)
            try:
                page.wait_for_function("window.changed !== null", timeout=MOST_WAITED_MS)
            except TimeoutError:
                continue
            cpu_s = spent().python_cpu_s - before.python_cpu_s
            wall_s = page.evaluate("window.changed / 1000")
            return {"moved_wall_s": wall_s, "moved_python_cpu_s": cpu_s, "control": kind}
    nothing = float("nan")
    return {"moved_wall_s": nothing, "moved_python_cpu_s": nothing, "control": "none"}


def wait_for_a_picture(page: Any) -> None:
    """Return once the page shows a picture."""
    page.add_script_tag(content=PICTURES)
    page.wait_for_function("seen() !== ''", polling="raf")


def of_empty(browser: Any) -> float:
    """Wall seconds until a notebook with nothing but a rectangle shows it: marimo's own part."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = Path(folder) / "empty.py"
        notebook.write_text(_EMPTY_PAGE)
        with own_server(notebook) as address:
            began = time.perf_counter()
            with open_page(browser, address) as watched:
                wait_for_a_picture(watched.page)
                return time.perf_counter() - began


def of_strip(browser: Any) -> float:
    """Frames per second while the wheel zooms into a strip of half a million tokens."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = Path(folder) / "strip.py"
        notebook.write_text(_STRIP_PAGE.format(rows=STRIP_ROWS, cells=STRIP_CELLS))
        with own_server(notebook) as address, open_page(browser, address) as watched:
            page = watched.page
            wait_for_a_picture(page)
            canvas = page.locator("canvas").first
            box = canvas.bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            before = page.evaluate("seen()")
            page.evaluate(_FRAMES)
            for delta in (-60, 60):
                until = time.perf_counter() + ZOOM_S / 2
                while time.perf_counter() < until:
                    page.mouse.wheel(0, delta)
                if delta < 0:
                    assert page.evaluate("seen()") != before, "the wheel did not zoom"
            times: list[float] = page.evaluate("window.frames_ms")
    return 1000 * (len(times) - 1) / (times[-1] - times[0])


@contextmanager
def own_server(notebook: Path) -> Iterator[str]:
    """A server of one notebook that answers; yields its address."""
    with served([*SERVER, str(notebook)], ready="URL: ") as address:
        yield address


@contextmanager
def own_gallery(notebook: Path) -> Iterator[str]:
    """A server of the gallery that answers; yields the address of a notebook in it."""
    with gallery() as address:
        yield f"{address}/?file={notebook.name}"


@contextmanager
def stopwatch() -> Iterator[Callable[[], Spent]]:
    """A clock of wall and CPU seconds of all processes below this one."""
    began, before = time.perf_counter(), _cpu_s()

    def spent() -> Spent:
        wall_s, now = time.perf_counter() - began, _cpu_s()
        return Spent(wall_s, now["python"] - before["python"], now["chrom"] - before["chrom"])

    yield spent


def _cpu_s() -> dict[str, float]:
    """CPU seconds of servers and of Chromium, which are told apart by their names."""
    seconds = {"python": 0.0, "chrom": 0.0}
    for process in psutil.Process().children(recursive=True):
        try:
            times, name = process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            continue
        for kind in seconds:
            if name.startswith(kind):
                seconds[kind] += times.user + times.system
    return seconds


def _move(control: Any) -> None:
    if control.get_attribute("role") == "slider":
        at, end = (control.get_attribute(f"aria-value{which}") for which in ("now", "max"))
        control.press("ArrowLeft" if at is not None and at == end else "ArrowRight")
    elif control.evaluate("(element) => element.tagName") == "SELECT":
        control.select_option(index=control.locator("option").count() - 1)
    else:
        control.click()


def _named(what: str, spent: Spent) -> dict[str, float]:
    return {
        f"{what}_wall_s": spent.wall_s,
        f"{what}_python_cpu_s": spent.python_cpu_s,
        f"{what}_browser_cpu_s": spent.browser_cpu_s,
    }


if __name__ == "__main__":
    main()
