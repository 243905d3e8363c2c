"""Activity in equal pieces of time, against sums over single stretches."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.runlog.activity import NOTHING_TO_SCORE, WAIT_BATCH, Stretch, activity
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.time_cells import (
    Cells,
    State,
    cells_of,
    shares_by_cell,
    state_seconds,
    states_by_cell,
    without_idle_rows,
)

RECORDED = Path(__file__).parents[2] / "reproductions" / "recorded" / "asynchronous"
STATES = [State("decode", True), State("train", True), State(WAIT_BATCH, False)]


@cache
def recorded() -> dict[str, list[Stretch]]:
    return activity(read_events(RECORDED))


@st.composite
def rows_of_stretches(draw: st.DrawFn) -> dict[str, list[Stretch]]:
    """Processes with stretches one after the other, without gaps."""
    processes = {}
    for number in range(draw(st.integers(1, 3))):
        moments = sorted(draw(st.sets(st.integers(0, 400), min_size=2, max_size=12)))
        kinds = draw(st.lists(st.sampled_from(STATES), min_size=12, max_size=12))
        processes[f"engine {number}"] = [
            Stretch(start / 10, end / 10, state.name, state.busy)
            for (start, end), state in zip(pairwise(moments), kinds, strict=False)
        ]
    return processes


def covered_s(stretches: list[Stretch], state: State, start_s: float, end_s: float) -> float:
    return math.fsum(
        max(0.0, min(one.end_s, end_s) - max(one.start_s, start_s))
        for one in stretches
        if (one.name, one.busy) == (state.name, state.busy)
    )


@given(rows_of_stretches(), st.integers(1, 17), st.floats(0, 20), st.floats(1, 40))
def test_cells_have_the_seconds_of_their_stretches(
    activities: dict[str, list[Stretch]], count: int, start_s: float, length_s: float
) -> None:
    cells = cells_of((start_s, start_s + length_s), count)
    shares = shares_by_cell(activities, STATES, cells)
    rows = states_by_cell(activities, STATES, cells)
    for number in range(count):
        edges = cells.edges_s[number : number + 2]
        for code, state in enumerate(STATES):
            seconds = [covered_s(one, state, *edges) for one in activities.values()]
            mean = sum(seconds) / len(activities) / cells.length_s
            assert shares[code, number] == pytest.approx(mean, abs=1e-6)
        for process, stretches in activities.items():
            seconds = [covered_s(stretches, state, *edges) for state in STATES]
            assert seconds[rows[process][number]] >= max(seconds) - 1e-6


def test_shares_of_a_recorded_run_sum_to_1() -> None:
    states = list(state_seconds(recorded()))
    end_s = max(one.end_s for stretches in recorded().values() for one in stretches)
    shares = shares_by_cell(recorded(), states, cells_of((0.0, end_s), 50))
    assert shares.sum(axis=0) == pytest.approx(np.ones(50))
    assert shares.min() >= -1e-9


def test_of_two_states_with_equal_time_a_cell_shows_the_first() -> None:
    row = [Stretch(0, 1, "train", True), Stretch(1, 2, "decode", True)]
    found = states_by_cell({"trainer": row}, STATES[:2], Cells(0.0, 2.0, 1))
    assert found["trainer"].tolist() == [0]


def test_time_in_no_state_counts_as_the_first() -> None:
    row = [Stretch(0, 1, "train", True), Stretch(1, 2, "unknown", True)]
    found = states_by_cell({"trainer": row}, STATES[:2], Cells(0.0, 1.0, 3))
    assert found["trainer"].tolist() == [1, 0, 0]


def test_states_are_sorted_by_kind_and_time() -> None:
    row = [
        Stretch(0, 5, WAIT_BATCH, False),
        Stretch(5, 6, "decode", True),
        Stretch(6, 8, "train", True),
    ]
    assert state_seconds({"trainer": row}) == {STATES[1]: 2, STATES[0]: 1, STATES[2]: 5}
    assert list(state_seconds({"trainer": row})) == [STATES[1], STATES[0], STATES[2]]


def test_a_process_that_only_waits_for_nothing_has_no_row() -> None:
    activities = {
        "rewards": [Stretch(0, 9, NOTHING_TO_SCORE, False)],
        "engine 0": [Stretch(0, 9, WAIT_BATCH, False)],
    }
    assert list(without_idle_rows(activities)) == ["engine 0"]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the window is 2.0 to 2.0 s, but must end after"):
        cells_of((2.0, 2.0), 3)
    with pytest.raises(ValueError, match="got 0 cells, but needs at least 1"):
        cells_of((0.0, 2.0), 0)
    with pytest.raises(ValueError, match="got 0 states, but needs 1 to 256"):
        states_by_cell({}, [], Cells(0.0, 1.0, 1))
