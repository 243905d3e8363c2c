"""A task of the real inspect-ai: a model that a script writes, faults, a training run."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import Any, Final

import pytest

from areal_lab.agents.hosting.runner import Runners
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import described, environment_problems
from tests.real_clients.lab import Script
from tests.real_environments.environments import LIBRARIES
from tests.real_environments.play import PACKAGES, cases, check_evaluation, check_training, play

pytestmark = pytest.mark.environments
_TOOL: Final = "times"
_FILE: Final = PACKAGES / "inspect_sums" / "tasks.py"
_RIGHT: Final = cases(_TOOL)["right"].script


def environment(task: str = "sums", **settings: Any) -> EnvironmentConfig:
    python = str(LIBRARIES.python_of("inspect"))
    return EnvironmentConfig(
        name=f"{_FILE}@{task}", standard="inspect", python=python, max_turns=3, **settings
    )


def test_a_script_gets_the_reward_of_inspect() -> None:
    told = cases(_TOOL)
    found, models, forks = asyncio.run(
        play({name: one.script for name, one in told.items()}, environment())
    )
    for name, one in told.items():
        outcome = found[name].outcome
        assert len(models[name].answers) == one.turns, name
        if not one.turns:
            assert outcome.status == "error", (name, outcome)
            assert "engines are lost" in outcome.detail
            continue
        assert outcome.rewards == {"right": one.right, "called.share": 0.25 * one.called}, name
        assert outcome.reward == sum(outcome.rewards.values())
        assert found[name].truncated == (name == "calls without end"), (name, found[name])
    assert forks == {}


def test_64_samples_at_once_ask_the_model_with_their_own_keys() -> None:
    """`play` checks that each has sampled what is exported of its key."""
    scripts = {str(n): _RIGHT if n % 2 else (lambda _: "It is 0.") for n in range(64)}
    found, models, _ = asyncio.run(play(scripts, environment()))
    assert all(one.outcome.reward == 1.25 * (int(n) % 2) for n, one in found.items())
    assert all(len(one.answers) == 1 + int(n) % 2 for n, one in models.items())


def test_a_cached_reply_is_not_that_of_another_sample() -> None:
    scripts: dict[str, Script] = {"42": lambda _: "It is 42.", "0": lambda _: "It is 0."}
    found, models, _ = asyncio.run(play(scripts, environment(), at_once=1))
    assert [one.outcome.reward for one in found.values()] == [1.0, 0.0]
    assert all(len(one.answers) == 1 for one in models.values())


def test_what_cannot_be_scored_is_no_reward() -> None:
    faults = {
        "raise": "the judge does not answer",
        "ask the model": "a scorer calls the model that is trained",
        "fail": "scoring_failed: no file",
        "no score": "nan, but must be a finite number",
        "text": "gave 'about half', which is no number",
    }
    scripts: dict[str, Script] = {name: (lambda _, name=name: name) for name in faults}
    found, models, _ = asyncio.run(play({**scripts, "right": _RIGHT}, environment()))
    for name, detail in faults.items():
        assert found[name].outcome.status == "error", name
        assert math.isnan(found[name].outcome.reward)
        assert detail in found[name].outcome.detail
        assert len(models[name].answers) == 1, name
    assert found["right"].outcome.reward == 1.25


def test_an_evaluation_that_ends_is_no_reward() -> None:

    async def main() -> None:
        async with Runners(environment("costly")) as runners:
            for _ in range(2):
                outcome = (await runners.run("one", "none")).outcome
                assert outcome.status == "error"
                assert "cost" in outcome.detail

    asyncio.run(main())


def test_an_evaluation_that_ended_is_started_again(tmp_path: Path) -> None:
    """Samples that ran in it have no reward; the next one has."""

    async def main() -> None:
        async with Runners(environment("ending", args={"file": str(tmp_path / "file")})) as runners:
            lost = await asyncio.gather(*(runners.run(task, "none") for task in ("waits", "ends")))
            for one in lost:
                assert one.outcome.status == "error"
                assert "evaluation of inspect-ai has ended" in one.outcome.detail
            for task in ("ends", "waits"):
                assert (await runners.run(task, "none")).outcome.status == "ok"

    asyncio.run(main())


def test_a_sample_that_is_canceled_ends_alone(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def main() -> None:
        async with Runners(environment("waiting", args={"fifo": str(fifo)})) as runners:
            waiting = asyncio.create_task(runners.run("waits", "none"))
            with await asyncio.to_thread(fifo.open) as file:
                assert await asyncio.to_thread(file.readline) == "waits\n"
                waiting.cancel()
                assert await asyncio.to_thread(file.readline) == "ended\n"
            assert (await runners.run("ends", "none")).outcome.status == "ok"

    asyncio.run(main())


def test_tasks_are_the_same_in_another_process() -> None:
    settings = environment(args={"shuffled": True})
    once = environment_problems(settings, eval_size=4, seed=1)
    described.__globals__["_asked"].cache_clear()
    assert environment_problems(settings, eval_size=4, seed=1) == once
    assert (len(once.train), len(once.held_out)) == (8, 4)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("sums", "has no argument num_task, only first, num_tasks, shuffled"),
        ("boxed", "runs code in a sandbox, which is not served"),
        ("unscored", "must have a scorer and a dataset"),
        ("other", "Task named 'other' not found"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(task: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        described(environment(task, args={"num_task": 3} if task == "sums" else {}))
    assert "\n" not in str(caught.value)


def of_task() -> tuple[str, ...]:
    """Settings of the task, whose products are not guessed at random."""
    settings = environment()
    return (
        "environment.standard=inspect",
        f"environment={settings.name}",
        f"environment.python={settings.python}",
        "environment.args={first: 90}",
    )


def test_a_run_trains_each_sampled_token_once(tmp_path: Path) -> None:
    check_training(tmp_path, _TOOL, *of_task())


def test_a_model_is_evaluated_on_a_task(tmp_path: Path) -> None:
    check_evaluation(tmp_path, _TOOL, *of_task())
