"""A pinned engine keeps its weights, gets no new rollouts, and catches up afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal_lab.engines.client.engine_client import EngineClient, EngineError, EngineUnreachable
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.engines.weights.records import WeightsInMemory
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import ServerPool

FIRST = WeightsFolder(path=Path(), version=3, checksum="", size_bytes=0)


class Engines:
    """Attached servers that only know their version and whether they are paused."""

    def __init__(self, count: int, *, refuses: Callable[[int], bool] = lambda _: False) -> None:
        self.version = dict.fromkeys(range(count), FIRST.version)
        self.paused: set[int] = set()
        self.refuses = refuses
        self.pool = ServerPool(
            sources={number: self._source(number) for number in range(count)},
            health=HealthLimits(interval_s=60.0, timeout_s=60.0, stall_s=60.0),
            max_restarts=0,
            pause_mode=PauseMode.RETRACT,
            weights=FIRST,
            prepare_push=self._prepare_push,
            note=lambda _: None,
        )

    async def load(self, version: int) -> None:
        await self.pool.load(replace(FIRST, version=version))

    def _source(self, number: int) -> Callable[[], Coroutine[Any, Any, EngineClient]]:
        async def handle(request: httpx2.Request) -> httpx2.Response:
            if request.url.path == "/pause_generation":
                self.paused.add(number)
            if request.url.path == "/continue_generation":
                self.paused.discard(number)
            text = str(self.version[number])
            return httpx2.Response(200, json={"weight_version": text, "version": "1"})

        async def attached() -> EngineClient:
            return EngineClient(f"http://{number}", transport=httpx2.MockTransport(handle))

        return attached

    def _prepare_push(
        self, weights: Any, clients: Sequence[EngineClient], mode: PauseMode
    ) -> Callable[[EngineClient], Coroutine[Any, Any, None]]:
        del mode
        allowed = [client.base_url for client in clients]

        async def push(client: EngineClient) -> None:
            assert client.base_url in allowed
            number = int(client.base_url.removeprefix("http://"))
            if self.refuses(number):
                raise EngineError("no room")
            self.version[number] = weights.version

        return push


def scenario(count: int, play: Callable[[Engines], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        engines = Engines(count)
        await engines.pool.start()
        try:
            await asyncio.wait_for(play(engines), 30)
        finally:
            await engines.pool.close()

    asyncio.run(whole())


def test_the_pinned_engine_skips_updates_and_then_gets_the_newest() -> None:
    async def play(engines: Engines) -> None:
        pool = engines.pool
        assert pool.pin() == 2
        assert pool.pin() is None  # one at a time
        for version in (4, 5):
            await pool.pause()
            assert engines.paused == {0, 1}
            await engines.load(version)
            await pool.resume()
            assert engines.version == {0: version, 1: version, 2: 3}
        await pool.alive[2].check_version(3)
        await pool.unpin()
        assert engines.version == {0: 5, 1: 5, 2: 5}
        assert not engines.paused
        assert pool.pinned is None
        await engines.load(6)
        assert set(engines.version.values()) == {6}
        await pool.unpin()  # nothing is pinned

    scenario(3, play)


def test_a_pause_by_hand_pauses_it_too_and_outlasts_its_update() -> None:
    async def play(engines: Engines) -> None:
        pool = engines.pool
        pool.pin()
        await engines.load(4)
        await pool.pause(also_pinned=True)
        assert engines.paused == {0, 1}
        await pool.unpin()
        assert engines.version == {0: 4, 1: 4}
        assert engines.paused == {0, 1}
        await pool.resume()
        assert not engines.paused

    scenario(2, play)


def test_new_rollouts_go_to_the_other_engines_in_turn() -> None:
    async def play(engines: Engines) -> None:
        pool = engines.pool
        pool.pin()
        assert {await pool.takes_rollouts_of(2) for _ in range(4)} == {0, 1}
        assert [await pool.takes_rollouts_of(n) for n in (0, 1)] == [0, 1]
        await pool.unpin()
        assert await pool.takes_rollouts_of(2) == 2

    scenario(3, play)


def test_when_the_others_are_lost_it_catches_up_before_it_takes_a_rollout() -> None:
    async def play(engines: Engines) -> None:
        pool = engines.pool
        pool.pin()
        await engines.load(4)
        pool.mark_lost(pool.alive[0], EngineUnreachable("gone"))
        assert await pool.takes_rollouts_of(1) == 1
        assert engines.version[1] == 4
        assert pool.pinned is None

    scenario(2, play)


def test_a_pinned_engine_that_is_lost_or_refuses_is_pinned_no_more() -> None:
    async def play(engines: Engines) -> None:
        pool = engines.pool
        pool.pin()
        pool.mark_lost(pool.alive[2], EngineUnreachable("gone"))
        assert pool.pinned is None
        assert pool.pin() == 1
        await engines.load(4)
        engines.refuses = lambda number: number == 1
        await pool.unpin()
        assert pool.pinned is None
        assert list(pool.alive) == [0]

    scenario(3, play)


@pytest.mark.parametrize("restarts", [0, 1])
def test_none_is_pinned_that_could_not_catch_up(restarts: int) -> None:
    async def play(engines: Engines) -> None:
        pool = engines.pool
        pool.max_restarts = restarts
        # The trainer keeps a version for a restarted engine, else the newest one alone.
        pool.weights = WeightsInMemory(version=3, checksum="", size_bytes=0)
        assert pool.pin() == (None if restarts == 0 else 1)

    scenario(2, play)

    async def alone(engines: Engines) -> None:
        assert engines.pool.pin() is None

    scenario(1, alone)
