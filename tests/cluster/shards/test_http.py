"""Tensors from and to a real agent: exact, fenced, bounded, and nothing is left behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.cluster.shards import connections as connections_module
from areal_lab.cluster.shards.client import HttpStore
from areal_lab.cluster.shards.connections import Agent, Call, Connections, Fence
from areal_lab.cluster.shards.errors import (
    Damaged,
    NotHeld,
    OtherIncarnation,
    Refused,
    StoreFull,
    Unreachable,
)
from areal_lab.cluster.shards.fetched import FetchedBatch
from areal_lab.cluster.shards.layout import write_shard
from areal_lab.cluster.shards.metadata import BatchMetadata, DistributedBatch, ShardMetadata
from areal_lab.cluster.shards.protocol import AsyncStore
from areal_lab.cluster.shards.store import Freed
from areal_lab.data.arrays.jagged import Field, Jagged, concat_rows, row_count, slice_rows
from areal_lab.data.arrays.samples import pack_samples, unpack_samples
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.engines.keys import authorization
from tests.cluster.shards.agent import KEY, Running, running_agent
from tests.cluster.shards.fields import assert_equal, some_fields
from tests.cluster.shards.proxy import altered

FIRST_BYTES = 1 << 16
"""Of the first request, with the header and the lengths."""
DEADLINE_S = 60.0
SMALL = {"a": np.arange(3), "b": Jagged.of_rows([[1], [], [2, 3]], "int32")}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One agent for the tests that leave it as it was."""
    with running_agent() as running:
        yield running


@pytest.fixture
def store(shared: Running, connections: Connections) -> Iterator[HttpStore]:
    made = HttpStore(shared.agent, connections)
    yield made
    made.free(owner="test")
    assert list(made.list()) == []


def usage(store: HttpStore) -> dict[str, Any]:
    connection = http.client.HTTPConnection(store.home.address)
    connection.request("GET", "/shards", headers=authorization(KEY))
    found: dict[str, Any] = json.loads(connection.getresponse().read())["usage"]
    connection.close()
    return found


def rows_through(store: HttpStore, fields: dict[str, Field], start: int, stop: int) -> None:
    found = store.put(fields, owner="test")
    assert found.batch_size == row_count(fields)
    assert_equal(store.get(found), fields)
    assert_equal(store.get(found.rows(start, stop)), slice_rows(fields, start, stop))
    name = sorted(fields)[0]
    assert_equal(store.get(found, [name]), {name: fields[name]})
    assert store.free([found]).shards == 1


def test_random_fields_return_exactly(store: HttpStore) -> None:
    @settings(max_examples=20)
    @given(some_fields(), st.data())
    def check(fields: dict[str, Field], data: st.DataObject) -> None:
        start = data.draw(st.integers(0, row_count(fields) - 1))
        rows_through(store, fields, start, data.draw(st.integers(start + 1, row_count(fields))))

    check()


