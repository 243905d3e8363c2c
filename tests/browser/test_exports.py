"""Every notebook as a page that needs neither Python nor the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.browser.test_notebooks import PICTURES
from tools.notebooks.export import export
from tools.notebooks.files import FOLDER, existing
from tools.notebooks.gallery import card
from tools.notebooks.pages import files, open_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("notebooks")
    export(folder)
    with files(folder) as address:
        yield address


@pytest.mark.parametrize("name", existing())
def test_an_exported_page_shows_its_pictures_without_the_network(
    browser: Any, exported: str, name: str
) -> None:
    with open_page(browser, f"{exported}/{name}.html") as watched:
        watched.page.get_by_role("heading", name="The code").wait_for()
        watched.page.locator(PICTURES).first.wait_for()
        if name == "03_staleness":
            assert_a_timeline_plays(watched.page)
    assert watched.problems == []


def assert_a_timeline_plays(page: Any) -> None:
    page.get_by_role("button", name="play").first.click()
    page.get_by_text(re.compile(r"^[\d.]+ s: .*\(\d\)")).first.wait_for()


def test_the_index_shows_every_question_and_picture_without_another_file(
    browser: Any, exported: str, tmp_path: Path
) -> None:
    with urlopen(f"{exported}/index.html") as index:
        (tmp_path / "index.html").write_bytes(index.read())
    with files(tmp_path) as address, open_page(browser, f"{address}/index.html") as watched:
        page = watched.page
        page.wait_for_function("[...document.images].every((image) => image.complete)")
        drawn = "[...document.images].filter((image) => image.naturalWidth).length"
        assert page.evaluate(drawn) == len(existing())
        for name in existing():
            title, question = card(FOLDER / f"{name}.py")
            assert page.get_by_role("heading", name=title, exact=True).is_visible()
            assert question in page.content()
        assert_a_timeline_plays(page)
    assert watched.problems == []
