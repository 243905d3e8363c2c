"""Cycles are searched for in pauses, and at some point without one."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from areal_lab.host import collector
from areal_lab.host.collector import collected_in_pauses


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collector, "_LOOK_S", 0.001)
    monkeypatch.setattr(collector, "_WORTH_IT", 100)
    yield
    gc.unfreeze()


async def forgotten(cycles: int) -> weakref.ref[Cycle]:
    """The first of so many cycles, after some looks."""
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
    monkeypatch.setattr(collector, "_MOST", 400)

    async def serve() -> None:
        async with collected_in_pauses(lambda: False):
            assert (await forgotten(max(1000, len(gc.get_objects()))))() is None

    asyncio.run(serve())
