"""A page whose Python runs in Chromium, made and opened without names of the outside.

numpy has no wheel for Pyodide outside of Pyodide's own mirror, so the page computes with
`areal_lab.control`. Everything else is as for the notebooks: the wheel, marimo's export, the page.
`tests/simulator/test_in_a_browser.py` and the scripts of `tests/notebooks/test_common.py` show that
the notebooks themselves need nothing that a browser lacks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_lab.capacity import admissible
from tools.notebooks.pages import files, open_page
from tools.notebooks.pyodide_mirror import write_mirror
from tools.notebooks.wasm import export

pytestmark = pytest.mark.browser

PAGE = Path(__file__).with_name("coordinator_page.py")
BATCH_GROUPS = 16
START_MS = 240_000
"""Python, its packages and marimo begin: 15 s on a quiet machine."""
BUSY = "RPC request timed out"
"""marimo's page says so on a busy machine while Python begins, and goes on."""


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which has the core of Pyodide")
    folder = tmp_path_factory.mktemp("mirror")
    write_mirror(folder)
    with files(folder) as address:
        yield address


@pytest.fixture(scope="module")
def exported(mirror: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("wasm")
    export(folder, [PAGE], requires=(), pyodide=f"{mirror}/pyodide/", index=f"{mirror}/index/")
    with files(folder) as address:
        yield f"{address}/{PAGE.stem}.html"


def said(eta: int) -> str:
    started = admissible(0, batch_size=BATCH_GROUPS, eta=eta)
    return f"With eta {eta}, {started:.0f} groups start at once."


def test_a_page_computes_in_the_browser(browser: Any, exported: str) -> None:
    with open_page(browser, exported) as watched:
        watched.page.get_by_text(said(2)).wait_for(timeout=START_MS)
        watched.page.locator("[role=slider]").press("ArrowRight")
        watched.page.get_by_text(said(3)).wait_for()
    assert [each for each in watched.problems if BUSY not in each] == []


def test_a_package_that_the_mirror_lacks_is_one_clear_error(mirror: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)coordinator_page.py.*no-such-package.*--pyodide"):
        export(
            tmp_path,
            [PAGE],
            requires=["no-such-package"],
            pyodide=f"{mirror}/pyodide/",
            index=f"{mirror}/index/",
        )
