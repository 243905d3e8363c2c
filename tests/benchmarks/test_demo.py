"""The benchmark of the demo: pairs are compared by seed, and a quick pair runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo


def row(tree: str, seed: int, cpu_s: float, held_out: float) -> dict[str, Any]:
    return {
        "tree": tree,
        "seed": seed,
        "cpu_s": cpu_s,
        "peak_mib": 10 * cpu_s,
        "held_out": held_out,
        "sampler_gap": 0.01,
    }


def test_ratios_are_of_pairs_with_one_seed() -> None:
    """In whatever order the runs were: 3 / 6, 8 / 8 and 5 / 20."""
    rows = [
        row("this tree", 1, 3.0, 0.8),
        row("abc", 1, 6.0, 0.9),
        row("abc", 2, 8.0, 0.7),
        row("this tree", 2, 8.0, 0.9),
        row("this tree", 3, 5.0, 1.0),
        row("abc", 3, 20.0, 1.0),
    ]
    figures = demo.compared(rows, "abc")
    assert figures["cpu_ratio"] == figures["memory_ratio"] == 0.5
    assert figures["spread"]["cpu_ratio"] == {"median": 0.5, "min": 0.25, "max": 1.0}
    assert (figures["cpu_s"], figures["cpu_s_of_commit"]) == (5.0, 8.0)
    assert figures["held_out"] == pytest.approx(0.9)
    assert figures["held_out_of_commit"] == pytest.approx(2.6 / 3)


@pytest.mark.slow
def test_a_quick_pair_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", "--against", "HEAD", "--quick", "--json"])
    demo.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["tree"] for one in figures["rows"]] == ["this tree", "HEAD"]
    assert all(one["cpu_s"] > 1 and one["peak_mib"] > 100 for one in figures["rows"])


def test_a_failed_run_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        demo.run(demo.ROOT, ["tiny", "no_such_setting=1"], tmp_path)
