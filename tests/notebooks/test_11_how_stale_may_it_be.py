"""Notebook 11: one bound on drift against one eta, the schedule's runs, advice for a log."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lab.control.schedule import MAX_DRIFT
from reproductions.learning.equal_hours import BOUNDS_OF_DRIFT, by_bound, by_eta, shared_etas

NAME = "11_how_stale_may_it_be"
Ran = tuple[tuple[Any, ...], Mapping[str, Any]]


@pytest.fixture(scope="module")
def shown(notebook: Callable[[str], Ran]) -> Mapping[str, Any]:
    return notebook(NAME)[1]


def run(**controls: Any) -> Ran:
    ran: Ran = importlib.import_module(f"notebooks.{NAME}").app.run(defs=controls)
    return ran


def text_of(ran: Ran) -> str:
    shown = " ".join(str(getattr(one, "text", "")) for one in ran[0])
    return " ".join(shown.split())


def bound(value: float) -> SimpleNamespace:
    return SimpleNamespace(value=value)


def test_it_begins_where_one_bound_is_better_than_every_single_eta(
    shown: Mapping[str, Any],
) -> None:
    settings = shown["settings"]
    assert [one.name for one in settings] == [
        *("addition, 1e-4", "addition, 3e-4", "sorting, 1e-4", "sorting, 3e-4")
    ]
    assert len(set(shown["chosen"].chosen)) >= 3
    assert shown["gain"].low > 0
    costs = [by_eta(settings, eta).regret for eta in shared_etas(settings)]
    assert len(costs) == 7
    assert shown["chosen"].regret < 0.6 * min(costs)
    assert "is better than η = 1 everywhere" in text_of(run(bound=bound(MAX_DRIFT)))


def test_a_small_bound_is_synchronous_and_a_large_one_is_worse(shown: Mapping[str, Any]) -> None:
    careful, bold = run(bound=bound(0.02))[1], run(bound=bound(0.5))[1]
    assert set(careful["chosen"].chosen) == {"0"}
    assert careful["chosen"].speed == pytest.approx(1)
    assert careful["chosen"].reward == careful["synchronous"].reward
    assert bold["chosen"].speed > shown["chosen"].speed
    assert bold["gain"].high < 0
    assert shown["chosen"].reward - careful["chosen"].reward == pytest.approx(0.05, abs=0.005)
    assert bold["chosen"].chosen[-1] == "16"
    assert bold["chosen"].reward < bold["synchronous"].reward


def test_the_best_bound_of_naive_ppo_is_lower(shown: Mapping[str, Any]) -> None:
    def best(settings: Any) -> float:
        return min(BOUNDS_OF_DRIFT, key=lambda value: by_bound(settings, value).regret)

    naive = run(objective=SimpleNamespace(value="naive"))[1]
    assert best(naive["settings"]) < best(shown["settings"])


def test_the_runs_of_the_schedule_are_told_with_their_seeds(shown: Mapping[str, Any]) -> None:
    cells = [cell.name for cell in shown["evidence"].cells]
    assert [one["task, rate"] for one in shown["answers"]] == cells
    told = text_of(run())
    for one in shown["answers"]:
        assert one["schedule minus it"] in told
        assert f"{one['steps within, bounded drift']}, {one['steps within, eta 4']}" in told
    assert "the same eta for all cells" in told


def test_advice_for_a_log(shown: Mapping[str, Any]) -> None:
    assert shown["advice"].hurts
    assert shown["advice"].permitted_lag < 8
    values = {"logged_drift": 0.02, "logged_lag": 8, "minibatches": 4}
    fine = run(**{name: SimpleNamespace(value=value) for name, value in values.items()})
    assert not fine[1]["advice"].hurts
    assert "is within the bound" in text_of(fine)


def test_without_runs_of_the_schedule_the_page_says_so(shown: Mapping[str, Any]) -> None:
    empty = SimpleNamespace(data={"tasks": {}}, origin="nobody")
    found = run(study=empty, mapped=shown["mapped"])
    assert "No run of the schedule is packaged" in text_of(found)
    assert found[1]["chosen"] == shown["chosen"]
