"""A browser without names of the outside, and the servers of notebooks, exports and the site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from tools.notebooks.pages import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def gallery_address() -> Iterator[str]:
    from tools.notebooks.pages import gallery

    with gallery() as address:
        yield address


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pytest's, which keeps those of the last three runs."""
    return tmp_path_factory.mktemp("screenshots")
