"""The benchmark of co-simulation accounts for all of its time."""

from __future__ import annotations

import pytest

from benchmarks import cosim


@pytest.mark.parametrize("mode", ["along", "live"])
def test_the_parts_of_a_run_add_up(mode: str) -> None:
    found = cosim.whole_run(mode, 1)
    parts = [found[f"{name}_s"] for name in (*cosim.PARTS, "rest")]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(found["step_s"])
    assert found["run_250_s"] == pytest.approx(250 * found["step_s"])
    assert found["rows_per_sample"] >= 1


def test_a_part_inside_another_counts_for_itself_only() -> None:
    parts = cosim.Parts()
    with parts.part("outer"), parts.part("inner"):
        sum(range(10**6))
    assert parts.seconds["outer"] < parts.seconds["inner"] / 10
