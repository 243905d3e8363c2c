"""Runners of environments, and how they end: real processes; no sample is lost, nothing is left."""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import areal_lab.agents.hosting.runner as runner_module
import areal_lab.data.runners.tasks as tasks_module
from areal_lab.agents.agent import Agent
from areal_lab.agents.hosting.runner import Runners, played
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import environment_problems
from areal_lab.rewards.service import RewardError, RewardOutcome
from benchmarks.tiny_model import write_tiny_model
from tests.agents.scripted import Scripted
from tests.agents.test_agent import TEMPLATE
from tests.data.byte_tokenizer import save_byte_tokenizer
from tests.pipeline.tiny_run import do_run, metrics, tiny_config, trained_samples

FAILING = ("fails", "invalid", "refuses")
STANDARD = str(Path(__file__).with_name("arithmetic_standard.py"))


def environment(**settings: Any) -> EnvironmentConfig:
    given = {"name": "own", "standard": STANDARD, "python": sys.executable, **settings}
    return EnvironmentConfig(**given)


def outcomes(*rounds: Sequence[str], **settings: Any) -> list[list[RewardOutcome]]:
    """Outcomes of tasks, those of a round at once."""

    async def main() -> list[list[RewardOutcome]]:
        async with Runners(environment(**settings)) as runners:
            found = []
            for tasks in rounds:
                played = await asyncio.gather(*(runners.run(task, "none") for task in tasks))
                found.append([one.outcome for one in played])
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
        ({"args": {"fault": "exits", "at": "hello"}}, "gave no reply.*it said: something about it"),
        ({"args": {"fault": "exits", "at": "list"}}, "gave no reply.*it said: something about it"),
        ({"args": {"fault": "garbage", "at": "list"}}, r"gave no reply \(to the list .*no JSON"),
        ({"args": {"fault": "raises", "at": "list"}}, "environment: of the environment"),
        ({"args": {"tasks": 0}}, "environment own has 0 different problems"),
        ({"name": ""}, "environment.name is empty"),
        ({"python": "/none"}, "environment.python is '/none'"),
        ({"standard": "verifier"}, "must be one of inspect, verifiers, or a file"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        environment_problems(environment(**settings))
    assert "\n" not in str(caught.value)
    assert not marked()


@pytest.mark.parametrize(
    ("standard", "found", "wanted"),
    [
        ("inspect", "inspect_ai-0.3.28", "inspect-ai>=0.3.280,<0.3.290 and openai"),
        ("verifiers", "verifiers-0.1.10", "verifiers>=0.4,<0.5"),
    ],
)
def test_another_generation_of_a_library_is_refused(
    standard: str, found: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = environment(standard=standard)
    with pytest.raises(ValueError, match=f"this Python has no .*; install {wanted}"):
        environment_problems(settings)
    name, version = found.split("-")
    (tmp_path / f"{found}.dist-info").mkdir()
    (tmp_path / f"{found}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tasks_module._asked.cache_clear()
    with pytest.raises(ValueError, match=f"{version} is of another generation; install {wanted}"):
        environment_problems(settings)


def test_a_runner_that_is_asked_for_tasks_ends_with_the_process_that_asks(tmp_path: Path) -> None:
    told, standard = tmp_path / "told", tmp_path / "hangs.py"
    os.mkfifo(told)
    standard.write_text(
        "import os, threading\n\n\nclass Standard:\n    def __init__(self, name, args):\n"
        "        with open(name, 'w') as file:\n            file.write(str(os.getpid()))\n"
        "        threading.Event().wait()\n"
    )
    program = (
        "from areal_lab.config.sections import EnvironmentConfig\n"
        "from areal_lab.data.runners.tasks import described\n"
        f"settings = {{'standard': {str(standard)!r}, 'python': {sys.executable!r}}}\n"
        f"described(EnvironmentConfig(name={str(told)!r}, **settings))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as asking:
        runner = os.pidfd_open(int(told.read_text()))
        asking.kill()
    assert select.select([runner], [], [], 60)[0], "the runner has not ended"
    os.close(runner)


def test_a_relative_search_path_holds_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "tools_of_test.py").write_text("print('found')\n")
    standard = tmp_path / "elsewhere.py"
    standard.write_text(
        "import subprocess, sys\n\n\nclass Standard:\n    version = '1'\n\n"
        "    def __init__(self, name, args):\n        pass\n\n    def tasks(self):\n"
        "        command = [sys.executable, '-m', 'tools_of_test']\n"
        "        said = subprocess.check_output(command, cwd='/', text=True)\n"
        "        return [{'id': said.strip()}]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "packages")
    settings = environment(standard=str(standard))
    assert tasks_module.described(settings) == ("1", [{"id": "found"}])


@pytest.mark.parametrize("at", ["hello", "list"])
def test_a_runner_that_hangs_before_its_tasks_are_known_is_refused(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "START_TIMEOUT_S", 0.2)
    with pytest.raises(ValueError, match=r"gave no reply.*timed out"):
        environment_problems(environment(args={"fault": "hangs", "at": at}))
    assert not marked()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "unknown"}, "there is no environment unknown"),
        ({"args": {"fault": "exits", "at": "hello"}}, "exited with 3; it said: something about it"),
        ({"args": {"fault": "garbage", "at": "hello"}}, r"sent b'no JSON\\n', which is no reply"),
    ],
)
def test_a_runner_that_cannot_start_ends_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        outcomes(["1"], **settings)
    assert "\n" not in str(caught.value)
    assert not marked()


def test_a_runner_that_hangs_at_its_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "START_TIMEOUT_S", 0.2)
    with pytest.raises(RewardError, match="did not load the environment in"):
        outcomes(["1"], args={"fault": "hangs", "at": "hello"})
    assert not marked()


