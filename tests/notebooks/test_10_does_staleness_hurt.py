"""Notebook 10: what staleness costs and pays, what predicts it, and a button that trains."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from reproductions.learning.compare import minus
from reproductions.learning.runs import Run
from reproductions.learning.setting import settings_of
from tests.reproductions.planted import grid

NAME = "10_does_staleness_hurt"
Ran = tuple[tuple[Any, ...], Mapping[str, Any]]


@pytest.fixture(scope="module")
def ran(notebook: Callable[[str], Ran]) -> Ran:
    return notebook(NAME)


@pytest.fixture(scope="module")
def shown(ran: Ran) -> Mapping[str, Any]:
    return ran[1]


def run(**controls: Any) -> Ran:
    ran: Ran = importlib.import_module(f"notebooks.{NAME}").app.run(defs=controls)
    return ran


def text_of(ran: Ran) -> str:
    shown = " ".join(str(getattr(one, "text", "")) for one in ran[0])
    return " ".join(shown.split())


# --- the packaged runs ---------------------------------------------------------------------------


def test_it_begins_where_steps_cost_and_hours_pay(shown: Mapping[str, Any]) -> None:
    assert shown["eta"] == "8"
    assert shown["setting"].value.name == "addition, 3e-4"
    assert shown["losses"]["naive"].high < 0
    assert shown["losses"]["decoupled"].mean < 0
    assert shown["gains"]["decoupled"].low > 1
    # In the hours of the asynchronous run the synchronous one does a third of its steps.
    assert shown["hours"] < 0.4 * shown["curves"]["synchronous"][1].hours
    assert shown["then"]["decoupled"].mean > shown["then"]["synchronous"].mean


def test_naive_ppo_pays_most_of_it_back(shown: Mapping[str, Any]) -> None:
    losses, gains, then = (shown[name] for name in ("losses", "gains", "then"))
    assert losses["naive"].mean < 1.4 * losses["decoupled"].mean
    assert gains["naive"].mean < gains["decoupled"].mean
    ahead = {name: then[name].mean - then["synchronous"].mean for name in ("naive", "decoupled")}
    assert ahead["naive"] < 0.5 * ahead["decoupled"]


def test_drift_predicts_the_loss_and_lag_does_not(shown: Mapping[str, Any]) -> None:
    drift, lag = shown["correlations"]
    assert drift > 0.75
    assert lag < drift - 0.25


def test_from_eta_2_on_more_staleness_gains_no_hours(shown: Mapping[str, Any]) -> None:
    found = run(bound=SimpleNamespace(value="2"))[1]
    assert found["hours"] == pytest.approx(shown["hours"], rel=0.02)
    assert found["losses"]["naive"].mean > shown["losses"]["naive"].mean


def test_without_a_bound_the_lag_is_several_times_larger_and_the_loss_is_not(
    shown: Mapping[str, Any],
) -> None:
    found = run(bound=SimpleNamespace(value="inf"))[1]
    cells = {(one.setting, one.eta, one.objective): one for one in shown["cells"]}
    bounded, unbounded = (cells["addition, 3e-4", eta, "naive"] for eta in ("8", "inf"))
    assert unbounded.lag > 4 * bounded.lag
    assert unbounded.drift < 1.3 * bounded.drift
    assert found["losses"]["naive"].mean > shown["losses"]["naive"].mean - 0.02


def test_every_packaged_setting_can_be_chosen(shown: Mapping[str, Any]) -> None:
    for setting in shown["settings"]:
        found = run(setting=SimpleNamespace(value=setting))[1]
        assert ("losses" in found) == ("8" in setting.bounds)


def test_nothing_trains_unasked(shown: Mapping[str, Any]) -> None:
    assert "own" not in shown
    assert shown["get_runs"]() == []


# --- planted runs --------------------------------------------------------------------------------


def planted(tasks: Mapping[str, Any], **controls: Any) -> Ran:
    """The notebook with other runs than the packaged ones."""
    return run(saved=SimpleNamespace(data={"tasks": tasks}, origin="planted"), **controls)


def reward(eta: str, objective: str) -> float:
    if eta == "0":
        return 0.8
    return 0.6 if objective == "naive" else 0.75


def test_it_says_what_the_runs_say() -> None:
    found = planted({"addition": grid(reward)})
    assert "costs both objectives" in text_of(found)
    assert "pays for the decoupled objective" in text_of(found)
    naive = found[1]["losses"]["naive"]
    assert naive.mean == pytest.approx(-0.2, abs=0.01)
    (setting,) = settings_of({"tasks": {"addition": grid(reward)}})
    assert naive == minus(setting.of("naive", "8"), setting.of("naive", "0"))
    without = planted({"addition": grid(lambda *_: 0.8)})
    assert "costs neither objective" in text_of(without)


def test_a_single_seed_and_other_tasks_and_rates_will_do() -> None:
    runs = {"sorting": grid(reward, seeds=(4,), staleness=("0", "4"), rate="1e-4")}
    found = planted(runs)
    assert found[1]["eta"] == "4"
    assert "one seed" in text_of(found)
    assert "costs neither objective beyond chance" in text_of(found)


def test_an_eta_that_a_setting_lacks_is_told() -> None:
    tasks = {
        "addition": grid(reward, staleness=("0", "4")),
        "sorting": grid(reward, staleness=("0", "8")),
    }
    found = planted(tasks)
    assert "losses" not in found[1]
    assert "No runs of addition, 1e-4 with η = 8" in text_of(found)


def test_a_run_that_learned_nothing_gained_no_hours() -> None:
    found = planted({"addition": grid(lambda eta, _: 0.8 if eta == "0" else 0.45)})
    assert found[1]["gains"]["naive"].mean == 0


# --- a run of your own ---------------------------------------------------------------------------


def test_the_button_trains_and_its_line_is_drawn() -> None:
    kept: list[Run] = []
    controls = {
        "steps": SimpleNamespace(value=2),
        "own_eta": SimpleNamespace(value="inf"),
        "start": SimpleNamespace(value=True),
        "get_runs": lambda: kept,
        "set_runs": lambda change: kept.extend(change([])),
    }
    own = run(**controls)[1]["own"]
    assert kept == [own]
    assert [step for step, _, _ in own.curve] == [0, 2]
    assert (own.steps, own.seed, own.choice["objective"]) == (2, 1, "naive")
    assert own.before == own.curve[0][2] == pytest.approx(0.5, abs=0.06)
    del controls["start"], controls["steps"]
    drawn = run(start=SimpleNamespace(value=False), **controls)
    assert "Yours: naive PPO, η = inf, learning rate 3e-4, seed 1" in text_of(drawn)


@pytest.mark.slow
def test_at_a_high_rate_naive_ppo_forgets_and_the_synchronous_run_does_not() -> None:
    controls = {
        "rate": SimpleNamespace(value="1e-3"),
        "steps": SimpleNamespace(value=30),
        "start": SimpleNamespace(value=True),
    }
    stale, fresh = (
        run(own_eta=SimpleNamespace(value=eta), **controls)[1]["own"] for eta in ("8", "0")
    )
    assert stale.curve[-1][2] < 0.1
    assert stale.drift > 1
    assert fresh.curve[-1][2] > 0.4
    assert fresh.drift < 0.2


def test_the_calls_beside_the_formulas_have_the_arguments_of_the_functions() -> None:
    from areal_lab.functional import decoupled_ppo, ppo

    source = inspect.getsource(importlib.import_module(f"notebooks.{NAME}"))
    for function in (decoupled_ppo, ppo):
        (given,) = re.findall(rf"    {function.__name__}\(\s*(logprobs[^)]*?)\s*\)", source)
        taken = [
            name
            for name, one in inspect.signature(function).parameters.items()
            if one.kind is not one.KEYWORD_ONLY
        ]
        assert len(given.split(", ")) == len(taken)
        assert given.split(", ")[-2:] == taken[-2:]
