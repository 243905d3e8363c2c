"""A standalone gateway in this process, with a real engine: how it ends, what it attaches to."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal_lab.config.load import load_config
from areal_lab.config.serving import GatewayConfig
from areal_lab.engines.keys import write_key_file
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.host.processes import ChildDied
from areal_lab.pipeline.gateway import serve
from areal_lab.pipeline.gateway.prepare import GatewayPlan, prepare_gateway
from areal_lab.pipeline.gateway.serve import Ready, StandaloneGateway, state_text
from areal_lab.pipeline.servers import sources
from areal_lab.shell.display import Silent
from areal_lab.shell.stop import StopSignal
from benchmarks.tiny_model import write_tiny_model
from tests.pipeline.test_agent_program import TEMPLATE

BOUND_S = 60.0


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "tiny"
    write_tiny_model(folder, initializer_range=0.02)  # which ends no reply soon
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def plan_of(model: Path, *overrides: str, export: bool = False, **options: Any) -> GatewayPlan:
    config = load_config(None, [f"actor.path={model}", "rollout.threads=1", *overrides])
    folder = model.parent / "out"
    written = {"export": folder} if export else {}
    given = GatewayConfig(seed=1, port=0, pinned=True, **written, **options)
    return prepare_gateway(config, given, folder=folder, fits_length=True)


class Client:
    """Starts sessions and uses them."""

    def __init__(self, http: httpx2.AsyncClient, admin: str) -> None:
        self.http = http
        self.admin = admin

    async def post(self, path: str, key: str, body: Any = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json=body or {}, headers=headers)

    async def start(self) -> str:
        key: str = (await self.post("/rl/start_session", self.admin)).json()["api_key"]
        return key

    async def chat(self, key: str, *, tokens: int = 8, n: int = 1) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": tokens, "n": n}
        return await self.post("/v1/chat/completions", key, body)

    async def ended(self, key: str, **fields: Any) -> None:
        await self.post("/rl/set_reward", key, {"reward": 1.0, **fields})
        await self.post("/rl/end_session", key)


@asynccontextmanager
async def serving(
    plan: GatewayPlan,
) -> AsyncIterator[tuple[StandaloneGateway, asyncio.Task[None], Client]]:
    told: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    gateway = StandaloneGateway(
        plan=plan,
        display=Silent(),
        ready=told.set_result,
        stop=StopSignal(),
        end_now=StopSignal(),
    )
    async with asyncio.timeout(BOUND_S):
        work = asyncio.create_task(gateway.run())
        await asyncio.wait((told, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        ready = told.result()
        async with httpx2.AsyncClient(base_url=ready.url, timeout=60, trust_env=False) as http:
            yield gateway, work, Client(http, ready.key_file.read_text())
        gateway.stop.request()
        await asyncio.gather(work, return_exceptions=True)


def lines_of(plan: GatewayPlan) -> list[dict[str, Any]]:
    file = plan.folder / "sessions.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def let_sessions_time_out(gateway: StandaloneGateway) -> None:
    """Move the gateway's clock to the timeout of the sessions that nothing uses now."""
    service = gateway._service
    clock, passed_s = service._clock, service.sessions.limits.session_timeout_s
    service._clock = lambda: clock() + passed_s
    service.sweep()


