"""Every notebook as a page that needs neither Python nor the network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.test_notebooks import PICTURES
from tools.notebooks.export import export
from tools.notebooks.files import existing
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
    assert watched.problems == []
