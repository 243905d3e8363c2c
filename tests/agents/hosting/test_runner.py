"""Runners of environments, and how they end: real processes; no sample is lost, nothing is left."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.agent import Agent
from areal_lab.agents.hosting.runner import Runners, played
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import environment_problems
from areal_lab.rewards.service import RewardError, RewardOutcome
from tests.agents.scripted import Scripted
from tests.agents.test_agent import TEMPLATE
from tests.data.byte_tokenizer import save_byte_tokenizer

STANDARD = str(Path(__file__).with_name("arithmetic_standard.py"))


def environment(**settings: Any) -> EnvironmentConfig:
    given = {"name": "own", "standard": STANDARD, "python": sys.executable, **settings}
    return EnvironmentConfig(**given)


def outcomes(*rounds: Sequence[str], **settings: Any) -> list[list[RewardOutcome]]:
    """Outcomes of tasks, those of a round at once, with one runner."""

    async def main() -> list[list[RewardOutcome]]:
        async with Runners(environment(**settings)) as runners:
            found = []
            for tasks in rounds:
                running = (runners.run(task, "none") for task in tasks)
                found.append(list(await asyncio.gather(*running)))
            return found

    return asyncio.run(main())


_OURS = "AREAL_LAB_TEST_OF_RUNNERS"


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell our processes from those of tests that run at the same time."""
    monkeypatch.setenv(_OURS, secrets.token_hex(8))


def marked() -> list[int]:
    """Processes of the runners of a test."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = Path("/proc", entry, "environ").read_bytes()
            ours = f"{_OURS}={os.environ[_OURS]}".encode() in variables
            if ours and b"AREAL_LAB_RUNNER=" in variables:
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_the_tasks_of_an_environment_are_the_problems() -> None:
    problems = environment_problems(environment(args={"tasks": 9}), eval_size=3, seed=1)
    assert (len(problems.train), len(problems.held_out)) == (6, 3)
    assert problems.train[0].as_example()["task"] == problems.train[0].key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "unknown"}, "environment: there is no environment unknown"),
        ({"name": "exits"}, "environment: its runner gave no reply"),
        ({"name": ""}, "environment.name is empty"),
        ({"python": "/none"}, "environment.python is '/none'"),
        ({"standard": "verifier"}, "must be one of verifiers, or a file"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        environment_problems(environment(**settings))
    assert "\n" not in str(caught.value)


def test_a_runner_that_cannot_start_ends_the_run() -> None:
    with pytest.raises(RewardError, match="there is no environment unknown"):
        outcomes(["1"], name="unknown")


@pytest.mark.parametrize(
    ("task", "detail"),
    [("exits", "exited with 3"), ("garbage", r"sent b'no JSON\n'")],
)
def test_a_lost_runner_costs_its_samples_and_is_started_again(task: str, detail: str) -> None:
    (lost, well) = outcomes(["waits", task], ["a"])
    assert {one.status for one in lost} == {"error"}
    assert all(detail in one.detail for one in lost)
    assert (well[0].status, well[0].reward) == ("ok", 0.5)
    assert not marked()


def test_a_killed_runner_takes_what_it_started_with_it() -> None:
    async def main() -> None:
        async with Runners(environment()) as runners:
            assert (await runners.run("leaves", "none")).status == "ok"
            assert len(marked()) == 2
            waiting = asyncio.create_task(runners.run("waits", "none"))
            await asyncio.sleep(0)
            os.kill(runners._runners[0]._child.pid, signal.SIGKILL)
            assert "SIGKILL" in (await waiting).detail
            assert not marked()

    asyncio.run(main())


def test_a_slow_sample_times_out_and_others_do_not() -> None:
    async def main() -> None:
        async with Runners(environment(timeout_s=0.5)) as runners:
            assert (await runners.run("waits", "none")).status == "timeout"
            assert not runners._runners[0].lost

    asyncio.run(main())


def test_failures_are_no_reward() -> None:
    (found,) = outcomes(["fails", "invalid", "refuses", "a"])
    assert [one.status for one in found] == ["error", "error", "error", "ok"]
    assert all(one.reward != one.reward for one in found[:3])
    assert "the judge does not answer" in found[0].detail
    assert "a sandbox was lost" in found[2].detail
    assert played({"ok": True, "reward": True}).status == "ok"
    for wrong in (None, {}, {"ok": 1}, {"ok": True, "reward": "1"}, {"ok": True}):
        assert played(wrong).status == "error"


def test_64_samples_at_once_ask_the_model_with_keys_in_their_addresses(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    async def main() -> None:
        agent = Agent(mode="environment", environment=environment())
        await agent.open(tmp_path)
        try:
            engines = [Scripted([f"{n}<end>"]) for n in range(64)]
            tasks = [
                agent.run(engine, {"task": str(n), "prompt": "?"})
                for n, engine in enumerate(engines)
            ]
            episodes = await asyncio.gather(*tasks)
        finally:
            await agent.close()
        for n, (engine, episode) in enumerate(zip(engines, episodes, strict=True)):
            assert engine.prompts == [f"{n} +"], "each with its own key"
            assert (episode.outcome.reward, episode.tokens) == (0.5, len(str(n)) + 1)

    asyncio.run(main())
    assert not marked()