def watched_engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    """Gets the first engine that is started; further ones do not come up."""
    engines: list[EngineProcess] = []

    async def watched(*arguments: Any, **options: Any) -> EngineProcess:
        if engines:
            await asyncio.Event().wait()
        engines.append(await launch_engine(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr(sources, "launch_engine", watched)
    return engines


async def until_received(gateway: StandaloneGateway, calls: int) -> int:
    """Wait until tokens of all calls of the only session have arrived; returns their number."""
    while True:
        await asyncio.sleep(0.001)
        (engine,) = gateway._sampling.values()
        found = [engine.so_far(name, turn) for name, turn in engine.open.items()]
        if len(found) == calls and all(found):
            return sum(len(one.tokens) for samples in found for one in samples.values())


def written_tokens(plan: GatewayPlan) -> int:
    (line,) = lines_of(plan)
    return sum(len(part["tokens"]) for row in line["samples"] for part in row["parts"])


async def until_sampling(gateway: StandaloneGateway, calls: int = 1) -> None:
    while gateway._service.in_flight < calls:
        await asyncio.sleep(0.001)


def test_calls_end_before_the_gateway_does(model: Path) -> None:
    plan = plan_of(model)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            key = await client.start()
            calling = asyncio.create_task(client.chat(key, tokens=100))
            await until_sampling(gateway)
            gateway.stop.request()
            reply = await calling
            assert reply.status_code == 200
            await work
            (line,) = lines_of(plan)
            tokens = sum(len(part["tokens"]) for part in line["samples"][0]["parts"])
            assert tokens == reply.json()["usage"]["completion_tokens"]
            assert line["samples"][0]["reward"] is None
            assert line["session"]["ended_by"] == "gateway"

    asyncio.run(scenario())


def test_calls_that_are_cut_off_keep_their_tokens(model: Path) -> None:
    # Few at a time and long ones, so that some are cut off while they sample.
    plan = plan_of(model, "rollout.max_running_requests=2", "gconfig.max_new_tokens=240")

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            key = await client.start()
            calling = asyncio.create_task(client.chat(key, tokens=240, n=128))
            await until_sampling(gateway)
            gateway.stop.request()
            gateway.end_now.request()
            reply = await calling
            await work
            (line,) = lines_of(plan)
            ends = [sample["finish_reason"] for sample in line["samples"]]
            assert "abort" in ends
            written = [part["tokens"] for row in line["samples"] for part in row["parts"]]
            usage = reply.json()["usage"]["completion_tokens"]
            assert sum(map(len, written)) == usage < 32 * 240

    asyncio.run(scenario())


def test_a_gateway_that_is_canceled_writes_its_sessions_too(model: Path) -> None:
    plan = plan_of(model)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            key = await client.start()
            await client.chat(key)
            calling = asyncio.create_task(client.chat(key, tokens=240))
            await until_sampling(gateway)
            gateway.stop.request()
            await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, calling, return_exceptions=True)
            assert work.cancelled()
            (line,) = lines_of(plan)
            assert len(line["samples"][0]["turns"]) >= 1

    asyncio.run(scenario())


def test_sessions_are_written_once_wherever_they_are_exported(model: Path) -> None:
    plan = plan_of(model, export=True)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            for reward in (0.0, 1.0):
                key = await client.start()
                await client.chat(key)
                await client.ended(key, reward=reward)
            session = {"session_id": "session-1"}
            exported = await client.post("/export_trajectories", client.admin, session)
            assert exported.json()["reward"] == 1.0
            await client.start()  # without a token, it is not written
            gateway.stop.request()
            await work
        found = lines_of(plan)
        assert sorted(line["samples"][0]["reward"] for line in found) == [0.0, 1.0]
        assert sorted(line["group"] for line in found) == [0, 1]

    asyncio.run(scenario())


def test_sessions_are_written_although_the_end_lets_a_client_export_them(model: Path) -> None:
    plan = plan_of(model, export=True)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            await client.chat(await client.start())
            body = {"session_id": "session-0"}
            pending = asyncio.create_task(client.post("/export_trajectories", client.admin, body))
            session = gateway._service.session_by_id("session-0")
            while not session.changed._waiters:
                await asyncio.sleep(0.001)
            gateway.stop.request()
            assert (await pending).json()["ended_by"] == "gateway"
            await work
        assert [line["session"]["session_id"] for line in lines_of(plan)] == ["session-0"]

    asyncio.run(scenario())


def test_what_a_full_disk_did_not_take_is_written_at_the_end(model: Path) -> None:
    plan = plan_of(model, export=True)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            file = plan.folder / "sessions.jsonl"
            for full in (False, True, False):
                key = await client.start()
                await client.chat(key)
                before = file.stat().st_size if file.exists() else 0
                with largest_file(before + 100) if full else nullcontext():
                    await client.ended(key)
                    while len(gateway._following) > 1:  # what tells the state
                        await asyncio.sleep(0.001)
                assert (file.stat().st_size > before) != full, "no part of a line is left"
                body = {"session_id": "session-1"}
                if full:
                    await client.post("/export_trajectories", client.admin, body)
            gateway.stop.request()
            await work
        assert [line["session"]["session_id"] for line in lines_of(plan)] == [
            "session-0",
            "session-2",
            "session-1",
        ]

    asyncio.run(scenario())


@pytest.mark.parametrize("export", [True, False])
def test_a_session_that_cannot_be_written_takes_no_other_with_it(model: Path, export: bool) -> None:
    plan = plan_of(model, export=export)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            for name in ("wrong", "lost", "left"):
                key = await client.start()
                await client.chat(key)
                session = list(gateway._service.sessions.unexported())[-1]
                if name == "wrong":
                    session.reward = math.inf
                if name != "left":
                    await client.post("/rl/end_session", key)
                    let_sessions_time_out(gateway)
                    assert session not in gateway._service.sessions.unexported()
            gateway.stop.request()
            with pytest.raises(ValueError, match="session session-0 cannot be written"):
                await work
        found = [line["session"]["session_id"] for line in lines_of(plan)]
        assert found == ["session-1", "session-2"]

    asyncio.run(scenario())


def test_sessions_that_are_forgotten_are_written_and_exported_ones_are_not(model: Path) -> None:
    plan = plan_of(model)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            for name in ("exported", "forgotten"):
                key = await client.start()
                await client.chat(key)
                await client.ended(key)
                if name == "exported":
                    body = {"session_id": "session-0"}
                    await client.post("/export_trajectories", client.admin, body)
            let_sessions_time_out(gateway)
            while gateway.written is None or not gateway.written.written:
                await asyncio.sleep(0.01)
            gateway.stop.request()
            await work
        assert [line["session"]["session_id"] for line in lines_of(plan)] == ["session-1"]

    asyncio.run(scenario())


def test_a_lost_engine_ends_the_gateway_and_no_session_is_lost(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model, "rollout.max_engine_restarts=0")
    engines = watched_engines(monkeypatch)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            calling = asyncio.create_task(client.chat(await client.start(), tokens=240, n=4))
            received = await until_received(gateway, calls=4)
            (engine,) = engines
            os.kill(engine.child.pid, signal.SIGKILL)
            with pytest.raises(ChildDied):
                await work
            reply = await calling
        assert received <= written_tokens(plan) < 4 * 240
        assert reply.json()["usage"]["completion_tokens"] == written_tokens(plan)

    asyncio.run(scenario())


def test_a_reply_that_waits_for_an_engine_is_cut_off_with_its_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(model, "rollout.max_engine_restarts=1")
    monkeypatch.setattr(serve, "_CUT_S", 0.1)
    engines = watched_engines(monkeypatch)

    async def scenario() -> None:
        async with serving(plan) as (gateway, work, client):
            calling = asyncio.create_task(client.chat(await client.start(), tokens=240, n=4))
            received = await until_received(gateway, calls=4)
            (engine,) = engines
            os.kill(engine.child.pid, signal.SIGKILL)
            while gateway._on_engines():
                await asyncio.sleep(0.001)
            gateway.stop.request()
            gateway.end_now.request()
            await work
            assert (await calling).status_code == 200
        assert received <= written_tokens(plan) < 4 * 240

    asyncio.run(scenario())


def test_a_gateway_that_is_canceled_while_engines_start_leaves_no_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scenario() -> None:
        gateway = StandaloneGateway(
            plan=plan_of(model),
            display=Silent(),
            ready=lambda _: None,
            stop=StopSignal(),
            end_now=StopSignal(),
        )
        work = asyncio.create_task(gateway.run())
        while not list(tmp_path.glob("areal_lab-gateway-*/logs/*")):
            await asyncio.sleep(0.001)
        work.cancel()
        await asyncio.wait((work,))
        assert work.cancelled()
        assert not list(tmp_path.glob("areal_lab-gateway-*"))

    asyncio.run(scenario())


def test_it_attaches_to_running_engines_whatever_their_weights(model: Path) -> None:
    async def scenario() -> None:
        options = ServerOptions(model=model, version="7", port=0, threads=1, dtype="float32")
        engine = await launch_engine(
            "embedded",
            options,
            index=0,
            log_path=model.parent / "engine.log",
            ready_timeout_s=BOUND_S,
            request_timeout_s=BOUND_S,
        )
        port = int(engine.base_url.rsplit(":", 1)[1])
        write_key_file(port, engine.client.key)
        plan = plan_of(model, f'rollout.addresses=["{engine.base_url}"]', export=True)
        try:
            async with serving(plan) as (gateway, work, client):
                key = await client.start()
                assert (await client.chat(key)).status_code == 200
                await client.ended(key)
                gateway.stop.request()
                await work
            (line,) = lines_of(plan)
            assert {part["version"] for part in line["samples"][0]["parts"]} == {7}
            assert await engine.client.version() == 7, "it gets no weights, and is not stopped"
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_the_state_is_one_line() -> None:
    counts = {"sessions": 1200, "calls": 4, "generated_tokens": 56789}
    statistics = {"open_sessions": 2, "requests_in_flight": 1, "counts": counts}
    assert state_text(statistics) == (
        "sessions: 2 open, 1,200 started; calls: 1 sampling, 4 started; 56,789 tokens"
    )
    troubled = {**statistics, "counts": {"failed": 1, "refused_sessions": 2, "refused_requests": 3}}
    assert "0 started, 1 failed, 5 refused; 0 tokens" in state_text(troubled)
