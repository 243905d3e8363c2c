"""held_out.jsonl: one score per version, which says of which versions its tokens are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.runlog.held_out import Measured, append_held_out, measured_of, read_held_out


@given(st.dictionaries(st.integers(20, 30), st.integers(1, 50), min_size=1))
def test_tokens_of_later_versions_are_counted(tokens: dict[int, int]) -> None:
    measured = measured_of(20, [0.5, 1.0], tokens=tokens)
    assert measured is not None
    each = [version for version, count in tokens.items() for _ in range(count)]
    assert measured.versions == (min(each), max(each))
    assert measured.later_tokens == pytest.approx(sum(v > 20 for v in each) / len(each))
    assert measured.mean_version == pytest.approx(sum(each) / len(each))
    assert measured.exact == (set(each) == {20})
    assert ("of the tokens" in str(measured)) == (not measured.exact)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    mixed = measured_of(
        4, [0.0, 1.0], tokens={4: 30, 5: 10}, unscored=1, pass_at={"1": 0.5, "4": 1.0}
    )
    append_held_out(tmp_path, mixed)
    append_held_out(tmp_path, measured_of(9, []))  # nothing was scored
    assert read_held_out(tmp_path) == [mixed]
    assert str(mixed).endswith("n = 2; 25% of the tokens by version 5; 1 samples without a reward)")


def test_lines_of_older_runs_and_metrics_of_steps_are_read(tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text(
        '{"version": 0, "reward": 0.25, "ci95": 0.1, "problems": 8}\n'
    )
    metrics = [{"step": 1, "loss": 0.5}, {"step": 2, "held_out_reward": 0.75}]
    assert read_held_out(tmp_path, metrics) == [Measured(0, 0.25, 0.1, 8), Measured(2, 0.75)]


def test_a_version_has_one_score_and_the_exact_one_counts(tmp_path: Path) -> None:
    mixed, exact = (measured_of(4, [r], tokens=t) for r, t in ((0.9, {4: 1, 5: 1}), (0.5, {4: 2})))
    for one in (mixed, exact):
        append_held_out(tmp_path, one)
    assert read_held_out(tmp_path) == [exact]
    append_held_out(tmp_path, mixed)
    assert read_held_out(tmp_path) == [exact]
