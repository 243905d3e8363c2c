"""The page about engines says what the tests of the contract rely on."""

from __future__ import annotations

from pathlib import Path

from areal_lab.engines.launch.backends import BACKENDS
from tests.real_engines.engines import ENGINES, as_table

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_table_of_differences_is_that_of_the_contract() -> None:
    assert as_table() in PAGE.read_text()


def test_the_contract_and_the_backends_agree() -> None:
    assert list(ENGINES) == list(BACKENDS)
    for name, facts in ENGINES.items():
        assert facts.seeded is BACKENDS[name].own_seeds
        assert facts.whole_logprobs is BACKENDS[name].whole_logprobs
        assert facts.tempered_top_1 is BACKENDS[name].tempered_top_1
        assert facts.biased_in_place is BACKENDS[name].biased_in_place
