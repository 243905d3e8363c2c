"""A taskset of the real verifiers: a model that a script writes, a training run, an evaluation.

runner, by the Python of verifiers --HTTP--> gateway --> a script, or engines of a run
        '--> harness (uv) and tool server, one of each per sample
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import pytest
from typer.testing import CliRunner

from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.hosting.runner import Played, Runners
from areal_lab.cli import app as cli
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import described, environment_problems
from benchmarks.tiny_model import write_tiny_model
from tests.agents.scripted_model import Said, ScriptedModel, writing
from tests.agents.templates import chat_format
from tests.pipeline.agent_runs import TEMPLATE, largest_gap
from tests.pipeline.tiny_run import checkpoints, do_run, metrics, tiny_config, trained_samples
from tests.real_clients.lab import Script
from tests.real_environments.environments import LIBRARIES

pytestmark = pytest.mark.environments
_PACKAGES: Final = Path(__file__).with_name("packages")
_QUESTION: Final = "How much is 6 * 7?"
_CALL: Final = '<tool_call>{ "name": "sums_times", "arguments": { "b": 7,"a":6} }</tool_call>'
CALLS: Final = tuple(
    f'<tool_call>{{"name": "sums_times", "arguments": {{ "b": {n},"a":{n + 1}}}}}</tool_call>'
    for n in range(6)
)
"""Words of the tiny model."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tool servers are started in another folder: a relative path would not be found."""
    monkeypatch.setenv("PYTHONPATH", str(_PACKAGES))


def environment(**settings: Any) -> EnvironmentConfig:
    python = str(LIBRARIES.python_of("verifiers"))
    return EnvironmentConfig(name="sums-v1", python=python, max_turns=3, **settings)


def tool_says(said: list[Said]) -> str:
    return said[-1].text.strip() if said[-1].role == "tool" else ""


def _right(said: list[Said]) -> str:
    return f"\nIt is {tool_says(said)}." if tool_says(said) else _CALL


def _wrong(said: list[Said]) -> str:
    return f"It is 1{tool_says(said)}." if tool_says(said) else _CALL


def _malformed(said: list[Said]) -> str:
    """Reads the error of the tool, then repeats the call rightly."""
    errors = [each for each in said if each.role == "tool"]
    match len(errors):
        case 0:
            return _CALL.replace("7", '"seven"')
        case 1:
            assert "42" not in errors[0].text
            return _CALL
    return f"It is {tool_says(said)}."


def _fails(said: list[Said]) -> NoReturn:
    raise ApiError(500, f"the engines are lost after {len(said)} messages")


SCRIPTS: Final[Mapping[str, tuple[Script, float, int]]] = {
    "right": (_right, 1.0, 2),
    "without the tool": (lambda _: "It is 42.", 0.75, 1),
    "wrong": (_wrong, 0.25, 2),
    "refuses": (lambda _: "I do not know.", 0.0, 1),
    "garbage": (lambda _: _CALL[:40], 0.0, 1),
    "malformed call": (_malformed, 1.0, 3),
    "calls without end": (lambda _: _CALL, 0.25, 3),
    "engine fails": (_fails, math.nan, 0),
}
"""What the model says; the reward, and the turns."""


def _refused(task_id: str) -> NoReturn:
    raise ApiError(403, f"sessions are started by the test, and not for {task_id!r}")


async def play(
    scripts: Mapping[str, Script], settings: EnvironmentConfig
) -> tuple[dict[str, Played], dict[str, ScriptedModel], dict[str, int]]:
    """One sample of the question for each script, all at once; checks that each sampled token is
    trained once."""
    tasks = {task["prompt"]: task["id"] for task in described(settings)[1]}
    form = chat_format("SMOLLM2")
    service = Service(_refused, admin_key="the-admins-key", model="policy")
    listener = bind()
    serving = asyncio.create_task(serve(service, listener))
    models = {name: ScriptedModel(writing(form, script)) for name, script in scripts.items()}
    opened = {name: model.conversation(form, session=name) for name, model in models.items()}
    started = {name: service.start_session(name, conversation=opened[name]) for name in scripts}
    try:
        async with Runners(settings) as runners:
            url = base_url(listener)
            samples = [
                runners.run(tasks[_QUESTION], f"{url}/key/{key}/v1") for _, key in started.values()
            ]
            found = dict(zip(scripts, await asyncio.gather(*samples), strict=True))
        forks: dict[str, int] = {}
        for name, (session, _) in started.items():
            if models[name].answers:
                service.set_reward(session, 1.0)
            service.end_session(session)
            await service.settled(session)
            if models[name].answers:
                exported = json.loads(json.dumps(service.export(session, style="concat")))
                models[name].check(opened[name], exported["rows"])
            forks |= opened[name].tree.forks
        return found, models, forks
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def test_a_script_gets_the_reward_of_verifiers() -> None:
    scripts = {name: script for name, (script, *_) in SCRIPTS.items()}
    found, models, forks = asyncio.run(play(scripts, environment()))
    for name, (_, reward, turns) in SCRIPTS.items():
        outcome = found[name].outcome
        assert outcome.reward == pytest.approx(reward, nan_ok=True), (name, outcome)
        assert len(models[name].answers) == turns, name
        assert outcome.status == ("error" if math.isnan(reward) else "ok"), (name, outcome)
        assert found[name].truncated == (name == "calls without end"), (name, found[name])
    assert forks == {}


