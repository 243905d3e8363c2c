"""The workflow `environment`: a model and an environment take turns."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.environments.play import Play
from areal_lab.agents.environments.protocol import Step
from areal_lab.agents.workflow import Episode, Turn
from areal_lab.data.numbered import numbered_problems
from areal_lab.data.trajectory import Observation, SampleEnd, Trajectory
from areal_lab.engines.protocol import SamplingParams
from tests.agents.scripted import Scripted
from tests.agents.test_workflows import play, trained, whole
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples

GAME = {"prompt": "Game ", "answer": "", "seed": 7}
HERE = "tests.agents.test_environments:"
NEVER = threading.Event()


class Guess:
    """Guess the seed; nearer guesses get more."""

    closed = 0

    def __init__(self, *, rewarded: bool = True) -> None:
        self._rewarded = rewarded

    def reset(self, data: Mapping[str, Any]) -> str:
        self._number = int(data["seed"])
        return "1 to 9:"

    def step(self, completion: str) -> Step:
        if not completion.strip().isdigit():
            raise ValueError(f"{completion!r} is no number")
        guess = int(completion)
        if guess == self._number:
            return Step(done=True, reward=1.0 if self._rewarded else None)
        text = "higher" if guess < self._number else "lower"
        return Step(text=text, reward=-0.25 if self._rewarded else None)

    def close(self) -> None:
        Guess.closed += 1


class Later(Guess):
    """The same, async."""

    async def reset(self, data: Mapping[str, Any]) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(data)

    async def step(self, completion: str) -> Step:  # type: ignore[override]
        return super().step(completion)


class Hangs(Guess):
    """Does not answer."""

    def step(self, completion: str) -> Step:
        NEVER.wait()
        return super().step(completion)


class Odd(Guess):
    """Gives a reward that is no number."""

    def step(self, completion: str) -> Step:
        del completion
        return Step(done=True, reward=math.nan)


def run(name: str, engine: Scripted, **keywords: Any) -> Episode:
    return play(Play(fn=HERE + name, **keywords), engine, GAME)


@pytest.mark.parametrize("name", ["Guess", "Later"])
def test_turns_and_texts_alternate_and_only_turns_are_trained_on(name: str) -> None:
    Guess.closed = 0
    engine = Scripted(["4", "9", "7"])
    episode = asyncio.run(Play(fn=HERE + name).run(engine, GAME))
    assert engine.prompts == [
        *("Game 1 to 9:", "Game 1 to 9:4\nhigher\n", "Game 1 to 9:4\nhigher\n9\nlower\n"),
    ]
    assert whole(episode) == engine.prompts[-1] + "7"
    assert trained(episode) == "497"
    assert (episode.outcome.reward, episode.end) == (0.5, "stop")
    assert episode.turns == tuple(Turn(tokens=1, reward=one) for one in (-0.25, -0.25, 1.0))
    assert not engine.scored, "the environment gives the reward"
    assert Guess.closed == 1


def test_an_environment_without_rewards_is_scored_by_the_run() -> None:
    engine = Scripted(["4", "7"], {"7": 0.75})
    workflow = Play(fn=f"{HERE}Guess", kwargs={"rewarded": False})
    episode = asyncio.run(workflow.run(engine, GAME))
    assert (episode.outcome.reward, engine.scored) == (0.75, ["7"])


def test_turns_can_have_returns_of_their_own() -> None:
    workflow = Play(fn=f"{HERE}Guess", turn_discount=0.5)
    episode = asyncio.run(workflow.run(Scripted(["4", "9", "7"]), GAME))
    (row,) = episode.rows
    assert row.turn_returns == (-0.125, 0.25, 1.0)
    trajectory = Trajectory(
        group=0, sample=0, prompt_tokens=row.prompt_tokens, parts=row.parts,
        finish_reason=episode.end, reward=episode.outcome.reward, turn_returns=row.turn_returns,
    )  # fmt: skip
    assert len(trajectory.turns) == 3


@pytest.mark.parametrize(
    ("engine", "keywords", "end", "turns"),
    [
        (Scripted(["4", "5"]), {"max_turns": 2}, "turns", 2),
        (Scripted(["4"], context_tokens=len("Game 1 to 9:4") + 8), {}, "context", 1),
        (Scripted(["4", "7"], sampling=SamplingParams(max_new_tokens=1)), {}, "stop", 2),
        (Scripted(["44", "7"], sampling=SamplingParams(max_new_tokens=1)), {}, "stop", 2),
    ],
)
def test_how_a_sample_ends(
    engine: Scripted, keywords: dict[str, Any], end: SampleEnd, turns: int
) -> None:
    episode = asyncio.run(Play(fn=f"{HERE}Guess", **keywords).run(engine, GAME))
    assert (episode.end, len(episode.turns)) == (end, turns)
    (row,) = episode.rows
    assert not isinstance(row.parts[-1], Observation)


def test_an_environment_that_fails_is_no_reward_and_is_closed() -> None:
    Guess.closed = 0
    with pytest.raises(ValueError, match="'x' is no number"):
        asyncio.run(Play(fn=f"{HERE}Guess").run(Scripted(["x"]), GAME))
    late = asyncio.run(Play(fn=f"{HERE}Hangs", timeout_s=0.2).run(Scripted(["4"]), GAME))
    assert (late.outcome.status, late.rows) == ("timeout", ())
    assert late.outcome.detail == "step of the environment took over 0.2 s"
    odd = asyncio.run(Play(fn=f"{HERE}Odd").run(Scripted(["4"]), GAME))
    assert odd.outcome.status == "error"
    assert "must be finite" in odd.outcome.detail
    assert Guess.closed == 3
    NEVER.set()
    NEVER.clear()


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"fn": f"{HERE}Nothing"}, "has no 'Nothing'"),
        ({"fn": f"{HERE}Guess", "kwargs": {"reward": 1}}, "unexpected keyword argument 'reward'"),
        ({"fn": f"{HERE}Guess", "max_turns": 0}, "max_turns is 0"),
        ({"fn": f"{HERE}Guess", "around": ""}, "must contain {text}"),
        ({"fn": f"{HERE}Guess", "turn_discount": 2}, "turn_discount is 2"),
        ({"fn": f"{HERE}Guess", "timeout_s": 0}, "timeout_s is 0"),
        ({}, "fn"),
    ],
)
def test_what_cannot_work_is_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_workflow({"name": "environment", **keywords})


def test_a_library_that_is_not_installed_is_named_with_its_command() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'areal_lab\[textarena\]'"):
        make_workflow({"name": "textarena", "game": "GuessTheNumber-v0"})


def test_numbered_problems_have_seeds() -> None:
    problems = numbered_problems(size=10, prompt_template="Game {prompt}\n", eval_size=3)
    assert [one.metadata["seed"] for one in problems.train] == list(range(7))
    assert problems.held_out[-1].prompt == "Game 9\n"
    with pytest.raises(ValueError, match=r"dataset\.size is 1"):
        numbered_problems(size=1)


class Length:
    """Wants turns of an even length."""

    def reset(self, data: Mapping[str, Any]) -> str:
        return f" {data['seed']} = "

    def step(self, completion: str) -> Step:
        return Step(text=" + 1 = ", reward=float(len(completion) % 2 == 0))


def test_a_run_trains_in_an_environment(tmp_path: Path) -> None:
    workflow = f"rollout.workflow={{name: environment, fn: '{HERE}Length', max_turns: 2}}"
    config = tiny_config(
        *(tmp_path, "total_train_steps=1", "dataset.type=numbered", "dataset.size=20", workflow),
        "reward.max_error_rate=0",
    )
    (step,) = trained_samples(do_run(config).folder)
    assert {sample["reward"] for sample in step} <= {0.0, 1.0, 2.0}
    for sample in step:
        assert sample["reward"] == sum(turn["reward"] for turn in sample["turns"])
        assert sample["prompt"].endswith(" = ")
