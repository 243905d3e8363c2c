"""What the tests of folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from areal_lab.cluster.folders.connections import Connections
from tests.cluster.folders.agent import KEY


@pytest.fixture
def connections() -> Iterator[Connections]:
    """To agents with the tests' key."""
    made = Connections(KEY)
    yield made
    made.close()
