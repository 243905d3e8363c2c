"""Engines that leave their devices to the trainer: who waits for whom, and what is no loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.protocol import PauseMode, RequestRefused, WeightsFolder
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import ServerPool
from tests.engines.tiny import request

FIRST = WeightsFolder(path=Path(), version=3, checksum="", size_bytes=0)
RELEASE, TAKE = "/release_memory_occupation", "/resume_memory_occupation"


class Engine:
    """A server that knows what it holds, and writes down what is asked of it."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.version = str(FIRST.version)
        self.asked: list[str] = []
        self.refuses = refuses
        self.looks = 0
        self.looked_at = asyncio.Event()

    async def handle(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path in (RELEASE, TAKE):
            if self.refuses and path == RELEASE:
                return httpx2.Response(400, json={"error": {"message": "no memory saver"}})
            self.asked.append(f"{path[1:8]} {request.content.decode()}")
            if path == RELEASE:
                self.version = "released"
        elif path in ("/pause_generation", "/continue_generation"):
            self.asked.append(path[1:9])
        elif path == "/generate":
            return self.generated(json.loads(request.content))
        elif path == "/ready":
            self.looks += 1
            if self.looks % 20 == 0:  # so that each kind of check was made several times
                self.looked_at.set()
        return httpx2.Response(200, json={"weight_version": self.version, "version": "1"})

    def generated(self, body: dict[str, Any]) -> httpx2.Response:
        """One token each, unless the prompt begins with 4: SGLang aborts what it refuses so."""
        reason: dict[str, Any] = {"type": "length", "length": 1}
        if body["input_ids"][0][0] == 4:
            reason = {"type": "abort", "message": "no grammar", "status_code": 400}
        meta = {
            "finish_reason": reason,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, 7, None]],
        }
        return httpx2.Response(200, json=[{"output_ids": [7], "meta_info": meta}])

    def client(self, url: str) -> EngineClient:
        return EngineClient(url, transport=httpx2.MockTransport(self.handle))


def pool_of(
    sources: dict[int, Callable[[], Coroutine[Any, Any, EngineClient]]],
    engines: dict[str, Engine],
    *,
    restarts: int = 0,
) -> ServerPool:
    def prepare_push(
        weights: Any, clients: Sequence[EngineClient], mode: PauseMode
    ) -> Callable[[EngineClient], Coroutine[Any, Any, None]]:
        del clients, mode

        async def push(client: EngineClient) -> None:
            engine = engines[client.base_url]
            engine.version = str(weights.version)
            engine.asked.append("weights")

        return push

    return ServerPool(
        sources=dict(sources),
        health=HealthLimits(interval_s=0.001, timeout_s=30.0, stall_s=30.0),
        max_restarts=restarts,
        pause_mode=PauseMode.ABORT,
        weights=FIRST,
        prepare_push=prepare_push,
        note=lambda _: None,
        takes_turns=True,
    )


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_a_turn_is_a_pause_both_memories_new_weights_and_the_cache() -> None:
    async def scenario() -> None:
        engines = {"http://0": Engine(), "http://1": Engine(refuses=True)}

        def source(url: str) -> Callable[[], Coroutine[Any, Any, EngineClient]]:
            async def attached() -> EngineClient:
                return engines[url].client(url)

            return attached

        pool = pool_of({n: source(f"http://{n}") for n in range(2)}, engines)
        await pool.start()
        for engine in engines.values():
            engine.asked.clear()
        await pool.release()
        assert list(pool.alive) == [0], "one that keeps its memory is lost"
        one = engines["http://0"]
        one.looked_at.clear()
        await one.looked_at.wait()
        assert list(pool.alive) == [0], "the version of released weights is no loss"
        await pool.resume()  # as a person may ask meanwhile: it has to wait
        await pool.load(replace(FIRST, version=4))
        await pool.resume()
        assert one.asked == [
            "pause_ge",
            'release {"tags":["kv_cache"]}',
            'release {"tags":["weights"]}',
            'resume_ {"tags":["weights"]}',
            "weights",
            'resume_ {"tags":["kv_cache"]}',
            "continue",
        ]
        one.looked_at.clear()
        await one.looked_at.wait()
        assert list(pool.alive) == [0]
        one.version = "5"
        await pool.given_up.wait()  # outside of turns another version is a loss, as ever
        await pool.close()

    play(scenario())


def test_a_refused_request_loses_no_engine() -> None:
    async def scenario() -> None:
        engine = Engine()

        async def source() -> EngineClient:
            return engine.client("http://0")

        pool = pool_of({0: source}, {"http://0": engine})
        await pool.start()
        with pytest.raises(RequestRefused, match="http://0: it gave up: no grammar"):
            await pool.engine(0).generate([request("a", [4])])
        (sample,) = await pool.engine(0).generate([request("b", [5])])
        assert sample.tokens == (7,)
        assert pool.alive[0].last_error is None
        await pool.close()

    play(scenario())


def test_an_engine_starts_in_the_engines_turn_and_the_trainer_waits_for_it() -> None:
    async def scenario() -> None:
        engines = {f"http://{n}": Engine() for n in range(3)}
        opened: list[str] = []
        started, may_start = asyncio.Event(), asyncio.Event()

        async def source() -> EngineClient:
            url = f"http://{len(opened)}"
            opened.append(url)
            if len(opened) > 1:
                started.set()
                await may_start.wait()
            return engines[url].client(url)

        pool = pool_of({0: source}, engines, restarts=2)
        await pool.start()
        await pool.release()
        engines["http://0"].version = "7"  # never seen: it is released
        pool.mark_lost(pool.alive[0], ConnectionError("it died"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert opened == ["http://0"], "the trainer has the device"
        await pool.load(replace(FIRST, version=4))
        await started.wait()
        turn = asyncio.create_task(pool.release())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not turn.done(), "the engine has the device"
        may_start.set()
        await turn
        assert engines["http://1"].asked[-3:] == [
            "pause_ge",
            'release {"tags":["kv_cache"]}',
            'release {"tags":["weights"]}',
        ]
        await pool.load(replace(FIRST, version=5))
        assert engines["http://1"].version == "5"
        await pool.close()

    play(scenario())
