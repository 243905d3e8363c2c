"""Tests of what only a GPU can show. Each runs on the CPU too, without those assertions, so that it
does not rot; `python -m pytest -m gpu` runs them on a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, or the GPU."""
    return torch.device(request.param)
