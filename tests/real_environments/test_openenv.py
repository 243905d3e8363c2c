"""An environment of the real openenv: scripted players, its limit of sessions, a training run."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.environments.openenv import OpenEnv
from areal_lab.agents.workflow import Episode
from benchmarks.tiny_model import write_tiny_model
from tests.agents.scripted import Scripted
from tests.pipeline.agent_runs import largest_gap
from tests.pipeline.tiny_run import checkpoints, do_run, tiny_config, trained_samples
from tests.real_environments.environments import LIBRARIES

pytestmark = pytest.mark.environments
_PACKAGES: Final = Path(__file__).with_name("packages")


@contextmanager
def serving(sessions: int) -> Iterator[str]:
    """Address of a server, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(LIBRARIES.python_of("openenv")), "-m", "guess_openenv", str(port), str(sessions)]
    variables = {**os.environ, "PYTHONPATH": str(_PACKAGES)}
    with subprocess.Popen(command, env=variables) as server:
        try:
            while server.poll() is None:
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            assert server.poll() is None, "the server did not start"
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(64) as address:
        yield address


def episode(url: str, *script: str, seed: int = 3, **settings: Any) -> tuple[Episode, Scripted]:
    engine = Scripted(script)
    given = {"name": "openenv", "url": url, "action": "guess", "timeout_s": 300.0, **settings}
    workflow = make_workflow(given)
    assert workflow is not None
    return asyncio.run(workflow.run(engine, {"prompt": "Play. ", "seed": seed})), engine


def test_scripted_players_get_the_rewards_of_openenv(url: str) -> None:
    found, engine = episode(url, "1", "a number", "3", turn_discount=1.0)
    assert engine.prompts[0] == "Play. A number from 0 to 9? "
    assert "\nwrong\n" in engine.prompts[1]
    assert "\nerror: guess: Input should be a valid integer" in engine.prompts[2]
    assert found.outcome.reward == 0.75
    assert found.rows[0].turn_returns == (0.75, 1.0, 1.0)
    assert episode(url, "1", "2", "4")[0].outcome.reward == -0.75
    assert episode(url, '{"guess": 7}', action="", seed=17)[0].outcome.reward == 1.0
    unknown, engine = episode(url, '{"guess": 7, "why": ""}', '{"guess": 3}', action="")
    assert "why: Extra inputs are not permitted" in engine.prompts[1]
    assert unknown.outcome.reward == 1.0


def test_an_error_of_the_environment_is_no_reward(url: str) -> None:
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the numbers are lost"):
        episode(url, "-1")


def test_sessions_beyond_the_limit_name_the_setting() -> None:
    async def body(address: str) -> None:
        first, second = OpenEnv(url=address), OpenEnv(url=address)
        await first.reset({"seed": 1})
        with pytest.raises(RuntimeError, match=r"began no session: .*max_concurrent_envs"):
            await second.reset({"seed": 1})
        await second.close()
        for _ in range(20):  # a session that is closed has left its room
            await first.close()
            first = OpenEnv(url=address)
            await first.reset({"seed": 1})
        await first.close()

    with serving(1) as address:
        asyncio.run(body(address))


def test_a_run_starts_its_server_and_trains_each_sampled_token_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_PACKAGES))
    command = [str(LIBRARIES.python_of("openenv")), "-m", "guess_openenv", "{port}", "64"]
    write_tiny_model(tmp_path / "model", initializer_range=0.2, words=[f"{n}\n" for n in range(10)])
    config = tiny_config(
        tmp_path,
        *("dataset.type=numbered", "dataset.size=8", "dataset.eval_size=2"),
        *('dataset.prompt_template="Play. "', "dataset.batch_size=2", "evaluation.max_problems=0"),
        *("total_train_steps=2", "save_every_steps=1", "gconfig.max_new_tokens=3"),
        f"rollout.workflow={{name: openenv, command: {command}, action: guess, max_turns: 3}}",
    )
    done = do_run(config)
    assert done.summary["status"] == "complete"
    samples = [one for step in trained_samples(done.folder) for one in step]
    seen = [(one["group"], one["sample"]) for one in samples]
    assert len(seen) == len(set(seen)) == 2 * 2 * 4
    assert {one["reward"] for one in samples} <= {-0.75, -0.5, -0.25, 0.0, 0.5, 0.75, 1.0}
    for one in samples:
        generated = sum(len(part["tokens"]) for part in one["parts"] if "logprobs" in part)
        assert generated == sum(turn["tokens"] for turn in one["turns"])
    worst = max(largest_gap(checkpoints(done.folder), one) for one in samples)
    print(f"{len(samples)} samples, log-probs differ by at most {worst:.1e}")
    assert worst < 1e-4
