"""The server pool without a run: servers that fall silent, die or hang."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal_lab.control.events import EngineJoined, EngineRetired, Event
from areal_lab.engines.client.addresses import CannotAttach
from areal_lab.engines.client.engine_client import EngineClient, EngineError, EngineUnreachable
from areal_lab.engines.client.vllm import VLLM
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.host import silence
from areal_lab.host.processes import ChildDied, start_command
from areal_lab.pipeline.servers import sources
from areal_lab.pipeline.servers.health import HealthLimits, _wait_for_silence
from areal_lab.pipeline.servers.pool import ServerPool
from areal_lab.pipeline.servers.server import Server

WEIGHTS = WeightsFolder(path=Path(), version=3, checksum="", size_bytes=0)


def servers(
    answer: Callable[[], Awaitable[httpx2.Response]],
    push_to: Callable[[], Awaitable[object]],
    silent_s: float = 20.0,
    stalled: Callable[[], bool] = lambda: False,
) -> ServerPool:
    """A pool of one attached server with given replies to requests and weight pushes.

    Args:
        stalled: whether the compute process hangs while the HTTP process replies.
    """

    async def handle(request: httpx2.Request) -> httpx2.Response:
        return await (never() if stalled() and request.url.path == "/server_info" else answer())

    async def attached() -> EngineClient:
        return EngineClient("http://engine", transport=httpx2.MockTransport(handle))

    async def load(_: EngineClient) -> Any:
        return await push_to()

    return ServerPool(
        sources={0: attached},
        health=HealthLimits(interval_s=0.01, timeout_s=silent_s, stall_s=0.05),
        max_restarts=0,
        pause_mode=PauseMode.RETRACT,
        weights=WEIGHTS,
        prepare_push=lambda *_: load,
        note=print,
    )


BOUND_S = 60.0
"""Timeout of an event that comes immediately or never."""


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_server_that_hangs_over_its_first_weights_is_not_waited_for() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(servers(never, never, silent_s=0.02).start())
    (error,) = raised.value.exceptions
    assert isinstance(error, EngineUnreachable)
    assert str(error) == (
        "engine 0 (http://engine) did not respond to GET /ready for 0.02 s "
        "(rollout.health_timeout_s)"
    )


SLOW = """
import os, socket, time
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        with listener.accept()[0] as one:
            one.recv(65536)
            end = time.thread_time() + 0.5
            while time.thread_time() < end:
                pass
            one.sendall(b"HTTP/1.0 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
"""
"""A server that takes half a second of a CPU for each reply."""


def test_a_server_that_computes_is_waited_for_and_one_that_is_stopped_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "_LOOK_S", 0.02)
    log = tmp_path / "log"
    health = HealthLimits(interval_s=0.01, timeout_s=0.2, stall_s=60.0)

    async def scenario() -> None:
        child = await start_command("engine 0", [sys.executable, "-c", SLOW], log_path=log)
        while not log.read_text().endswith("\n"):
            await asyncio.sleep(0.01)
        notes: list[str] = []
        said = asyncio.Event()

        def note(text: str) -> None:
            notes.append(text)
            said.set()

        client = EngineClient(f"http://127.0.0.1:{int(log.read_text())}")
        server = Server(
            number=0,
            client=client,
            process=EngineProcess(child=child, client=client, base_url=client.base_url),
            report_loss=lambda *_: None,
            versions=lambda: (0, 0),
            note=note,
        )
        waiting = asyncio.create_task(_wait_for_silence(server, health))
        await asyncio.wait_for(said.wait(), BOUND_S)
        assert not waiting.done()
        assert "engine 0 did not respond for" in notes[0]
        assert "but is alive: the machine is busy" in notes[0]
        os.killpg(child.pid, signal.SIGSTOP)
        lost = await asyncio.wait_for(waiting, BOUND_S)
        assert "did not respond to GET /ready for 0.2 s" in str(lost)
        os.killpg(child.pid, signal.SIGCONT)
        await child.stop(at_once=True)
        await client.close()

    asyncio.run(scenario())


def test_a_server_that_replies_may_take_long() -> None:
    async def scenario() -> None:
        asked = 0
        often = asyncio.Event()

        async def answer() -> httpx2.Response:
            nonlocal asked
            asked += 1
            if asked == 5:
                often.set()
            return httpx2.Response(200, json={"weight_version": "3", "version": "1.2"})

        one = servers(answer, often.wait)
        await one.start()
        assert list(one.alive) == [0]
        assert (one.backend, one.engine_version) == ("sglang", "1.2")
        await one.close()

    asyncio.run(scenario())


def test_a_server_with_a_hung_compute_process_is_lost_unless_paused() -> None:
    async def answer() -> httpx2.Response:
        return httpx2.Response(200, json={"weight_version": "3", "version": "1.2"})

    async def scenario() -> None:
        stalled = asyncio.Event()
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            return stalled.is_set()

        one = servers(answer, answer, stalled=look)
        await one.start()
        server = one.alive[0]
        await one.pause()
        stalled.set()
        looks = 0
        while looks < 30:  # checks of /ready and the version: while paused it counts as loading
            await asyncio.sleep(0.01)
        assert not server.lost.is_set()
        await one.resume()
        async with asyncio.timeout(BOUND_S):
            await server.lost.wait()
        assert str(server.last_error) == (
            "engine 0 (http://engine) responds, but its compute process did not for 0.05 s "
            "(rollout.stall_timeout_s)"
        )
        await one.close()

    asyncio.run(scenario())


def test_an_error_with_its_weights_is_raised_unchanged() -> None:
    async def answer() -> httpx2.Response:
        return httpx2.Response(200)

    async def refuse() -> None:
        raise EngineError("no room")

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(servers(answer, refuse).start())
    assert [str(error) for error in raised.value.exceptions] == ["no room"]


def test_a_server_that_dies_over_its_first_weights_is_lost_with_its_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start and at a restart: the exit is reported, not the broken connection it causes."""
    monkeypatch.setattr("areal_lab.pipeline.servers.pool.RESTART_PAUSE_S", 0.0)
    dies = False

    async def answer(_: httpx2.Request) -> httpx2.Response:
        if dies:
            os.kill(opened[-1].child.pid, signal.SIGKILL)
            raise httpx2.ConnectError("connection refused")
        return httpx2.Response(200, json={"weight_version": "3", "version": "1.2"})

    opened: list[EngineProcess] = []

    async def start() -> EngineProcess:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        child = await start_command("engine 0", command, log_path=tmp_path / "engine.log")
        client = EngineClient("http://engine", transport=httpx2.MockTransport(answer))
        opened.append(EngineProcess(child=child, client=client, base_url="http://engine"))
        return opened[-1]

    async def scenario() -> None:
        nonlocal dies
        one = servers(never, never, silent_s=20.0)
        one.sources, one.max_restarts = {0: start}, 1
        one.prepare_push = lambda *_: EngineClient.version
        await one.start()
        dies = True
        one.mark_lost(one.alive[0], EngineUnreachable("somebody says so"))
        await one.given_up.wait()
        assert len(opened) == 2
        assert isinstance(one.last_error, ChildDied)
        await one.close()

        with pytest.raises(ExceptionGroup) as raised:
            await one.start()
        (error,) = raised.value.exceptions
        assert re.search(r"engine 0 .* was killed by SIGKILL", str(error))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"transfer": "distributed"},
            r"vllm supports folder, adapter only.*; set rollout\.",
        ),
        ({"top_k": 20}, r"gconfig\.top_k is 20, but must be -1 with vllm.*; set gconfig\."),
    ],
)
def test_a_server_without_a_requested_feature_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], said: str
) -> None:
    """The engine type at an address is not configured, so it is known only after attaching."""

    async def found(*_: object) -> tuple[EngineClient, dict[str, Any]]:
        return EngineClient("http://engine", api=VLLM), {}

    monkeypatch.setattr(sources, "_when_ready", found)
    attaching = sources.attach(
        "http://engine", tmp_path, request_timeout_s=1, ready_timeout_s=1, **asked
    )
    with pytest.raises(CannotAttach, match=said):
        asyncio.run(attaching)


