"""The page about engines says what the tests of the contract rely on."""

from __future__ import annotations

import re
from pathlib import Path

from areal_lab.engines.launch.backends import BACKENDS
from tests.real_engines.engines import ENGINES, as_table

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_table_of_differences_is_that_of_the_contract() -> None:
    table = as_table()
    present = table in PAGE.read_text()
    assert present, f"the table of differences in docs/engines.md must be:\n{table}"


def test_every_backend_has_columns_on_the_page_and_facts_for_the_contract() -> None:
    assert list(ENGINES) == list(BACKENDS)
    headers = re.findall(r"^\| \| (`embedded` .*) \|$", PAGE.read_text(), re.MULTILINE)
    assert set(headers) == {" | ".join(f"`{name}`" for name in BACKENDS)}
