"""The end of a run's hosts: no heartbeat is left to fail."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.host_lab import host_lab

pytestmark = pytest.mark.cluster


def test_no_heartbeat_is_sent_over_connections_that_are_closed(tmp_path: Path) -> None:
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: errors.append(told))
        async with host_lab(tmp_path, 3, heartbeat_s=0.01, lost_after=1_000_000):
            pass
        gc.collect()  # errors of tasks are told when they are collected

    asyncio.run(run())
    assert not errors
