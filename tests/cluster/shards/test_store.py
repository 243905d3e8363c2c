"""A store holds what was put until it is freed, within its limits, and counts everything."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_lab.cluster.shards.errors import Damaged, NotHeld, OtherIncarnation, Refused, StoreFull
from areal_lab.cluster.shards.layout import write_shard
from areal_lab.cluster.shards.local import Host, LocalStore
from areal_lab.cluster.shards.metadata import ShardMetadata
from areal_lab.cluster.shards.protocol import TensorStore, check_kind
from areal_lab.cluster.shards.store import Freed, Limits, ShardStore
from areal_lab.data.arrays.jagged import Fields, Jagged, slice_rows
from tests.cluster.shards.fields import assert_equal

HOST = Host("n1", "127.0.0.1:1", "7")
MEMORY, SPILL = 1500, 1200


def rows_of(size: int) -> Fields:
    """Two rows, whose bytes are a little more than `size`."""
    return {"a": np.full((2, size // 2), size % 256, np.uint8)}


class Store(RuleBasedStateMachine):
    """Every put, read and free in any order; the model is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path("/dev/shm")
        self.shards = ShardStore(Limits(MEMORY, SPILL, self.folder))
        self.store = LocalStore(HOST, self.shards)
        self.held: dict[str, tuple[str, Fields, ShardMetadata]] = {}
        self.reading: dict[tuple[str, int], ExitStack] = {}
        self.sizes: dict[str, int] = {}
        self.put_bytes = self.refused = self.freed = self.abandoned = self.missing = 0

    @rule(size=st.sampled_from([0, 100, 300, 700, 3000]), owner=st.sampled_from("xyz"))
    def put(self, size: int, owner: str) -> None:
        fields = rows_of(size)
        total = len(write_shard(fields)[1])
        usage = self.shards.usage()
        fits = total <= max(MEMORY - usage["memory_bytes"], SPILL - usage["spill_bytes"])
        if not fits:
            with pytest.raises(StoreFull, match="once they are trained on, or raise the limit"):
                self.store.put(fields, owner=owner)
            self.refused += 1
            return
        found = self.store.put(fields, owner=owner)
        self.held[found.shard_id] = owner, fields, found
        self.sizes[found.shard_id] = total
        self.put_bytes += total

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        _, fields, found = self.held[data.draw(st.sampled_from(list(self.held)))]
        assert_equal(self.store.get(found), fields)
        assert_equal(self.store.get(found.rows(1, 2)), slice_rows(fields, 1, 2))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.held)))
        found = self.held.pop(name)[2]
        freed = self.store.free([found.rows(0, 1), found])  # sub-shards of one shard
        assert freed.shards == 1
        assert self.store.free([found]) == Freed(missing=1)
        with pytest.raises(NotHeld, match="it was freed, or never put"):
            self.store.get(found)
        self.freed += 1
        self.missing += 1

    @rule(owner=st.sampled_from("xyz"))
    def owner_dies(self, owner: str) -> None:
        left = [name for name, (other, _, _) in self.held.items() if other == owner]
        assert self.store.free(owner=owner).shards == len(left)
        for name in left:
            del self.held[name]
        self.freed += len(left)
        self.abandoned += len(left)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reader=st.integers(0, 2))
    def begin_reading(self, data: st.DataObject, reader: int) -> None:
        name = data.draw(st.sampled_from(list(self.held)))
        if (name, reader) not in self.reading:
            stack = self.reading[name, reader] = ExitStack()
            stack.enter_context(self.shards.reading(name))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        self.reading.pop(data.draw(st.sampled_from(list(self.reading)))).close()

    @rule(missing_bytes=st.integers(1, 10))
    def abort(self, missing_bytes: int) -> None:
        with ExitStack() as stack:
            try:
                pending = stack.enter_context(self.shards.new("late", 20, "x"))
            except StoreFull:
                self.refused += 1
                return
            pending.write(bytes(20 - missing_bytes))
            with pytest.raises(Damaged, match="instead of 20"):
                pending.commit()

    @invariant()
    def bytes_and_counts_are_those_of_the_model(self) -> None:
        usage = self.shards.usage()
        listed = self.store.list()
        assert {one.shard_id for one in listed} == self.held.keys()
        assert usage["shards"] == len(self.held)
        held = sum(one.size_bytes for one in listed)
        for one in listed:
            assert one.readers == [name for name, _ in self.reading].count(one.shard_id)
        assert usage["memory_bytes"] <= MEMORY
        assert usage["spill_bytes"] <= SPILL
        read_after_free = {name for name, _ in self.reading} - self.held.keys()
        assert self.shards.held_bytes == held + sum(self.sizes[name] for name in read_after_free)
        assert usage["put_bytes"] == self.put_bytes
        assert usage["put"] == len(self.held) + self.freed
        names = ("refused", "freed", "abandoned", "missing")
        assert [usage[name] for name in names] == [getattr(self, name) for name in names]

    def teardown(self) -> None:
        for stack in self.reading.values():
            stack.close()
        self.store.free(found for _, _, found in self.held.values())
        assert self.shards.held_bytes == 0


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=25, stateful_step_count=25)


def store(**limits: int) -> LocalStore:
    known: TensorStore = LocalStore(HOST, ShardStore(Limits(**{"memory_bytes": 10_000, **limits})))
    assert isinstance(known, LocalStore)
    return known


