"""Notebook 3: at eta 2 a token of lag 4 is trained on, and why eq. 3 does not forbid it."""

from __future__ import annotations

import importlib

import marimo as mo
import pytest

from areal_lab.widgets.strip import Strip

NAME = "03_staleness"


@pytest.fixture(scope="module")
def names(notebook):
    return notebook(NAME)[1]


@pytest.fixture(scope="module")
def moved(names):
    """Runs the notebook with other controls; the comparison of orders stays."""

    def run(eta=2, order="oldest_finished_first", interrupt=True, spread=0.6):
        defs = {
            "eta": mo.ui.slider(0, 8, 1, eta),
            "order": mo.ui.dropdown([order], value=order),
            "interrupt": mo.ui.switch(interrupt),
            "spread": mo.ui.slider(0.2, 1.4, 0.2, spread),
            "compared": names["compared"],
        }
        return importlib.import_module(f"notebooks.{NAME}").app.run(defs=defs)[1]

    return run


def test_the_surprise_is_there_at_first(names):
    """eta is 2, and the oldest of 30 steps and 5 seeds is 4."""
    assert names["eta"].value == 2
    assert names["oldest"] == 4
    runs = names["runs"]
    assert len(runs.results) == 5
    assert len(runs.results[0].columns["end_s"]) == 30
    beyond = runs.older_than(2)
    assert 0.05 < beyond.low < beyond.high < 0.2


def test_the_oldest_response_is_the_first_row_and_is_told_about(names):
    chosen, samples = names["chosen"], names["samples"]
    assert chosen is samples[0]
    assert chosen.oldest == 4 == max(sample.oldest for sample in samples)
    assert chosen.overtaken_by > 0
    strip = names["tokens"]
    assert strip.rows[0].tolist() == chosen.lags.tolist()
    assert "lag 4, older than eta" in list(strip.table().columns)


def test_tokens_are_colored_by_lag_and_add_up_to_the_trained_ones(names):
    strip, samples = names["tokens"], names["samples"]
    assert sum(len(row) for row in strip.rows) == sum(sample.tokens for sample in samples)
    assert strip.table()["length (token)"].tolist() == [sample.tokens for sample in samples]


def test_the_timeline_has_a_row_for_each_process_that_works(names):
    timeline = names["timeline"]
    assert timeline.table().index.tolist() == ["trainer", "engine 0", "engine 1"]


def test_the_counterexample_has_five_rows_and_ends_above_eta(names):
    rows = names["rows"]
    assert [row.trained for row in rows] == [(1,), (2,), (3,), (4,), (0,)]
    assert all(row.started <= row.may_start for row in rows)
    assert [row.lag for row in rows] == [0, 1, 2, 3, 4]


def test_only_the_usual_order_goes_beyond_eta(names):
    for order, found in names["compared"].items():
        lags = {eta: run.largest_lag("token") for eta, run in found.items()}
        if order == "oldest_finished_first":
            assert (lags[1], lags[2], lags[3]) == (2, 4, 4)
        else:
            assert lags == {eta: eta for eta in lags}


def test_the_bound_costs_time_at_eta_2_and_nothing_at_4(names):
    compared = names["compared"]
    usual = compared["oldest_finished_first"]
    for order in ("strict_start_order", "bounded_lag"):
        for eta, low, high in ((2, 0.2, 0.4), (4, -0.01, 0.01)):
            more_s = compared[order][eta].step_s.mean - usual[eta].step_s.mean
            assert low < more_s < high


@pytest.mark.parametrize("order", ["strict_start_order", "bounded_lag"])
def test_another_order_keeps_the_bound(moved, order):
    names = moved(order=order)
    assert names["oldest"] == 2
    assert names["rows"][-1].trained == ()
    assert names["rows"][-1].lag <= 2


def test_without_interruption_no_token_is_older_than_eta_and_steps_take_longer(moved, names):
    drained = moved(interrupt=False)
    assert drained["oldest"] == 2
    ratio = drained["runs"].step_s.mean / names["runs"].step_s.mean
    assert ratio == pytest.approx(1.13, abs=0.01)


def test_a_larger_eta_makes_tokens_older_and_nothing_faster(moved):
    three, eight = moved(eta=3)["runs"], moved(eta=8)["runs"]
    assert eight.largest_lag() == 8
    assert eight.step_s.mean == pytest.approx(three.step_s.mean, rel=0.002)
    assert eight.step_s.mean == pytest.approx(2.5, abs=0.01)


def test_a_heavier_tail_makes_tokens_three_versions_old_at_eta_1(moved):
    assert moved(eta=1, spread=1.2)["oldest"] == 3


def test_a_selected_response_is_told_about_and_seen_in_the_timeline(names):
    strip = Strip([], colors=["#112233"], labels=[""], names=[], title="t", merge="highest")
    defs = {
        "tokens": strip,
        "token_view": mo.ui.anywidget(strip),
        "get_selected": lambda: {"row": 5, "cell": 0},
        "set_selected": None,
        "compared": names["compared"],
    }
    found = importlib.import_module(f"notebooks.{NAME}").app.run(defs=defs)[1]
    chosen, timeline = found["chosen"], found["timeline"]
    assert chosen is found["samples"][5]
    cell_s = timeline.get_state()["_cell"]
    assert [cell_s * edge for edge in timeline.view] == pytest.approx(
        [chosen.started_s, chosen.trained_s]
    )
    assert names["timeline"].view == []
