"""A resource server of the real NeMo Gym, through the taskset `nemo_gym` of the real verifiers.

runner, by the Python of verifiers --HTTP--> resource server, by the Python of NeMo Gym
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.runners.tasks import described
from tests.agents.scripted_model import Said
from tests.environments import MissingPythonError
from tests.real_clients.lab import Script
from tests.real_environments.environments import LIBRARIES
from tests.real_environments.play import (
    PACKAGES,
    Case,
    cases,
    check_evaluation,
    check_training,
    play,
    tool_says,
)

pytestmark = pytest.mark.environments
_TOOL: Final = "times"
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_CALL: Final = cases(_TOOL)["calls without end"].script([])


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address of a resource server, and its process, until the end of the block."""
    command = [str(LIBRARIES.python_of("nemo")), "-m", "sums_nemo"]
    variables = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert address.startswith("http"), "the server did not start"
            yield address, server
        finally:
            server.kill()


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not LIBRARIES.is_ready("nemo"):
        try:
            LIBRARIES.interpreter("nemo")
        except MissingPythonError as error:  # the installation has left it out and said so
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def url(installed: None) -> Iterator[str]:
    del installed
    with serving() as (address, _):
        yield address


def rows(folder: Path, **fields: Any) -> Path:
    """Twelve rows of NeMo Gym, with further fields for the server."""
    tool = {
        "type": "function", "name": _TOOL, "description": "Product of two numbers.",
        "parameters": _PARAMETERS, "strict": True,
    }  # fmt: skip
    lines = []
    for n in range(12):
        asked = {"role": "user", "content": f"How much is {n} * {n + 1}?"}
        params = {"input": [asked], "tools": [tool]}
        row = {"responses_create_params": params, "answer": str(n * (n + 1)), **fields}
        lines.append(json.dumps(row))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


def args(url: str | None, folder: Path, **fields: Any) -> dict[str, Any]:
    task = {} if url is None else {"resources_url": url}
    return {"dataset": str(rows(folder, **fields)), "task": task}


def environment(url: str | None, folder: Path, **fields: Any) -> EnvironmentConfig:
    python = str(LIBRARIES.python_of("verifiers"))
    given = args(url, folder, **fields)
    return EnvironmentConfig(name="nemo_gym", python=python, max_turns=3, args=given)


def settings(url: str, folder: Path) -> list[str]:
    return [
        "environment=nemo_gym",
        f"environment.python={LIBRARIES.python_of('verifiers')}",
        f"environment.args={json.dumps(args(url, folder))}",
    ]


def mistakes() -> dict[str, Case]:
    """What a model does wrong: each is a sample with a reward."""

    def after(call: str) -> Script:
        """Calls, then responds rightly."""
        return lambda said: "It is 42." if said[-1].role == "tool" else call

    wrong = {
        "half a character": _CALL.replace("6", '"\\ud800"'),
        "an infinite number": _CALL.replace("6", "1e400"),
        "too few arguments": _CALL.replace(',"a":6', ""),
    }
    texts = {  # for the gateway, that is
        "unknown tool": _CALL.replace("times", "divide"),
        "a list of arguments": _CALL.replace('{ "b": 7,"a":6}', "[6, 7]"),
        "no response": "",
    }
    return {
        **{
            name: Case(after(one), right=True, called=False, turns=2) for name, one in wrong.items()
        },
        **{
            name: Case(after(one), right=False, called=False, turns=1)
            for name, one in texts.items()
        },
    }


def test_a_script_gets_the_reward_of_the_server(url: str, tmp_path: Path) -> None:
    told = {**cases(_TOOL), **mistakes()}
    found, models, forks = asyncio.run(
        play({name: one.script for name, one in told.items()}, environment(url, tmp_path))
    )
    for name, one in told.items():
        outcome = found[name].outcome
        reward = 0.75 * one.right + 0.25 * one.called if one.turns else math.nan
        assert outcome.reward == pytest.approx(reward, nan_ok=True), (name, outcome)
        assert len(models[name].answers) == one.turns, name
        assert outcome.status == ("ok" if one.turns else "error"), (name, outcome)
        assert found[name].truncated == (name == "calls without end"), (name, found[name])
        if one.turns:
            assert found[name].metrics == {"right": one.right, "called": one.called}, name
    assert forks == {}


def test_a_grader_that_fails_on_a_response_is_no_reward(url: str, tmp_path: Path) -> None:
    scripts: dict[str, Script] = {"text": lambda _: "It is 42.", "none": lambda _: ""}
    found, _, _ = asyncio.run(play(scripts, environment(url, tmp_path, careless=True)))
    assert found["text"].outcome.reward == 0.75
    assert found["none"].outcome.status == "error"
    assert "500 Internal Server Error" in found["none"].outcome.detail


def test_a_server_that_dies_is_no_reward(tmp_path: Path) -> None:
    with serving() as (address, server):

        def dies(said: list[Said]) -> str:
            if not tool_says(said):
                return _CALL
            server.kill()
            server.wait()
            return "It is 42."

        scripts: dict[str, Script] = {"dies": dies, "dead": lambda _: "It is 42."}
        found, models, _ = asyncio.run(play(scripts, environment(address, tmp_path), at_once=1))
    assert [len(models[name].answers) for name in scripts] == [2, 0]
    for name in scripts:
        outcome = found[name].outcome
        assert outcome.status == "error"
        assert math.isnan(outcome.reward)
        assert "ConnectError" in outcome.detail
        assert "\n" not in outcome.detail


def test_no_address_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resources-url") as caught:
        described(environment(None, tmp_path))
    assert "\n" not in str(caught.value)


def test_a_run_trains_each_sampled_token_once(url: str, tmp_path: Path) -> None:
    for line in check_training(tmp_path, _TOOL, *settings(url, tmp_path)):
        assert 0 <= line["environment/called"] <= 1
        assert line["environment/right"] == 0


def test_a_model_is_evaluated_on_the_server(url: str, tmp_path: Path) -> None:
    check_evaluation(tmp_path, _TOOL, *settings(url, tmp_path))
