"""The documentation site: every page without errors or requests, with its formulas."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks.files import ROOT
from tools.notebooks.pages import files, open_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    built = subprocess.run(
        [sys.executable, "-m", "tools.site"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    folder = tmp_path_factory.mktemp("site") / "site"
    shutil.copytree(ROOT / "site", folder)
    with files(folder) as address:
        yield folder, address


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_loads_with_its_formulas(
    browser: Any, site: tuple[Path, str], scheme: Any
) -> None:
    folder, address = site
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
    assert len(pages) > 40
    with open_page(browser, f"{address}/index.html", scheme=scheme) as watched:
        for page in pages if scheme == "light" else pages[::8]:
            watched.page.goto(f"{address}/{page}")
            formulas = watched.page.locator(".arithmatex")
            assert formulas.locator(".katex").count() >= formulas.count(), page
            assert watched.page.locator(".katex-error").count() == 0, page
            assert watched.problems == [], page


def test_the_search_finds_a_page_and_opens_it(browser: Any, site: tuple[Path, str]) -> None:
    _, address = site
    with open_page(browser, f"{address}/index.html") as watched:
        page = watched.page
        page.keyboard.press("/")
        page.get_by_placeholder("Search").fill("staleness bound")
        # Other pages have headings of this name.
        page.get_by_role("option", name="Staleness", description="Concepts/ Staleness").click()
        page.wait_for_url("**/concepts/staleness.html*")
        page.locator("h1").filter(has_text="Staleness").wait_for()
    assert watched.problems == []
