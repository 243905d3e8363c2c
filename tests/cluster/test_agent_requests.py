"""The HTTP interface of a host agent, in this process: requests of strangers, and damaged ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx2

from areal_lab.cluster.agent.app import agent_app
from areal_lab.cluster.agent.lease import HostAgent
from areal_lab.cluster.folders.replies import INCARNATION
from areal_lab.cluster.hosts import Hosts
from areal_lab.cluster.records import RECEIVED, HostHealth, facts_of_this_host, from_json, to_json
from areal_lab.cluster.scheduler import ManualScheduler
from areal_lab.config.sections import ClusterConfig
from areal_lab.engines.keys import authorization
from areal_lab.engines.protocol import WeightsFolder
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line

TOKEN: Final = "the-token"
WEIGHTS: Final = WeightsFolder(path=Path("/nowhere"), version=1, checksum="a", size_bytes=5)


@asynccontextmanager
async def agent(folder: Path) -> AsyncIterator[tuple[HostAgent, httpx2.AsyncClient]]:
    """An agent of one incarnation, and a client that its run could be."""
    host = HostAgent("host", "127.0.0.1", 1, folder, TOKEN, print)
    host.next_incarnation()
    transport = httpx2.ASGITransport(app=agent_app(host, TOKEN), raise_app_exceptions=False)
    headers = {**authorization(TOKEN), INCARNATION: host.incarnation}
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://agent", headers=headers
    ) as http:
        yield host, http


def requests(folder: Path) -> list[tuple[str, str, Any]]:
    """Valid requests, but those that start processes."""
    (folder / "served").mkdir()
    (folder / "served" / "file").write_text("x")
    (folder / "logs" / "a.log").write_text("line\n")
    return [
        ("GET", "/health", None),
        ("GET", "/processes/0", None),
        ("POST", "/processes/0/stop?at_once=1", None),
        ("GET", "/logs/a.log?lines=3", None),
        ("POST", "/files/seen", {"path": str(folder / "served")}),
        ("POST", "/files/serve", {"name": "served", "path": str(folder / "served")}),
        ("POST", "/files/check", json.loads(to_json(WEIGHTS))),
        ("POST", "/files/put/name", {"any": "content"}),
        ("PUT", "/shards/a?owner=me", {"any": "content"}),
        ("GET", "/shards/a", None),
        ("DELETE", "/shards?id=a&owner=me", None),
        ("GET", "/folders/served/file", None),
    ]


@mutations
def test_no_request_stops_a_host_agent(tmp_path: Path, count: int) -> None:
    rng = random.Random(0)

    async def scenario() -> None:
        async with agent(tmp_path) as (host, http):
            valid = requests(tmp_path)
            for _ in range(count):
                method, path, body = rng.choice(valid)
                content = b""
                if body is not None:
                    content = json.dumps(damaged_json(rng, body)).encode()
                    content = damaged_bytes(rng, content) if rng.randrange(2) else content
                if rng.randrange(3) == 0:
                    damaged = damaged_bytes(rng, path.encode()).decode("latin-1")
                    path = "/" + damaged.lstrip("/").replace("\x00", "")[:2000]
                headers = {"range": rng.choice(("bytes=0-1", "bytes=9-", "bytes=a-b", "x"))}
                if rng.randrange(4) == 0:
                    headers[RECEIVED] = rng.choice(("-1", "x", "9" * 5000, "1e5", "²"))
                    headers = {name: value.encode() for name, value in headers.items()}
                try:
                    url = httpx2.URL("http://agent").copy_with(
                        raw_path=path.encode("ascii", "replace")
                    )
                except httpx2.InvalidURL:
                    continue
                reply = await http.request(method, url, content=content, headers=headers)
                assert reply.status_code < 500, (method, path, content[:200], reply.text)
                if reply.status_code == 422:
                    told = reply.json()
                    reason = told.get("reason") or told["error"]["message"]
                    assert one_line(ValueError(reason)), reply.text
            health = from_json(HostHealth, (await http.get("/health")).content)
            assert health.incarnation == host.incarnation
            assert not host.dismissed.is_set()

    asyncio.run(scenario())


@mutations
def test_no_host_that_joins_stops_a_run(tmp_path: Path, count: int) -> None:
    rng = random.Random(0)
    of_this = facts_of_this_host(
        name="h1", incarnation="1", address="127.0.0.1", port=1, folder=str(tmp_path)
    )
    # Refused before it is asked for its health.
    facts = json.loads(to_json(replace(of_this, areal_lab="0")))
    odd = (
        *({"name": "../x"}, {"name": "a\nb"}, {"name": "x" * 5000}, {"address": "\x00"}),
        *({"address": "a b"}, {"incarnation": "\ud800"}, {"port": 65536}, {"port": -1}),
    )
    contents = [json.dumps({**facts, **one, "areal_lab": of_this.areal_lab}) for one in odd]

    async def scenario() -> None:
        hosts = Hosts(
            config=ClusterConfig(n_nodes=2),
            scheduler=ManualScheduler(tmp_path, this_host=False),
            address="127.0.0.1",
            start_timeout_s=60.0,
            say=lambda text: text.encode(),
            waiting=lambda _: None,
        )
        starting = asyncio.create_task(hosts.start())
        while not hosts.port:
            await asyncio.sleep(0)
        url, key = f"http://127.0.0.1:{hosts.port}", authorization(hosts.token)
        async with httpx2.AsyncClient(base_url=url, headers=key) as http:
            for index in range(len(odd) + count):
                content = json.dumps(damaged_json(rng, facts)).encode()
                content = damaged_bytes(rng, content) if rng.randrange(2) else content
                content = contents[index].encode() if index < len(odd) else content
                reply = await http.post("/join", content=content)
                assert reply.status_code == 403, (content, reply.text)
                assert one_line(ValueError(reply.json()["reason"])), content
        assert not hosts.spares
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await hosts.close()

    asyncio.run(scenario())
