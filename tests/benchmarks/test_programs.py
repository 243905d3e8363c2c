"""The cases of the training benchmark do the same work in different ways."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from areal_lab.agents.gateway.server import bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.rewards.sandbox.run import Sandbox
from benchmarks import advantages, paired, runner, sandbox, training
from benchmarks.gateway import ADMIN, Round, Scripted, figures, measure, start_session
from tests.rewards.sandbox.test_attacks import LEVELS


def test_layouts_learn_the_same_from_fewer_tokens() -> None:
    packed, rows, padded = (
        training.measure(case, training.QUICK_MODEL) for case in ("packed", "rows", "padded")
    )
    assert rows["loss"] == pytest.approx(packed["loss"], abs=1e-3)
    assert padded["loss"] == pytest.approx(packed["loss"], abs=1e-3)
    assert packed["computed_tokens"] < rows["computed_tokens"] < padded["computed_tokens"]
    for one in (packed, rows, padded):
        assert one["peak_mib"] > 0
        assert min(one["parts"].values()) > 0


def test_every_loop_gives_the_advantages_that_are_measured() -> None:
    batch = advantages.make_batch(5, 300)
    assert batch.lengths.sum() == batch.rewards.numel() >= 300
    assert advantages.largest_error(batch) < 1e-12
    ours = advantages.ours(batch)
    expected = ours["gae, packed"]()
    torch.testing.assert_close(ours["gae, padded"]()[batch.exists], expected, rtol=1e-4, atol=1e-4)
    assert ours["gae, packed, forward and backward"]().shape == expected.shape

    loops = advantages.baselines(batch)
    tokens, over_time = loops["loop over time, padded"]
    assert tokens == expected.numel()
    torch.testing.assert_close(over_time()[batch.exists], expected, rtol=1e-4, atol=1e-4)
    for case in ("loop over tokens, floats", "loop over tokens, tensors"):
        tokens, loop = loops[case]
        result = torch.tensor([float(x) for x in loop()])
        assert tokens == expected.numel()
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_rates_and_cpu_time_are_of_programs_that_ran() -> None:
    level = Sandbox(LEVELS[0])
    for what in (
        sandbox.run_plainly,
        *(partial(one, level) for one in (sandbox.run_in, sandbox.judge_in)),
    ):
        found = sandbox.measure(what, count=3, at_once=2, repeats=2)
        assert 0 < found["min"] <= found["per_s"] <= found["max"]
        assert found["cpu_ms"] > 1


def test_a_program_that_fails_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "PROGRAM", "1 / 0")
    with pytest.raises(RuntimeError, match="the program failed"):
        sandbox.run_in(Sandbox(LEVELS[0]))
    monkeypatch.setattr(sandbox, "TESTS", "assert add(1, 1) == 3")
    with pytest.raises(RuntimeError, match="the verdict is"):
        sandbox.judge_in(Sandbox(LEVELS[0]))


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


def test_an_agent_in_a_runner_takes_all_its_turns() -> None:
    found = asyncio.run(runner.run(1, samples=8, turns=8))
    assert [row["case"] for row in found["rows"]] == ["inline", "runner"]
    assert all(row["turns"] == 64 and row["cpu_ms_per_turn"] > 0 for row in found["rows"])
    known = runner.figures({"inline": [1.0, 4.0, 2.0], "runner": [2.0, 4.0, 3.0]}, 5)
    assert known["ratio"] == 1.5
    assert known["spread"]["ratio"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert known["rows"][1] == {"case": "runner", "turns": 5, "cpu_ms_per_turn": 3.0}


def test_figures_of_two_trees_are_compared_pair_by_pair() -> None:
    rows = [{"case": "a", "rate": 4.0, "min": 1.0}, {"nothing": 1}]
    plain = paired.figures_of({"rate": 2, "rows": rows, "machine": {}, "quick": True, "wall_s": 3})
    assert plain == {"rate": 2.0, "a: rate": 4.0}
    pairs = [({"rate": 2.0, "events": 9, "new": 1}, {"rate": 4.0, "events": 9, "old": 1})]
    pairs += [({"rate": 3.0, "events": 9}, {"rate": 3.0, "events": 9})]
    pairs += [({"rate": 9.0, "events": 9}, {"rate": 3.0, "events": 9})]
    (row,) = paired.compared(pairs)
    assert row == {
        "figure": "rate",
        "ratio": 1.0,
        "min": 0.5,
        "max": 3.0,
        "this_tree": 3.0,
        "commit": 3.0,
    }


def test_a_benchmark_of_another_tree_shows_its_errors() -> None:
    with pytest.raises(RuntimeError, match="no_such_benchmark"):
        paired.run(Path.cwd(), ["no_such_benchmark"])