def test_servers_join_and_leave_a_run_and_keep_their_numbers() -> None:
    async def answer() -> httpx2.Response:
        return httpx2.Response(200, json={"weight_version": "3", "version": "1.2"})

    async def refuse() -> EngineClient:
        raise EngineError("no room")

    async def scenario() -> None:
        pool = servers(answer, answer)
        pool.later, events = {1: pool.sources[0], 2: refuse}, asyncio.Queue[Event]()
        await pool.start()
        assert await pool.begin(events.put_nowait) == (0,)
        assert pool.retire_engine() is None, "the last one stays"
        assert [pool.add_engine(), pool.add_engine(), pool.add_engine()] == [1, 2, None]
        assert pool.changing
        assert await events.get() == EngineJoined(1)
        while pool.changing:
            await asyncio.sleep(0)
        assert list(pool.alive) == [0, 1]
        leaving = pool.alive[1]
        assert pool.retire_engine() == 1
        assert await events.get() == EngineRetired(1)
        with pytest.raises(EngineUnreachable, match="engine 1 is lost"):
            pool.engine(1)
        await leaving.lost.wait()
        while pool.changing:
            await asyncio.sleep(0)
        assert pool.add_engine() == 1
        assert await events.get() == EngineJoined(1)
        await pool.close()
        assert events.empty()
        assert pool.counts == {
            "engines_added": 2,
            "engines_retired": 1,
            "engine_start_failures": 1,
        }

    asyncio.run(asyncio.wait_for(scenario(), BOUND_S))
