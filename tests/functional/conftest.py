"""Fixtures of the functional tests."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def unchecked_shapes():
    """Calls as users make them: without the shape checks of annotations that tests switch on."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