def test_a_full_store_says_what_holds_its_bytes() -> None:
    now_s = [0.0]
    shards = ShardStore(Limits(1000), clock=lambda: now_s[0])
    local = LocalStore(HOST, shards)
    local.put(rows_of(600), owner="step 3", shard_id="old")
    now_s[0] = 90.0
    with pytest.raises(
        StoreFull,
        match="no room for shard 'new' of .* bytes: this host holds .* of 1,000 bytes in memory "
        r"\(the oldest of 1 is 90 s old, of step 3\); free shards once",
    ):
        local.put(rows_of(600), owner="step 4", shard_id="new")
    assert [one.age_s for one in local.list()] == [90.0]


def test_what_does_not_fit_into_memory_goes_into_a_file(tmp_path: Path) -> None:
    local = LocalStore(HOST, ShardStore(Limits(100, 10_000, tmp_path)))
    fields = {"a": Jagged.of_rows([[1, 2], [3]], "int32"), "b": np.arange(2)}
    found = local.put(fields, owner="x")
    assert [one.where for one in local.list()] == ["file"]
    assert list(tmp_path.iterdir()) == []  # the file has no name: a killed process leaves nothing
    assert_equal(local.get(found), fields)
    assert_equal(local.get(found.rows(1, 2), ["a"]), {"a": Jagged.of_rows([[3]], "int32")})
    local.free([found])
    assert local.shards.held_bytes == 0


def test_a_disk_without_room_is_a_full_store(tmp_path: Path) -> None:
    shards = ShardStore(Limits(0, 1 << 60, tmp_path))
    with pytest.raises(StoreFull, match="lower the store's limit to what there is"):
        shards.new("a", 1 << 59, "x")
    assert shards.held_bytes == 0
    assert shards.usage()["refused"] == 1


def test_wrong_puts_and_gets_are_refused() -> None:
    local = store()
    found = local.put({"a": np.arange(3)}, owner="x", shard_id="a")
    with pytest.raises(Refused, match="there is a shard 'a' already"):
        local.put({"a": np.arange(3)}, owner="x", shard_id="a")
    with pytest.raises(Refused, match="has no owner; name who frees it"):
        local.put({"a": np.arange(3)}, owner="")
    with pytest.raises(NotHeld, match=r"has no field 'b'; it has \['a'\]"):
        local.get(found, ["b"])
    wider = ShardMetadata("n1", "127.0.0.1:1", "a", 4, offset=1, incarnation="7")
    with pytest.raises(NotHeld, match=r"has 3 rows, not those of \[1, 5\)"):
        local.get(wider)
    before = ShardMetadata("n1", "127.0.0.1:1", "a", 3, incarnation="6")
    with pytest.raises(OtherIncarnation, match="incarnation 6 of n1, which is now 7: it is gone"):
        local.get(before)


def test_bytes_that_arrived_wrong_are_not_held() -> None:
    shards = ShardStore(Limits(1000))
    _, data = write_shard({"a": np.arange(3)})
    with shards.new("a", len(data), "x") as pending:
        pending.write(data.data)
        with pytest.raises(Damaged, match="checksum"):
            pending.commit("0" * 32)
    with shards.new("a", 20, "x") as pending:
        pending.write(b"\xff" * 20)
        with pytest.raises(Damaged, match="safetensors"):
            pending.commit()
    with shards.new("a", 2, "x") as pending, pytest.raises(Damaged, match="more than 2 bytes"):
        pending.write(b"abc")
    assert shards.held_bytes == 0
    assert shards.usage()["aborted"] == 3


def test_room_is_reserved_before_bytes_arrive() -> None:
    shards = ShardStore(Limits(100))
    with shards.new("a", 60, "x"), pytest.raises(StoreFull, match="60 of 100 bytes"):
        shards.new("b", 60, "x")
    shards.new("b", 60, "x").__exit__()


def test_the_last_reader_of_a_freed_shard_gives_its_bytes_back(tmp_path: Path) -> None:
    for limits in (Limits(1000), Limits(0, 1000, tmp_path)):
        local = LocalStore(HOST, ShardStore(limits))
        found = local.put(rows_of(100), owner="x")
        held = local.shards.held_bytes
        with local.shards.reading(found.shard_id) as last:
            with local.shards.reading(found.shard_id):
                local.free([found])
            assert local.shards.held_bytes == held
            assert bytes(last.content.read(held - 100, held)) == bytes([100] * 100)
        assert local.shards.held_bytes == 0


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="memory_bytes is -1"):
        Limits(-1)
    with pytest.raises(ValueError, match="spill_bytes is 5 and spill_folder is None; set both"):
        Limits(1, 5)


def test_stores_that_are_not_offered_are_refused_with_a_reason() -> None:
    for kind, reason in {
        "ray": "lost with the actor",
        "TransferQueue": "needs Ray, hydra",
        "mooncake": "no faster than HTTP",
        "nixl": "needs CUDA or UCX",
    }.items():
        with pytest.raises(ValueError, match=f"no store of tensors is named '{kind}' .*{reason}"):
            check_kind(kind)
    with pytest.raises(ValueError, match=r"named 'x'; use one of \['local', 'http'\]"):
        check_kind("x")
    check_kind("http")
