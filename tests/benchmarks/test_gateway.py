"""The benchmark of the gateway: its clients read whole replies, and its figures are their sums."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from areal_lab.agents.gateway.server import bind, serve
from areal_lab.agents.gateway.service import Service
from benchmarks.gateway import ADMIN, Round, Scripted, figures, measure, start_session


def test_both_kinds_of_replies_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gateway.SHORTEST_S", 0.01)
    monkeypatch.setattr("benchmarks.gateway.LONGEST_S", 0.05)

    async def scenario() -> None:
        service = Service(lambda _: Scripted(), admin_key=ADMIN, model="scripted")
        listener = bind()
        address = listener.getsockname()[:2]
        serving = asyncio.create_task(serve(service, listener))
        keys = [await start_session(address) for _ in range(3)]
        for stream in (False, True):
            found = await measure(address, keys, psutil.Process(), rounds=1, stream=stream)
            assert found.requests == 6
            assert len(found.added_ms) == 3
            assert found.added_ms[0] > 0
        assert service.statistics()["counts"]["calls"] == 12
        assert "sent_again" not in service.statistics()["counts"]
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(scenario())


def test_figures_of_known_rounds() -> None:
    plain = Round(requests=10, cpu_s=0.01, added_ms=tuple(float(i) for i in range(100)))
    streamed = Round(requests=10, cpu_s=0.077, added_ms=(1.0, 2.0, 50.0))
    found = figures([plain], [streamed], sessions=5)
    assert found["cpu_ms_per_request"] == pytest.approx(1.0)
    assert found["events"] == 67
    assert found["cpu_us_per_event"] == pytest.approx(100.0)
    assert [row["added_p99_ms"] for row in found["rows"]] == [99.0, 50.0]
    assert found["added_p99_ms"] == 99.0
