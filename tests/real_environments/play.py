"""Samples of an environment with a tool, `a` times `b`: of a model that a script writes, of a run.

runner, by the Python of the library --HTTP--> gateway --> a script, or engines of a run
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from typer.testing import CliRunner

from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.hosting.runner import Played, Runners
from areal_lab.cli import app as cli
from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import described
from benchmarks.tiny_model import write_tiny_model
from tests.agents.scripted_model import Said, ScriptedModel, writing
from tests.agents.templates import chat_format
from tests.pipeline.agent_runs import TEMPLATE, largest_gap
from tests.pipeline.tiny_run import checkpoints, do_run, metrics, tiny_config, trained_samples
from tests.real_clients.lab import Script

PACKAGES: Final = Path(__file__).with_name("packages")
QUESTION: Final = "How much is 6 * 7?"


class Case(NamedTuple):
    """What the model says, and what comes of it."""

    script: Script
    right: bool
    called: bool
    turns: int


def tool_says(said: list[Said]) -> str:
    """The last result of the tool."""
    return said[-1].text.strip() if said[-1].role == "tool" else ""


def cases(tool: str) -> dict[str, Case]:
    """Scripts that use a tool of this name; the sample of the last one fails."""
    call = f'<tool_call>{{ "name": "{tool}", "arguments": {{ "b": 7,"a":6}} }}</tool_call>'

    def malformed(said: list[Said]) -> str:
        """Reads the error of the tool, then repeats the call rightly."""
        errors = [each for each in said if each.role == "tool"]
        match len(errors):
            case 0:
                return call.replace("7", '"seven"')
            case 1:
                assert "42" not in errors[0].text
                return call
        return f"It is {tool_says(said)}."

    def fails(said: list[Said]) -> NoReturn:
        raise ApiError(500, f"the engines are lost after {len(said)} messages")

    def then(text: str) -> Script:
        return lambda said: text.format(tool_says(said)) if tool_says(said) else call

    return {
        "right": Case(then("\nIt is {}."), right=True, called=True, turns=2),
        "without the tool": Case(lambda _: "It is 42.", right=True, called=False, turns=1),
        "wrong": Case(then("It is 1{}."), right=False, called=True, turns=2),
        "refuses": Case(lambda _: "I do not know.", right=False, called=False, turns=1),
        "garbage": Case(lambda _: call[:40], right=False, called=False, turns=1),
        "malformed call": Case(malformed, right=True, called=True, turns=3),
        "calls without end": Case(lambda _: call, right=False, called=True, turns=3),
        "engine fails": Case(fails, right=False, called=False, turns=0),
    }


def _refused(task_id: str) -> NoReturn:
    raise ApiError(403, f"sessions are started by the test, and not for {task_id!r}")


async def play(
    scripts: Mapping[str, Script], settings: EnvironmentConfig, *, at_once: int = 64
) -> tuple[dict[str, Played], dict[str, ScriptedModel], dict[str, int]]:
    """One sample of the question for each script; checks that each sampled token is trained once.

    Args:
        at_once: samples that run at a time.
    """
    free = asyncio.Semaphore(at_once)

    async def sample(runners: Runners, task: str, address: str) -> Played:
        async with free:
            return await runners.run(task, address)

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
                sample(runners, tasks[QUESTION], f"{url}/key/{key}/v1")
                for _, key in started.values()
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


def calls_of(tool: str) -> tuple[str, ...]:
    """Words of the tiny model: calls of the tool."""
    return tuple(
        f'<tool_call>{{"name": "{tool}", "arguments": {{ "b": {n},"a":{n + 1}}}}}</tool_call>'
        for n in range(6)
    )


def model_of_calls(folder: Path, tool: str) -> Path:
    """A tiny model that calls the tool at random, where `tiny_config` has its model."""
    model = folder / "model"
    words = calls_of(tool)
    write_tiny_model(model, initializer_range=0.2, head_size=32, words=words, context_tokens=2048)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def check_training(folder: Path, tool: str, *settings: str) -> Sequence[Mapping[str, Any]]:
    """Two steps in which each sampled token is trained once, and a call of the tool is rewarded.

    Returns the metrics of the steps.
    """
    model_of_calls(folder, tool)
    config = tiny_config(
        folder,
        "dataset.type=environment",
        *settings,
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
    rewards = {one["reward"] for one in samples}
    assert rewards == {0.0, 0.25}, rewards
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
    return metrics(done.folder)


def check_evaluation(folder: Path, tool: str, *settings: str) -> None:
    """`areal-lab eval` of three tasks, two samples each, in which only a call is rewarded."""
    out = folder / "out"
    result = CliRunner().invoke(
        cli.app,
        [
            *("eval", str(model_of_calls(folder, tool)), "verifiers", *settings),
            *("environment.max_turns=3", "rollout.threads=1", "gconfig.max_new_tokens=12"),
            *("--samples", "2", "--limit", "3", "--out", str(out)),
        ],
    )
    assert result.exit_code == 0, result.output
    found = json.loads((out / "results.json").read_text())
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert found["rewards"] == {"ok": 6}, lines
    assert len({one["problem"] for one in lines}) == 3
    for one in lines:
        assert one["reward"] == (0.25 if one["turns"] > 1 else 0.0), one
