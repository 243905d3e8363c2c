"""An agent that joins another run keeps nothing of the last one, and no put crosses over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import numpy as np
import pytest

from areal_lab.cluster.shards.errors import OtherIncarnation
from areal_lab.cluster.shards.layout import write_shard
from areal_lab.cluster.shards.local import Host, LocalStore
from areal_lab.cluster.shards.replies import INCARNATION
from areal_lab.cluster.shards.server import DataPlane
from areal_lab.cluster.shards.store import Limits, ShardStore
from areal_lab.engines.keys import authorization

FIELDS = {"a": np.arange(3)}


def plane() -> DataPlane:
    return DataPlane(Host("n1", "127.0.0.1:1", "first"), ShardStore(Limits(10_000)))


def client(served: DataPlane) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(served.app("key")),
        base_url="http://n1",
        headers=authorization("key"),
    )


def test_shards_of_the_last_incarnation_are_freed_and_counted() -> None:
    served = plane()
    local = LocalStore(served.host, served.shards)
    before = local.put(FIELDS, owner="x")
    assert served.begin("second").shards == 1
    assert served.shards.usage()["abandoned"] == 1
    assert served.shards.held_bytes == 0
    with pytest.raises(
        OtherIncarnation, match="under incarnation first of n1, which is now second"
    ):
        local.get(before)
    assert local.put(FIELDS, owner="x").incarnation == "second"


def test_a_put_during_which_the_agent_joins_another_run_is_void() -> None:
    async def scenario() -> None:
        served = plane()
        _, data = write_shard(FIELDS)

        async def body() -> AsyncIterator[bytes]:
            yield data[:10].tobytes()
            served.begin("second")
            yield data[10:].tobytes()

        async with client(served) as http:
            reply = await http.put(
                "/shards/a",
                params={"owner": "x"},
                headers={INCARNATION: "first", "content-length": str(len(data))},
                content=body(),
            )
        assert reply.status_code == 409
        assert "n1 left the run during the put" in reply.text
        assert served.shards.held_bytes == 0

    asyncio.run(scenario())


def test_an_agent_in_no_run_refuses_what_was_meant_for_one() -> None:
    async def scenario() -> None:
        served = plane()
        served.begin("")
        async with client(served) as http:
            reply = await http.get("/shards/a", headers={INCARNATION: "first"})
            assert reply.status_code == 409
            assert "n1 at 127.0.0.1:1 is in no run, not incarnation first" in reply.text
            assert reply.headers[INCARNATION] == ""

    asyncio.run(scenario())


def test_a_data_plane_needs_a_key() -> None:
    with pytest.raises(ValueError, match="a data plane needs a key"):
        plane().app("")
