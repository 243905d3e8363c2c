"""Tokens by lag as rows, the distribution of lags, and curves of batch orders."""

from __future__ import annotations

import json
import re
from functools import cache
from xml.etree import ElementTree

import pytest

from areal_lab.runlog.trained_samples import oldest_first, trained_samples
from areal_lab.widgets.lags import lag_bars, lag_rows, order_curves
from areal_lab.widgets.strip import Strip
from simulator.assembly.simulate import replicate, simulated_log
from simulator.config.load import load_simulation
from simulator.run.result import Replicated
from simulator.stats.statistics import Estimate


@cache
def at(eta: float) -> Replicated:
    return replicate(load_simulation("small", [f"schedule.eta={eta}", "seeds=2"]), processes=1)


@pytest.mark.parametrize(("eta", "within"), [(0, 1), (2, 3), (2.5, 3), (8, 5)])
def test_lags_beyond_eta_have_other_colors_and_say_so(eta: float, within: int) -> None:
    config = load_simulation("small", ["schedule.eta=2", "workload.steps=30"])
    samples = oldest_first(trained_samples(simulated_log(config)))
    rows = lag_rows(samples, eta=eta)
    assert [label.endswith("older than eta") for label in rows["labels"]] == [
        number >= within for number in range(5)
    ]
    blue = [color for color in rows["colors"] if int(color[5:], 16) > int(color[1:3], 16)]
    assert blue == rows["colors"][:within]
    assert len(set(rows["colors"])) == 5
    strip = Strip(title="t", **rows)
    assert strip.rows[0].tolist() == samples[0].lags.tolist()


def test_no_samples_make_no_rows() -> None:
    rows = lag_rows([], eta=2)
    assert (rows["rows"], rows["labels"]) == ([], ["lag 0"])
    with pytest.raises(ValueError, match="eta is -1"):
        lag_rows([], eta=-1)


def bars_of(markup: str) -> list[tuple[float, str, float]]:
    """x, color and height of each bar, from left to right."""
    found = re.findall(r'<rect x="([\d.]+)%".*?height="([\d.]+)" fill="(#\w+)"', markup)
    return [(float(x), color, float(height)) for x, height, color in found]


def test_bars_are_as_high_as_their_shares_and_red_beyond_eta() -> None:
    shares = {0: Estimate(0.25, 0.2, 0.3), 1: Estimate(0.5, 0.5, 0.5), 2: Estimate(0.25, 0, 1)}
    markup = lag_bars(shares, eta=1)
    ElementTree.fromstring(markup)
    (_, first, low), (_, second, high), (_, third, _) = bars_of(markup)
    assert high == pytest.approx(2 * low, abs=0.2)
    assert first == second != third
    assert ">50.0<" in markup
    assert "η = 1" in markup
    assert 'aria-label="Bars: share of the trained tokens by lag. eta is 1. lag 0: 25.0%' in markup


def test_axes_stay_while_eta_changes() -> None:
    def places(eta: float) -> list[str]:
        return re.findall(
            r'text x="([\d.]+)%" y="206', lag_bars(at(eta).lag_shares("token"), eta=eta)
        )

    assert places(1) == places(8)
    assert len(places(1)) == 11
    many = {14: Estimate(1.0, 1.0, 1.0)}
    assert len(re.findall(r'y="206', lag_bars(many, eta=20))) == 15


def test_what_was_shown_before_is_behind_and_pale() -> None:
    before, now = at(1).lag_shares("token"), at(4).lag_shares("token")
    markup = lag_bars(now, eta=4, before=before)
    pale = markup.count('fill-opacity="0.3"')
    assert pale == len(before)
    assert markup.rindex('fill-opacity="0.3"') < markup.index('fill-opacity="1"')


def test_without_shares_there_are_axes() -> None:
    assert bars_of(lag_bars({}, eta=2)) == []


def test_curves_have_a_point_for_every_order_and_eta() -> None:
    etas = (1, 4)
    charts = order_curves(
        {"usual": {eta: at(eta).largest_lag() for eta in etas}, "strict": {1: 1, 4: 4}},
        {name: {eta: at(eta).step_s for eta in etas} for name in ("usual", "strict")},
    )
    left, right = (chart.to_dict() for chart in charts)
    (data,) = {layer["data"]["name"] for layer in left["layer"] if "color" in layer["encoding"]}
    rows = json.loads(left["datasets"][data])
    assert [(row["order"], row["eta"]) for row in rows] == [
        *(("usual", 1), ("usual", 4), ("strict", 1), ("strict", 4)),
    ]
    assert rows[1]["seconds"] == at(4).step_s.mean
    assert "seconds" in right["title"]["text"][0]


def test_the_largest_lag_and_the_share_above_it_are_over_all_seeds() -> None:
    runs = at(2)
    largest = [max(result.token_lags) for result in runs.results]
    assert runs.largest_lag() == max(largest)
    assert runs.older_than(runs.largest_lag()).mean == 0
    assert runs.older_than(-1).mean == 1
    shares = runs.lag_shares("token")
    assert runs.older_than(1).mean == pytest.approx(
        sum(share.mean for lag, share in shares.items() if lag > 1)
    )
