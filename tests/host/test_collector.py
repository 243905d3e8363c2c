"""Cycles are searched for in pauses, and at some point without one."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from areal_lab.host import asgi
from areal_lab.host.asgi import collected_in_pauses


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_LOOK_S", 0.001)
    monkeypatch.setattr(asgi, "_IDLE_OBJECTS", 100)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A block leaves the collection as it was. The tests' own process has frozen its modules."""
    gc.unfreeze()
    yield
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    gc.freeze()


async def forgotten(cycles: int) -> weakref.ref[Cycle]:
    """The first of these cycles, after some looks."""
    first = Cycle()
    reference = weakref.ref(first)
    kept = [first, *(Cycle() for _ in range(cycles))]
    del first, kept
    for _ in range(20):
        await asyncio.sleep(0.001)
    return reference


def test_an_idle_process_frees_what_is_in_cycles() -> None:
    async def serve() -> None:
        async with collected_in_pauses(lambda: True):
            assert not gc.isenabled()
            assert (await forgotten(500))() is None

    asyncio.run(serve())
    assert gc.isenabled()


@pytest.mark.parametrize(("idle", "cycles"), [(False, 500), (True, 2)], ids=["busy", "few"])
def test_a_search_waits_for_a_pause_and_for_enough_objects(idle: bool, cycles: int) -> None:
    async def serve() -> None:
        async with collected_in_pauses(lambda: idle):
            assert (await forgotten(cycles))() is not None

    asyncio.run(serve())


def test_a_process_that_is_always_busy_searches_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "_BUSY_OBJECTS", 400)

    async def serve() -> None:
        async with collected_in_pauses(lambda: False):
            assert (await forgotten(max(1000, len(gc.get_objects()))))() is None

    asyncio.run(serve())


def test_a_pause_does_not_search_much_for_little() -> None:
    kept: list[Cycle] = []

    async def serve() -> None:
        async with collected_in_pauses(lambda: True):
            kept.extend(Cycle() for _ in range(100_000))
            assert (await forgotten(500))() is None
            assert (await forgotten(500))() is not None
            assert (await forgotten(10_000))() is None

    asyncio.run(serve())


def test_collection_comes_back_if_the_search_fails() -> None:
    def fails() -> bool:
        raise RuntimeError("no")

    async def serve() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        async with collected_in_pauses(fails):
            await forgotten(500)
            assert gc.isenabled()

    asyncio.run(serve())


def test_collection_that_was_off_stays_off() -> None:
    async def serve() -> None:
        async with collected_in_pauses(lambda: True):
            await forgotten(500)

    gc.disable()
    try:
        asyncio.run(serve())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_frozen_before_stays_frozen() -> None:
    async def serve() -> None:
        async with collected_in_pauses(lambda: True):
            pass

    gc.freeze()
    try:
        asyncio.run(serve())
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