def test_a_judge_that_raises_is_no_reward() -> None:
    found, _, _ = asyncio.run(play({"right": _right}, environment(args={"failing": 12})))
    outcome = found["right"].outcome
    assert outcome.status == "error"
    assert math.isnan(outcome.reward)
    assert "the judge does not answer" in outcome.detail


def test_a_tool_server_that_cannot_start_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_PACKAGES.parent)
    monkeypatch.setenv("PYTHONPATH", _PACKAGES.name)
    found, _, _ = asyncio.run(play({"right": _right}, environment()))
    outcome = found["right"].outcome
    assert outcome.status == "error"
    assert math.isnan(outcome.reward)


def test_tasks_are_the_same_in_another_process() -> None:
    once = environment_problems(environment(), eval_size=4, seed=1)
    described.__globals__["_asked"].cache_clear()
    assert environment_problems(environment(), eval_size=4, seed=1) == once
    assert (len(once.train), len(once.held_out)) == (8, 4)


def model_of_calls(folder: Path) -> Path:
    """A tiny model that calls the tool at random, where `tiny_config` has its model."""
    model = folder / "model"
    write_tiny_model(model, initializer_range=0.2, head_size=32, words=CALLS, context_tokens=2048)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def test_a_run_trains_each_sampled_token_once(tmp_path: Path) -> None:
    model_of_calls(tmp_path)
    config = tiny_config(
        tmp_path,
        "dataset.type=environment",
        "environment=sums-v1",
        f"environment.python={LIBRARIES.python_of('verifiers')}",
        "environment.max_turns=3",
        "dataset.eval_size=2",
        "dataset.batch_size=2",
        "evaluation.max_problems=0",
        "total_train_steps=2",
        "save_every_steps=1",
        "rollout.workflow={name: agent, mode: environment, tool_call_parser: hermes}",
    )
    done = do_run(config)
    assert done.summary["status"] == "complete"
    samples = [one for step in trained_samples(done.folder) for one in step]
    seen = [(one["group"], one["sample"]) for one in samples]
    assert len(seen) == len(set(seen)) == 2 * 2 * 4
    assert {one["reward"] for one in samples} == {0.0, 0.25}
    for line in metrics(done.folder):
        assert 0 <= line["environment/called"] <= 0.25
        assert line["environment/right"] == 0
    for one in samples:
        generated = [part for part in one["parts"] if "tokens" in part]
        assert all(len(part["tokens"]) == len(part["logprobs"]) for part in generated)
        tokens = sum(len(part["tokens"]) for part in generated)
        assert tokens == sum(turn["tokens"] for turn in one["turns"])
        assert "row" not in one
        assert (one["reward"] == 0.25) == (len(one["turns"]) > 1), one
    models = checkpoints(done.folder)
    worst = max(largest_gap(models, one) for one in samples)
    print(f"{len(samples)} samples, log-probs differ by at most {worst:.1e}")
    assert worst < 1e-4


def test_an_environment_is_checked_with_and_without_a_model(tmp_path: Path) -> None:
    model = model_of_calls(tmp_path)
    settings = [
        *("environment=sums-v1", f"environment.python={LIBRARIES.python_of('verifiers')}"),
        *("environment.max_turns=3", "rollout.threads=1", "gconfig.max_new_tokens=12"),
    ]
    command = ["environment", "check", "sums-v1", *settings, "--json"]
    result = CliRunner().invoke(cli.app, [*command, "--response", CALLS[0]])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (fixed,) = found["episodes"]
    assert (found["tasks"], found["version"].startswith("0.4.")) == (12, True)
    assert (fixed["turns"], fixed["end"], fixed["rows"], fixed["forks"]) == (3, "turns", 1, {})
    assert fixed["rewards"] == {"called": 0.25, "right": 0.0}
    assert sum(fixed["tool_calls"].values()) == 3
    result = CliRunner().invoke(cli.app, [*command, "--response", "7", "--model", str(model)])
    assert result.exit_code == 0, result.output
    _, played = json.loads(result.stdout)["episodes"]
    assert played["reward"] in (0.0, 0.25)
    assert 0 < played["trained_share"] < 1


def test_a_model_is_evaluated_on_an_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        cli.app,
        [
            *("eval", str(model_of_calls(tmp_path)), "verifiers", "environment=sums-v1"),
            *(f"environment.python={LIBRARIES.python_of('verifiers')}", "environment.max_turns=3"),
            *("--samples", "2", "--limit", "3", "--out", str(out), "rollout.threads=1"),
            "gconfig.max_new_tokens=12",
        ],
    )
    assert result.exit_code == 0, result.output
    found = json.loads((out / "results.json").read_text())
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert found["rewards"] == {"ok": 6}
    assert len({one["problem"] for one in lines}) == 3
    assert {one["reward"] for one in lines} <= {0.0, 0.25}
