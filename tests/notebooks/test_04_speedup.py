"""The notebook of the 2.77x: its numbers, what each switch and order changes, and its misses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import marimo as mo
import pytest

from reproductions.speedup import SWITCHES

NAME = "04_speedup"
Ran = tuple[tuple[Any, ...], Mapping[str, Any]]


@pytest.fixture(scope="module")
def ran(notebook: Callable[[str], Ran]) -> Ran:
    return notebook(NAME)


@pytest.fixture(scope="module")
def shown(ran: Ran) -> Mapping[str, Any]:
    return ran[1]


@pytest.fixture(scope="module")
def run(shown: Mapping[str, Any]) -> Callable[..., Mapping[str, Any]]:
    """Run with other controls, without simulating again."""
    app = importlib.import_module(f"notebooks.{NAME}").app
    kept = {name: shown[name] for name in ("live", "took_s")}

    def again(**controls: Any) -> Mapping[str, Any]:
        return dict(app.run(defs={**kept, **controls})[1])

    return again


def switched(*off: str) -> mo.ui.dictionary:
    return mo.ui.dictionary({name: mo.ui.switch(value=name not in off) for name in SWITCHES})


def factors(defs: Mapping[str, Any]) -> dict[str, float]:
    return {one.name: one.factor.mean for one in defs["falls"].factors}


def text_of(outputs: tuple[Any, ...]) -> str:
    return "\n".join(str(getattr(one, "text", "")) for one in outputs)


def test_it_begins_with_the_ratio_and_its_interval(shown: Mapping[str, Any]) -> None:
    assert shown["chosen"] == list(SWITCHES)
    assert 2.55 < shown["ratio"].low < shown["ratio"].high < shown["PAPER"]
    assert shown["PAPER"] == pytest.approx(2.770, abs=0.001)


def test_the_largest_factor_is_the_baselines_and_interruption_is_small(
    shown: Mapping[str, Any],
) -> None:
    found = factors(shown)
    assert max(found, key=found.__getitem__) == "split"
    assert found["split"] > 1.7
    assert 1.1 < found["interruption"] < 1.25
    assert shown["falls"].first.mean < 0.6


def test_without_a_tail_there_is_nothing_to_interrupt(run: Callable[..., Any]) -> None:
    without = run(on=switched("tail"))
    assert factors(without)["interruption"] == pytest.approx(1, abs=0.01)
    assert "tail" not in factors(without)
    assert without["ratio"].mean < 1.9


def test_against_a_baseline_that_takes_turns_two_remain(run: Callable[..., Any]) -> None:
    assert run(on=switched("split"))["ratio"].mean == pytest.approx(2.0, abs=0.05)


def test_with_everything_off_asynchrony_is_slower(run: Callable[..., Any]) -> None:
    off = run(on=switched(*SWITCHES))
    assert off["ratio"].high < 1
    assert off["falls"].factors == ()


def test_the_order_decides_what_interruption_explains(run: Callable[..., Any]) -> None:
    last = run(order=SimpleNamespace(value=SWITCHES))
    first = run(order=SimpleNamespace(value=SWITCHES[::-1]))
    assert factors(last)["interruption"] == pytest.approx(1.58, abs=0.04)
    assert factors(first)["interruption"] == pytest.approx(1, abs=0.01)
    assert last["falls"].last.mean == pytest.approx(first["falls"].last.mean)


def test_the_simulation_that_is_run_now_agrees_with_the_packaged_one(
    shown: Mapping[str, Any],
) -> None:
    ratio, *_ = shown["live"]
    assert ratio.ours.mean == pytest.approx(shown["ratio"].mean, rel=0.03)


def test_misses_are_named(ran: Ran) -> None:
    text = text_of(ran[0])
    assert "miss it" in text
    assert "eta inf / eta 0 (-1" in text
    assert "32B Sync.AReaL (-" in text