def large_fields() -> dict[str, Field]:
    """10,000 rows whose prefix alone is larger than the first request, in 2.5 MB."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 100, 10_000)
    return {
        "tokens": Jagged(random.integers(0, 99, lengths.sum()).astype(np.int32), lengths),
        "mask": Jagged(random.integers(0, 2, lengths.sum()).astype(bool), lengths),
        "reward": random.random(10_000),
    }


@pytest.mark.parametrize("streams", [1, 4])
def test_large_shards_are_read_in_several_ranges(
    store: HttpStore, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "LARGE_BYTES", 1 << 20)
    made = Connections(KEY, streams=streams)
    rows_through(HttpStore(store.home, made), large_fields(), 123, 8_001)
    made.close()


def test_a_sub_shard_moves_its_own_bytes_only(store: HttpStore) -> None:
    found = store.put({"tokens": np.zeros((1000, 10_000), np.int8)}, owner="test")
    before = usage(store)["sent_bytes"]
    store.get(found.rows(900, 910))
    assert usage(store)["sent_bytes"] - before == 100_000 + FIRST_BYTES


@pytest.mark.parametrize("streams", [1, 4])
def test_no_byte_of_a_whole_shard_moves_twice(
    store: HttpStore, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "LARGE_BYTES", 1 << 20)
    made = Connections(KEY, streams=streams)
    for fields in (SMALL, large_fields()):
        found = store.put(fields, owner="test")
        before = usage(store)["sent_bytes"]
        HttpStore(store.home, made).get(found)
        assert usage(store)["sent_bytes"] - before == len(write_shard(fields)[1])
    made.close()


def test_shards_in_files_are_the_same(tmp_path: Path, connections: Connections) -> None:
    with running_agent(
        memory_bytes=0, spill_bytes=100 << 20, spill_folder=str(tmp_path)
    ) as running:
        store = HttpStore(running.agent, connections)
        fields = large_fields()
        rows_through(store, fields, 5, 9_000)
        assert usage(store)["spill_bytes"] == 0
        store.put(fields, owner="test")
        assert [one.where for one in store.list()] == ["file"]


def test_a_put_that_is_repeated_changes_nothing(store: HttpStore) -> None:
    first = store.put(SMALL, owner="test", shard_id="once")
    assert store.put(SMALL, owner="test", shard_id="once") == first
    with pytest.raises(Refused, match="there is a shard 'once' already"):
        store.put({"a": np.arange(4)}, owner="test", shard_id="once")
    assert [one.shard_id for one in store.list()] == ["once"]


def test_a_freed_shard_is_gone(store: HttpStore) -> None:
    found = store.put(SMALL, owner="test")
    assert store.free([found, found.rows(1, 2)]).shards == 1
    assert store.free([found]) == Freed(missing=1)
    with pytest.raises(NotHeld, match=r"GET shard .* of n1 at 127.*was freed, or never put"):
        store.get(found)


def test_what_an_owner_left_is_freed_and_counted(store: HttpStore) -> None:
    kept = store.put(SMALL, owner="test")
    left = [store.put(SMALL, owner="trainer/rank 3") for _ in range(3)]
    before = usage(store)["abandoned"]
    assert store.free(owner="trainer/rank 3").shards == 3
    assert usage(store)["abandoned"] - before == 3
    with pytest.raises(NotHeld):
        store.get(left[0])
    assert_equal(store.get(kept), SMALL)


def test_a_full_store_refuses_in_one_line(connections: Connections) -> None:
    with running_agent(memory_bytes=20 << 20) as running:
        store = HttpStore(running.agent, connections)
        held = store.put({"a": np.zeros(15 << 20, np.uint8)}, owner="step 1")
        for size in (100, 6 << 20, 30 << 20):  # a large body is refused although it is being sent
            if size > 5 << 20:
                with pytest.raises(StoreFull, match=r"no room for shard .* of step 1.*or raise"):
                    store.put({"a": np.zeros(size, np.uint8)}, owner="step 2")
            else:
                store.put({"a": np.zeros(size, np.uint8)}, owner="step 2")
        assert [one.owner for one in store.list()] == ["step 1", "step 2"]
        assert_equal(store.get(held.rows(0, 10)), {"a": np.zeros(10, np.uint8)})


def test_a_wrong_key_opens_nothing(shared: Running, store: HttpStore) -> None:
    found = store.put(SMALL, owner="test")
    for key in ("", "another"):
        made = Connections(key)
        stranger = HttpStore(shared.agent, made)
        with pytest.raises(Refused, match="no key or a wrong one"):
            stranger.get(found)
        with pytest.raises(Refused, match="no key or a wrong one"):
            stranger.put(SMALL, owner="x")
        with pytest.raises(Refused, match="no key or a wrong one"):
            stranger.list()
        with pytest.raises(Refused, match="no key or a wrong one"):
            stranger.free([found])
        made.close()
    assert_equal(store.get(found), SMALL)


def test_a_restarted_host_refuses_what_was_meant_for_its_predecessor(
    connections: Connections,
) -> None:
    with running_agent(incarnation="1") as first:
        store = HttpStore(first.agent, connections)
        found = store.put(SMALL, owner="test")
        first.kill()
        with pytest.raises(Unreachable, match="check that the agent runs"):
            store.get(found)
        assert store.free([found]) == Freed(unreachable=(first.agent.address,))
    with running_agent(incarnation="2", address=first.agent.address) as second:
        for request in (lambda: store.get(found), lambda: store.put(SMALL, owner="test")):
            with pytest.raises(
                OtherIncarnation, match="is incarnation 2, not incarnation 1: it was restarted"
            ):
                request()
        assert store.free([found]) == Freed(missing=1)
        assert list(HttpStore(second.agent, connections).list()) == []


def test_late_bytes_are_discarded(shared: Running) -> None:
    fence = Fence()
    made = Connections(KEY, fence=fence)
    found = HttpStore(shared.agent, made).put(SMALL, owner="test")

    def replaced_meanwhile(
        _path: str, headers: dict[str, str], body: bytes
    ) -> tuple[dict[str, str], bytes]:
        fence.believe(behind.address, "2")
        return headers, body

    with altered(shared.agent, replaced_meanwhile) as behind:
        through = replace(found, node_addr=behind.address)
        with pytest.raises(OtherIncarnation, match="what it still sends is discarded"):
            HttpStore(behind, made).get(through)
        with pytest.raises(OtherIncarnation, match="was replaced by 2"):  # and nothing more is sent
            HttpStore(behind, made).get(through)
        fence.lose(behind.address)
        with pytest.raises(OtherIncarnation, match="of incarnation 1 is lost"):
            HttpStore(behind, made).get(through)
        fence.believe(behind.address, "1")  # it was only cut off; the reply is fenced once more
        with pytest.raises(OtherIncarnation, match="was replaced by 2"):
            HttpStore(behind, made).get(through)
    HttpStore(shared.agent, made).free([found])
    made.close()


Alteration = Callable[[dict[str, str], bytes], tuple[dict[str, str], bytes]]


@pytest.mark.parametrize(
    ("alter", "error", "message"),
    [
        (
            lambda headers, body: ({**headers, "x-areal-lab-incarnation": "0"}, body),
            OtherIncarnation,
            "incarnation 0 replied instead of 1; its bytes are discarded",
        ),
        (
            lambda headers, body: (headers, body[:-1] + bytes([body[-1] ^ 1])),
            Damaged,
            "but it was put with .*; fetch it once more",
        ),
        (
            lambda headers, body: (headers, body[:-5]),
            Unreachable,
            "the connection closed after .* bytes",
        ),
        (
            lambda headers, body: ({**headers, "content-range": "bytes 5-9/20"}, body),
            Damaged,
            "not the range that was asked for",
        ),
        (
            lambda headers, body: (headers, b"\xff" * len(body)),
            Damaged,
            "it is no safetensors file",
        ),
    ],
    ids=["incarnation", "flipped bit", "cut off", "other range", "garbage"],
)
def test_replies_that_are_not_what_was_asked_for_are_discarded(
    store: HttpStore,
    connections: Connections,
    alter: Alteration,
    error: type[Exception],
    message: str,
) -> None:
    found = store.put(SMALL, owner="test")
    with (
        altered(store.home, lambda _path, headers, body: alter(headers, body)) as behind,
        pytest.raises(error, match=message),
    ):
        HttpStore(behind, connections).get(replace(found, node_addr=behind.address))
    assert_equal(store.get(found), SMALL)


def test_a_silent_host_is_named() -> None:
    made = Connections(KEY, silence_s=0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        shard = ShardMetadata("n9", address, "s", 1, incarnation="1")
        with pytest.raises(Unreachable, match=f"'s' of n9 at {address}: silent for 0.05 s"):
            HttpStore(Agent(address, "1"), made).get(shard)
    made.close()


def test_idle_connections_are_used_again_unless_the_host_closed_them(
    store: HttpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    connect = http.client.HTTPConnection.connect

    def counted(connection: http.client.HTTPConnection) -> None:
        opened.append(connection.host)
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", counted)
    found = store.put(SMALL, owner="test")
    for _ in range(5):
        store.get(found)
    assert len(opened) == 1
    for idle in store._connections._idle.values():  # as if the host had closed it meanwhile
        for _, connection in idle:
            connection.sock.shutdown(socket.SHUT_RDWR)
    assert_equal(store.get(found), SMALL)
    assert len(opened) == 2


def test_two_hundred_steps_leave_nothing(store: HttpStore) -> None:
    before = usage(store)
    for step in range(200):
        shards = [store.put(SMALL, owner=f"step {step}") for _ in range(2)]
        parts = DistributedBatch(BatchMetadata("b", step, 6, shards)).chunk(3)
        for part in parts:
            FetchedBatch(part, store).fetch()
        assert store.free(shards).shards == 2
    after = usage(store)
    assert after["memory_bytes"] == after["shards"] == 0
    assert after["freed_bytes"] - before["freed_bytes"] == after["put_bytes"] - before["put_bytes"]
    assert after["put"] - before["put"] == 400
    assert after["abandoned"] == before["abandoned"]


def test_many_threads_share_a_store(store: HttpStore) -> None:
    def work(number: int) -> None:
        for _ in range(5):
            fields = {"a": np.full((4, 1000), number)}
            found = store.put(fields, owner="test")
            assert_equal(store.get(found), fields)
            store.free([found])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_ranks_fetch_their_parts_on_first_access(store: HttpStore) -> None:
    packed = [
        pack_samples([sample(number, number + step) for number in range(4)]) for step in range(3)
    ]
    shards = [store.put(fields, owner="test") for fields in packed]
    assert shards[1].lengths == (3, 4, 5, 6)
    batch = DistributedBatch(BatchMetadata("b", 0, 12, shards))
    fetched = [FetchedBatch(part, store) for part in batch.chunk_by_tokens(3)]
    sent = usage(store)["sent_bytes"]
    assert set(fetched[0]) == set(packed[0])
    assert usage(store)["sent_bytes"] == sent  # names are metadata
    assert_equal(concat_rows(fetched), concat_rows(packed))
    found = [row for part in fetched for row in unpack_samples(part)]
    assert found == [sample(number, number + step) for step in range(3) for number in range(4)]
    with pytest.raises(KeyError, match="no field 'x'"):
        fetched[0]["x"]


def sample(number: int, tokens: int) -> Trajectory:
    return Trajectory(
        group=number,
        sample=0,
        prompt_tokens=(1,),
        parts=(Segment((5,) * (tokens + 1), (-0.5,) * (tokens + 1), 3),),
        finish_reason="stop",
        reward=1.0,
    )


def test_the_verbs_can_be_awaited(store: HttpStore) -> None:
    async def all_four() -> None:
        waiting = AsyncStore(store)
        found = await waiting.put(SMALL, owner="test")
        assert_equal(await waiting.get(found), SMALL)
        assert len(await waiting.list()) == 1
        assert (await waiting.free([found])).shards == 1

    asyncio.run(all_four())


def test_a_put_that_breaks_off_holds_nothing(shared: Running, store: HttpStore) -> None:
    host, port = shared.agent.address.split(":")
    _, data = write_shard(SMALL)
    before = usage(store)["aborted"]
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT /shards/half?owner=test HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n"
        raw.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data[:-1].tobytes())
    while usage(store)["aborted"] == before:  # once the agent noticed
        pass
    assert usage(store)["memory_bytes"] == 0


def test_a_receiver_that_takes_nothing_does_not_keep_a_freed_shard(
    connections: Connections,
) -> None:
    with running_agent(stall_s=0.05) as running:
        store = HttpStore(running.agent, connections)
        found = store.put({"a": np.zeros(30 << 20, np.uint8)}, owner="test")
        host, port = running.agent.address.split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = f"GET /shards/{found.shard_id} HTTP/1.1\r\nhost: a\r\n"
            raw.sendall(f"{head}authorization: Bearer {KEY}\r\n\r\n".encode())
            assert raw.recv(12) == b"HTTP/1.1 200"
            store.free([found])
            while usage(store)["memory_bytes"]:  # until the agent gives up
                pass


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        ("bytes=2-4", 206, slice(2, 5)),
        ("bytes=5-", 206, slice(5, None)),
        ("bytes=-3", 206, slice(-3, None)),
        ("bytes=0-999999", 206, slice(0, None)),
        ("bytes=0-1,3-4", 200, slice(0, None)),
        ("lines=0-1", 200, slice(0, None)),
        ("bytes=999999-", 416, None),
    ],
)
def test_ranges_are_those_of_the_standard(
    shared: Running, store: HttpStore, header: str, status: int, expected: slice | None
) -> None:
    found = store.put(SMALL, owner="test")
    connection = http.client.HTTPConnection(shared.agent.address)
    path = f"/shards/{found.shard_id}"
    connection.request("GET", path, headers={**authorization(KEY), "range": header})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    assert reply.status == status
    if expected is not None:
        assert body == write_shard(SMALL)[1].tobytes()[expected]


@pytest.mark.parametrize("address", ["", "host", "host:x", "http://host:1", "u@host:1", "h:1/x"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="but is HOST:PORT"):
        Agent(address)


@pytest.mark.parametrize("end", [Connections.close, lambda one: one.drop(one.silent)])
def test_a_read_ends_when_its_agent_is_lost_or_the_connections_are_closed(end: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        made: Any = Connections(KEY, silence_s=3600.0)
        made.silent = address
        reading = thread.submit(made.call, Call(Agent(address), "GET", "/", "nothing"))
        silent, _ = listener.accept()
        with silent:
            assert silent.recv(1), "it has asked, and waits"
            end(made)
            with pytest.raises(Unreachable):
                reading.result(DEADLINE_S)
        made.close()
