"""A worker of rewards that is started while the service is given up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from areal_lab.host.processes import Child
from areal_lab.rewards import service
from areal_lab.rewards.service import RewardService
from tests.asynchronous import in_loop


@in_loop
async def test_a_worker_that_has_just_started_ends_if_the_service_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Child] = []
    start = service.start_child

    async def given_up(*arguments: Any, **options: Any) -> Child:
        started.append(await start(*arguments, **options))
        entering.cancel()
        return started[-1]

    monkeypatch.setattr(service, "start_child", given_up)
    entering = asyncio.create_task(RewardService("tests.pipeline.rewards:even_digits").__aenter__())
    with suppress(asyncio.CancelledError):
        await entering
    assert entering.cancelled()
    (child,) = started
    assert child.process.returncode is not None
