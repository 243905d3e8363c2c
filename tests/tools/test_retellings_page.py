"""docs/retellings.md names tests that exist, and all that notebook 1 refutes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "retellings.md").read_text(encoding="utf-8")
LOSSES = "tests/functional/losses/test_retellings.py"
NAMED = sorted(set(re.findall(r"`((?:tests/[\w/]+\.py::)?test_\w+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name: str) -> None:
    path, _, function = name.rpartition("::")
    text = (ROOT / (path or LOSSES)).read_text(encoding="utf-8")
    assert f"\ndef {function}(" in text


def test_each_test_of_retold_losses_is_named() -> None:
    tests = re.findall(r"\ndef (test_\w+)\(", (ROOT / LOSSES).read_text(encoding="utf-8"))
    of_the_losses_themselves = {
        "test_retold_losses_have_the_signature_of_a_loss_and_see_no_masked_nan"
    }
    assert set(tests) - of_the_losses_themselves == {name for name in NAMED if "::" not in name}


def test_every_row_has_four_cells() -> None:
    for line in PAGE.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 5, line
