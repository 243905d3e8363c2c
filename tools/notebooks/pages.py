"""Notebooks in Debian's Chromium: a server, a browser without names of the outside, screenshots."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Literal

from playwright.sync_api import Browser, Page, sync_playwright

from tools.notebooks.files import ROOT

CHROMIUM: Final = Path("/usr/bin/chromium")
HEIGHT_PX: Final = 2600
"""An app scrolls in an inner element, so a screenshot has what the window has."""
_HARMLESS = ("was preloaded using link preload but not used",)
_ERROR: Final = "application/vnd.marimo+error"
_WAIT_MS, _LOOK_MS = 90_000, 50


@dataclass(slots=True)
class Watched:
    """A page, and what went wrong on it."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Console errors, uncaught exceptions, cells that failed, and requests to other machines."""
    runs: int = 0
    """How often marimo said that no cell is left to run."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that cannot look up any name.

    Raises:
        RuntimeError: Chromium is not installed.
    """
    if not CHROMIUM.exists():
        raise RuntimeError(
            f"{CHROMIUM} does not exist; run: apt-get install --no-install-recommends chromium "
            "fonts-dejavu-core"
        )
    rules = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-dev-shm-usage", rules]
        )
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser,
    address: str,
    *,
    width_px: int = 1280,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Watched]:
    """A page at this address, closed afterward."""
    context = browser.new_context(
        viewport={"width": width_px, "height": HEIGHT_PX}, color_scheme=scheme
    )
    watched = Watched(context.new_page())
    page, problems = watched.page, watched.problems
    page.set_default_timeout(_WAIT_MS)

    def received(frame: str | bytes) -> None:
        text = frame.decode(errors="replace") if isinstance(frame, bytes) else frame
        watched.runs += "completed-run" in text
        problems.extend(f"cell {failed}" for failed in _failures(text))

    page.on("console", lambda said: _note(problems, said.type, said.text))
    page.on("pageerror", lambda error: problems.append(f"uncaught: {error}"))
    page.on("request", lambda request: _note_outside(problems, request.url))
    page.on("websocket", lambda socket: socket.on("framereceived", received))
    page.goto(address)
    yield watched
    context.close()


def _note(problems: list[str], kind: str, text: str) -> None:
    if kind == "error" and not any(harmless in text for harmless in _HARMLESS):
        problems.append(f"console: {text}")


def _failures(text: str) -> list[str]:
    """Cells that ended with an error, by a message of the server, whether the page shows it or not.

    A cell after `mo.stop` is none. In an app the message has the id of an error, whose text the
    server prints.
    """
    if _ERROR not in text:
        return []
    said = json.loads(text)
    cell = said.get("data", said)
    output = cell.get("output") or {}
    if output.get("mimetype") != _ERROR:
        return []
    errors = [one for one in output["data"] if one["type"] != "ancestor-stopped"]
    return [f"{cell.get('cell_id')}: {one['type']}: {one.get('msg', '')}" for one in errors]


def _note_outside(problems: list[str], url: str) -> None:
    if not url.startswith(("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:")):
        problems.append(f"request: {url}")


def wait_until_drawn(watched: Watched) -> None:
    """Return once all cells of an app have run, and the page shows what the last one made.

    Raises:
        TimeoutError: the cells still run after a minute and a half.
    """
    waited_ms = 0
    while not watched.runs:
        if waited_ms >= _WAIT_MS:
            raise TimeoutError(f"{watched.page.url}: cells still run after {_WAIT_MS / 1000:.0f} s")
        watched.page.wait_for_timeout(_LOOK_MS)
        waited_ms += _LOOK_MS
    watched.page.get_by_role("heading", name="The code").wait_for()
    # Vega draws into an empty element, when it has room.
    watched.page.wait_for_function(
        "() => [...document.querySelectorAll('marimo-vega')].every("
        "(chart) => (chart.shadowRoot ?? chart).querySelector('canvas, svg, img'))"
    )


@contextmanager
def served(command: list[str], *, ready: str) -> Iterator[str]:
    """Run a server that prints a line with its address; yields the address.

    Args:
        command: arguments of this Python.
        ready: text that stands before the address in that line.

    Raises:
        RuntimeError: the server ended before it printed the line.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    try:
        for line in process.stdout:
            said += line
            if ready in line:
                # A server whose output is not read stops when the pipe is full.
                threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
                yield line.split(ready, 1)[1].strip().replace("localhost", "127.0.0.1")
                return
        raise RuntimeError(f"{' '.join(command)} ended:\n{said}")
    finally:
        process.terminate()
        process.wait()


def _drain(output: IO[str]) -> None:
    with output:
        output.read()


def gallery() -> Any:
    """The gallery on a free port; yields its address."""
    return served(
        ["-m", "tools.notebooks", "gallery", "--headless", "--no-token", "--host", "127.0.0.1"],
        ready="URL: ",
    )


def files(folder: Path) -> Any:
    """A folder as a web site on a free port; yields its address."""
    serve = (
        "import sys, functools, http.server as h; "
        "s = h.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(h.SimpleHTTPRequestHandler, "
        "directory=sys.argv[1])); print('URL: http://127.0.0.1:%d' % s.server_port); "
        "s.serve_forever()"
    )
    return served(["-c", serve, str(folder)], ready="URL: ")
