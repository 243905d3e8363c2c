"""Synthetic logs of each framework give the values beside them, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.foreign.read import read_run
from areal_lab.foreign.record import as_json
from tests.foreign.expected import SPECIMENS, compared, expected_of


@pytest.mark.parametrize("path", SPECIMENS, ids=lambda path: path.name)
def test_specimens_give_their_values_exactly(path: Path) -> None:
    found = as_json(read_run([path]))
    assert compared(found, expected_of(path)) == []
