"""The results that the paper does not print: what is said of small runs is what they show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from areal_lab.plots.style import save_picture
from reproductions import figure_4, lag_by_batch_order, where_asynchrony_pays
from reproductions.lag_by_batch_order import DRAWN_ETA, ORDERS, beyond, shares
from reproductions.where_asynchrony_pays import SIGMAS, SPLITS, Maps
from simulator.assembly.simulate import replicate
from simulator.config.load import load_simulation
from simulator.run.result import Replicated
from simulator.stats.statistics import Estimate


@cache
def small(*settings: str) -> Replicated:
    sizes = ("workload.steps=60", "workload.warmup_steps=20", "seeds=2")
    return replicate(load_simulation("small", [*sizes, *settings]), processes=1)


@cache
def orders() -> Mapping[tuple[str, int], Replicated]:
    # Long answers and engines that hold many prompts: the rule is what limits.
    settings = (
        *("workload.answers.sigma=1.2", "workload.answers.max_tokens=4000", f"eta={DRAWN_ETA}"),
        *("rollout.max_running=64", "trainer.step_s=1"),
    )
    return {(name, DRAWN_ETA): small(*own, *settings) for name, own in ORDERS.items()}


def test_only_the_usual_order_lets_samples_become_older_than_eta() -> None:
    for (name, eta), own in orders().items():
        late = beyond(shares(own, "head"), eta)
        assert (late > 0) == (name == "oldest finished first"), name


@pytest.mark.parametrize("kind", ["head", "tail", "token"])
def test_shares_by_lag_sum_to_one(kind: str) -> None:
    for own in orders().values():
        assert sum(shares(own, kind).values()) == pytest.approx(1)


def test_waiting_for_stragglers_costs_throughput() -> None:
    tokens_per_s = {name: own.tokens_per_s.mean for (name, _), own in orders().items()}
    assert tokens_per_s["strict start order"] < tokens_per_s["oldest finished first"]


def test_the_sentences_about_orders_have_their_numbers(tmp_path: Path) -> None:
    runs = orders()
    own = runs["oldest finished first", DRAWN_ETA]
    late = beyond(shares(own, "head"), DRAWN_ETA)
    largest = max(max(result.head_lags) for result in own.results)
    sentence = lag_by_batch_order.finding("oldest finished first", runs)
    assert f"{late:.0%} of the samples" in sentence
    assert f"the oldest {largest};" in sentence
    strict = lag_by_batch_order.finding("strict start order", runs)
    assert "no sample begins more than" in strict
    assert "less throughput" in strict
    picture = save_picture(lag_by_batch_order.draw(runs), tmp_path / "lags.png")
    assert picture.stat().st_size > 10_000


def maps() -> Maps:
    """Asynchronous is faster with more than 8 GPUs that generate, and more so with longer tails."""
    cells = [(split, sigma) for split in SPLITS for sigma in SIGMAS]

    def exactly(value: float) -> Estimate:
        return Estimate(value, value, value)

    return Maps(
        over_turns={
            (split, sigma): exactly(split / 8 * (0.9 + sigma) / 1.0) for split, sigma in cells
        },
        over_one_step={cell: exactly(1.5) for cell in cells},
        over_turns_by_batch={(32, sigma): exactly(0.8) for sigma in SIGMAS},
        generation_bound={(split, sigma): split / 8 - 1 for split, sigma in cells},
        tails={sigma: 1 + 3 * sigma for sigma in SIGMAS},
    )


def test_the_sentences_about_the_map_count_its_cells(tmp_path: Path) -> None:
    drawn = maps()
    found = where_asynchrony_pays.findings(drawn)
    assert "with 14 of 16 GPUs generating, and pays with 10 to 14 GPUs" in found[0]
    assert "1.66 times the throughput" in found[0]  # 14 / 8 * 0.95
    lost = sum(cell.mean <= 1 for cell in drawn.over_turns.values())
    assert f"Against taking turns: not faster in {lost} of 35 cells." in found
    assert "Against one-step overlap: not faster in 0 of 35 cells." in found
    picture = save_picture(where_asynchrony_pays.draw(drawn), tmp_path / "map.png")
    assert picture.stat().st_size > 10_000


def test_curves_grow_as_said(tmp_path: Path) -> None:
    one, many = small("eta=1"), small("schedule.name=synchronous")
    curve = {4: figure_4.Point(one, many), 8: figure_4.Point(one, many)}
    assert figure_4.growth(curve) == pytest.approx((0, 0))
    sentence = figure_4.finding("1.5B", "16k", curve)
    ratio = one.tokens_per_s.mean / many.tokens_per_s.mean
    assert "2 times the GPUs give AReaL 1.0 times the throughput" in sentence
    assert f"{ratio:.2f} times as fast on 4 GPUs" in sentence
    busy = one.utilization("training").mean
    assert f"its trainer is busy {busy:.0%} of the time" in sentence
    curves = {("1.5B", "16k"): curve}
    title = figure_4.title(curves)
    assert title.startswith("Twice the GPUs: 1.00 times")
    picture = save_picture(figure_4.draw(curves), tmp_path / "curves.png")
    assert picture.stat().st_size > 10_000
