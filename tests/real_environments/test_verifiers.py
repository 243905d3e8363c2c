"""A taskset of the real verifiers: a model that a script writes, a training run, an evaluation.

Each sample has a server of tools of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from areal_lab.agents.hosting.runner import Played
from areal_lab.cli import app as cli
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import described, environment_problems
from tests.real_environments.environments import LIBRARIES
from tests.real_environments.play import (
    PACKAGES,
    calls_of,
    cases,
    check_evaluation,
    check_training,
    model_of_calls,
    play,
)

pytestmark = pytest.mark.environments
_TOOL: Final = "sums_times"
_RIGHT: Final = cases(_TOOL)["right"].script


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the tests are not installed."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))


def environment(name: str = "sums-v1", **settings: Any) -> EnvironmentConfig:
    python = str(LIBRARIES.python_of("verifiers"))
    return EnvironmentConfig(name=name, python=python, max_turns=3, **settings)


def test_a_script_gets_the_reward_of_verifiers() -> None:
    told = cases(_TOOL)
    found, models, forks = asyncio.run(
        play({name: one.script for name, one in told.items()}, environment())
    )
    for name, one in told.items():
        outcome = found[name].outcome
        reward = 0.75 * one.right + 0.25 * one.called if one.turns else math.nan
        assert outcome.reward == pytest.approx(reward, nan_ok=True), (name, outcome)
        assert len(models[name].answers) == one.turns, name
        assert outcome.status == ("ok" if one.turns else "error"), (name, outcome)
        assert found[name].truncated == (name == "calls without end"), (name, found[name])
    assert forks == {}


def test_a_judge_that_raises_is_no_reward() -> None:
    found, _, _ = asyncio.run(play({"right": _RIGHT}, environment(args={"failing": 12})))
    outcome = found["right"].outcome
    assert outcome.status == "error"
    assert math.isnan(outcome.reward)
    assert "the judge does not answer" in outcome.detail


def test_a_tool_server_that_cannot_start_is_no_reward_and_refused_if_it_is_shared() -> None:
    """Verifiers waits three minutes for each of them."""
    broken = {"tools": {"broken": True}}

    async def both() -> tuple[Played, str]:
        shared = asyncio.to_thread(described, environment("products-v1", args=broken))
        sample = play({"right": _RIGHT}, environment(args={"task": broken}))
        found, refused = await asyncio.gather(sample, shared, return_exceptions=True)
        assert not isinstance(found, BaseException), found
        assert isinstance(refused, ValueError), refused
        return found[0]["right"], str(refused)

    found, refused = asyncio.run(both())
    assert found.outcome.status == "error"
    assert math.isnan(found.outcome.reward)
    for text in (found.outcome.detail, refused):
        assert "the tables are missing" in text
        assert "\n" not in text


def test_a_tool_server_imports_from_a_relative_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGES.parent)
    monkeypatch.setenv("PYTHONPATH", PACKAGES.name)
    found, _, _ = asyncio.run(play({"right": _RIGHT}, environment()))
    assert found["right"].outcome.reward == 1.0
    assert described(environment("products-v1", args={"num_tasks": 3}))[1]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("boxed-v1", {}, "boxed-v1 needs a container for each sample, which is not served"),
        ("sums-v1", {"image": "python:3.11"}, "sums-v1 needs a container for each sample"),
        ("harbor", {}, "Harbor tasksets require the Harbor CLI"),  # which is not installed
    ],
)
def test_tasks_that_need_a_container_are_refused_in_one_line(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        described(environment(name, args=args))
    assert "\n" not in str(caught.value)


def test_tasks_are_the_same_in_another_process() -> None:
    once = environment_problems(environment(), eval_size=4, seed=1)
    described.__globals__["_asked"].cache_clear()
    assert environment_problems(environment(), eval_size=4, seed=1) == once
    assert (len(once.train), len(once.held_out)) == (8, 4)


def test_a_run_trains_each_sampled_token_once(tmp_path: Path) -> None:
    python = LIBRARIES.python_of("verifiers")
    lines = check_training(tmp_path, _TOOL, "environment=sums-v1", f"environment.python={python}")
    for line in lines:
        assert 0 <= line["environment/called"] <= 0.25
        assert line["environment/right"] == 0


def test_an_environment_is_checked_with_and_without_a_model(tmp_path: Path) -> None:
    model = model_of_calls(tmp_path, _TOOL)
    settings = [
        *("environment=sums-v1", f"environment.python={LIBRARIES.python_of('verifiers')}"),
        *("environment.max_turns=3", "rollout.threads=1", "gconfig.max_new_tokens=12"),
    ]
    command = ["environment", "check", "sums-v1", *settings, "--json"]
    result = CliRunner().invoke(cli.app, [*command, "--response", calls_of(_TOOL)[0]])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (fixed,) = found["episodes"]
    assert (found["tasks"], found["version"].startswith("0.4.")) == (12, True)
    assert (fixed["turns"], fixed["end"], fixed["rows"], fixed["forks"]) == (3, "turns", 1, {})
    assert fixed["rewards"] == {"called": 0.25, "right": 0.0}
    assert (fixed["tools"], fixed["tool_calls"]) == ([_TOOL], {_TOOL: 3})
    result = CliRunner().invoke(cli.app, [*command, "--response", "7", "--model", str(model)])
    assert result.exit_code == 0, result.output
    _, played = json.loads(result.stdout)["episodes"]
    assert played["reward"] in (0.0, 0.25)
    assert 0 < played["trained_share"] < 1


def test_a_model_is_evaluated_on_an_environment(tmp_path: Path) -> None:
    python = LIBRARIES.python_of("verifiers")
    check_evaluation(tmp_path, _TOOL, "environment=sums-v1", f"environment.python={python}")