@pytest.mark.parametrize(
    ("fault", "detail"),
    [("exits", "exited with 3"), ("forks", "exited with 3"), ("garbage", r"sent b'no JSON\n'")],
)
def test_a_lost_runner_costs_its_samples_and_is_started_again(fault: str, detail: str) -> None:
    args = {"fault": fault, "at": "run", "every": 2}
    (lost, well) = outcomes(["waits", "a"], ["a"], args=args, timeout_s=30.0)
    assert {one.status for one in lost} == {"error"}
    assert all(detail in one.detail and "\n" not in one.detail for one in lost)
    assert (well[0].status, well[0].reward) == ("ok", 0.5)
    assert not marked()


def test_a_killed_runner_takes_what_it_started_with_it() -> None:
    async def main() -> None:
        async with Runners(environment()) as runners:
            assert (await runners.run("leaves", "none")).outcome.status == "ok"
            assert len(marked()) == 2
            waiting = asyncio.create_task(runners.run("waits", "none"))
            await asyncio.sleep(0)
            child = runners._runners[0]._child
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
            assert "SIGKILL" in (await waiting).outcome.detail
            assert not marked()

    asyncio.run(main())


def test_a_slow_sample_times_out_and_others_do_not() -> None:
    async def main() -> None:
        async with Runners(environment(timeout_s=0.5)) as runners:
            assert (await runners.run("waits", "none")).outcome.status == "timeout"
            assert not runners._runners[0].lost

    asyncio.run(main())
    assert not marked()


def test_a_sample_that_nobody_needs_is_canceled() -> None:
    async def main() -> None:
        async with Runners(environment(args={"fault": "exits", "at": "cancel"})) as runners:
            waiting = asyncio.create_task(runners.run("waits", "none"))
            other = asyncio.create_task(runners.run("waits", "none"))
            await runners.run("a", "none")  # which begins after them
            waiting.cancel()
            assert (await other).outcome.status == "error", "which the cancellation has ended"
            assert waiting.cancelled()

    asyncio.run(main())
    assert not marked()


def test_a_runner_that_hangs_is_killed_after_the_timeout_of_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "CANCEL_GRACE_S", 0.2)
    args = {"fault": "hangs", "at": "run", "every": 2}
    (lost,) = outcomes(["waits", "a"], args=args, timeout_s=0.5)
    assert {one.status for one in lost} == {"timeout"}
    assert not marked()


@pytest.mark.parametrize("fault", ["exits", "hangs", "garbage", "raises"])
def test_a_runner_ends_whatever_it_does_at_the_end(fault: str) -> None:
    assert outcomes(["a"], args={"fault": fault, "at": "close"})[0][0].status == "ok"
    assert not marked()


def test_failures_are_no_reward() -> None:
    (found,) = outcomes(["fails", "invalid", "refuses", "a"])
    assert [one.status for one in found] == ["error", "error", "error", "ok"]
    assert all(one.reward != one.reward for one in found[:3])
    assert "the judge does not answer" in found[0].detail
    assert "a sandbox was lost" in found[2].detail


def test_a_reward_is_a_finite_number() -> None:
    assert played({"ok": True, "reward": True}).outcome.reward == 1.0
    limited = played({"ok": True, "reward": 0, "truncated": True, "metrics": {"a": 1, "b": "x"}})
    assert (limited.truncated, limited.metrics) == (True, {"a": 1.0})
    wrong = [None, {}, {"ok": 1}, {"ok": True}, {"ok": True, "reward": 1, "rewards": {"a": None}}]
    wrong += [{"ok": True, "reward": reward} for reward in ("1", None, float("inf"), 10**400)]
    for value in wrong:
        assert played(value).outcome.status == "error"


def test_64_samples_at_once_with_lost_runners_end_once() -> None:
    tasks = [f"{one}{n}" if one == "a" else one for n in range(16) for one in ("a", *FAILING)]
    args = {"fault": "exits", "at": "run", "every": 20}
    (found, well) = outcomes(tasks, ["a", "a"], args=args, workers=2)
    assert len(found) == len(tasks) == 64
    assert all(one.reward == 0.5 for one in found if one.status == "ok")
    assert {one.status for one in found} <= {"ok", "error"}
    assert sum("exited with 3" in one.detail for one in found) >= 2 * (64 // 2 - 19)
    assert [one.status for one in well] == ["ok", "ok"]
    assert not marked()


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


def test_a_run_whose_runners_end_trains_each_sample_once(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", initializer_range=0.2)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    config = tiny_config(
        tmp_path,
        "dataset.type=environment",
        *("environment.name=own", f"environment.standard={STANDARD}"),
        *(f"environment.python={sys.executable}", "environment.workers=2"),
        "environment.args={fault: exits, at: run, every: 11}",
        "rollout.workflow={name: agent, mode: environment, tool_call_parser: none}",
        *("dataset.eval_size=2", "evaluation.max_problems=0", "reward.max_error_rate=1.0"),
        *("total_train_steps=3", "rollout.max_concurrent_rollouts=2"),
    )
    ended = do_run(config)
    assert ended.summary["status"] == "complete"
    steps = trained_samples(ended.folder)
    seen = [(sample["group"], sample["sample"]) for step in steps for sample in step]
    assert len(seen) == len(set(seen)) == 3 * 3 * 4
    assert {sample["reward"] for step in steps for sample in step} == {0.5}
    measured = {"environment/half": 0.5, "environment/lines_read": 2.0}
    assert all(line.items() >= measured.items() for line in metrics(ended.folder))
    assert ended.summary["environment"] == measured
    assert not marked()
