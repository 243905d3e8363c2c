"""Tiles of rewards: where they begin, and what a selection of the chart says was clicked."""

from __future__ import annotations

import pytest

from areal_lab.widgets.reward_table import clicked_rewards, reward_table
from tests.widgets.chart_rows import rows_of

NAMES = ["A", "B"]
START = [[1, 0, 0], [1, 1, 1]]
LENGTHS = [[10, 20, 30], [40, 50, 60]]


def selection(*right):
    points = [{"prompt": prompt, "sample": sample} for prompt, sample in right]
    return {"right": {"vlPoint": {"or": points}} if points else {}}


def test_tiles_begin_as_the_rewards_are():
    chart = reward_table(START, names=NAMES, lengths=LENGTHS)
    (param,) = chart.to_dict()["params"]
    assert param["name"] == "right"
    assert param["value"] == [
        {"prompt": "A", "sample": 1},
        *({"prompt": "B", "sample": k} for k in (1, 2, 3)),
    ]
    tiles = rows_of(chart)[0]
    assert [(tile["prompt"], tile["sample"], tile["tokens"]) for tile in tiles[:4]] == [
        ("A", 1, "10"),
        ("A", 2, "20"),
        ("A", 3, "30"),
        ("B", 1, "40"),
    ]


def test_every_click_toggles_and_nothing_clears():
    select = reward_table(START, names=NAMES).to_dict()["params"][0]["select"]
    assert select["toggle"] == "true"
    assert select["clear"] is False


def test_before_any_click_rewards_are_those_of_the_start():
    assert clicked_rewards({}, START, names=NAMES) == START


def test_clicks_are_read_from_the_selection():
    clicked = selection(("A", 2), ("B", 3))
    assert clicked_rewards(clicked, START, names=NAMES) == [[0, 1, 0], [0, 0, 1]]


def test_the_last_right_response_can_be_clicked_away():
    assert clicked_rewards(selection(), START, names=NAMES) == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("rewards", "names", "lengths", "message"),
    [
        ([[1, 0], [1]], NAMES, None, r"rows of \[1, 2\] samples"),
        ([], [], None, r"rows of \[\] samples"),
        ([[1], [0.5]], NAMES, None, "an entry that is not 0 or 1"),
        ([[1], [0]], ["A", "A"], None, "names has 1 names for 2 prompts"),
        ([[1], [0]], NAMES, [[3]], "lengths must have 2 rows of 1"),
    ],
)
def test_bad_input_is_refused(rewards, names, lengths, message):
    with pytest.raises(ValueError, match=message):
        reward_table(rewards, names=names, lengths=lengths)
