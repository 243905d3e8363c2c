"""The workflow `environment`: a model and an environment take turns."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.environments.play import Play
from areal_lab.agents.environments.protocol import Step
from areal_lab.agents.workflow import Episode
from areal_lab.config.load import load_config
from areal_lab.data.problems import numbered_problems
from areal_lab.data.sources import load_problems
from areal_lab.data.trajectory import Observation, SampleEnd, Trajectory, Turn
from areal_lab.engines.protocol import Generated, SamplingParams
from areal_lab.pipeline.rollout.groups import RewardUnit
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


class Silent(Guess):
    """Tells nothing."""

    def step(self, completion: str) -> Step:
        del completion
        return Step()


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


class Broken(Guess):
    """Cannot be closed."""

    def close(self) -> None:
        raise OSError("the port is taken")


class Lingers(Guess):
    """Does not close."""

    def close(self) -> None:
        NEVER.wait()


class Odd(Guess):
    """Gives a reward that is no number."""

    def step(self, completion: str) -> Step:
        del completion
        return Step(done=True, reward=math.nan)


@dataclass
class Aborted(Scripted):
    """Its engine is lost before a turn."""

    aborts: int = 0

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        turn = await super().turn(prompt_tokens, sampling)
        if len(self.prompts) <= self.aborts:
            return turn
        return replace(turn, segments=(), finish_reason="abort")


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
    episode = run("Guess", engine, kwargs={"rewarded": False}, scored=True)
    assert (episode.outcome.reward, engine.scored) == (0.75, ["7"])
    assert [turn.reward for turn in episode.turns] == [None, 0.75]


def test_the_run_scores_only_where_that_was_asked_for() -> None:
    """A gold answer is that of the data set, which may be empty, and so match an empty line."""
    engine = Scripted(["4", "7"], {"7": 0.75})
    episode = run("Guess", engine, kwargs={"rewarded": False})
    assert (episode.outcome.status, engine.scored) == ("error", [])
    assert "no step gave a reward; give Step a reward, or write scored: true" in (
        episode.outcome.detail
    )
    both = run("Guess", engine := Scripted(["7"]), scored=True)
    assert (both.outcome.status, engine.scored) == ("error", [])
    assert "a step gave a reward, but with scored: true" in both.outcome.detail


@pytest.mark.parametrize("discount", [None, 0.5])
@pytest.mark.parametrize("keywords", [{}, {"unfinished_reward": -1.0}])
def test_a_sample_that_ended_before_a_reward_has_that_of_unfinished_ones(
    keywords: dict[str, Any], discount: float | None
) -> None:
    engine = Scripted(["4", "\nhello"], {"\nhello": 1.0})
    episode = run("Silent", engine, max_turns=2, turn_discount=discount, **keywords)
    reward = keywords.get("unfinished_reward", 0.0)
    assert (episode.outcome.reward, episode.end, engine.scored) == (reward, "turns", [])
    assert [turn.reward for turn in episode.turns] == [None, reward]
    returns = () if discount is None else (0.5 * reward, reward)
    assert episode.rows[0].turn_returns == returns


def test_samples_of_a_run_with_a_discount_all_have_returns() -> None:
    compared = RewardUnit()
    unrewarded: dict[str, Any] = {"kwargs": {"rewarded": False}, "scored": True}
    for name, script, keywords in (
        ("Guess", ["4", "9", "7"], {}),
        ("Silent", ["4", "5"], {"max_turns": 2}),
        ("Guess", ["4", "7"], unrewarded),
    ):
        engine = Scripted(script, {"7": 1.0})
        episode = run(name, engine, turn_discount=0.5, **keywords)
        assert len(episode.rows[0].turn_returns) == len(script)
        compared.add(episode, name)
    nothing = asyncio.run(
        Play(fn=f"{HERE}Guess", turn_discount=0.5).run(Aborted(["4"], aborts=0), GAME)
    )
    assert (nothing.rows, nothing.outcome.reward) == ((), 0.0)
    compared.add(nothing, "aborted")
    later = asyncio.run(
        Play(fn=f"{HERE}Silent", turn_discount=0.5, unfinished_reward=-1).run(
            Aborted(["4", "5"], aborts=1), GAME
        )
    )
    assert later.rows[0].turn_returns == (-1.0,), "the last turn has no tokens"
    compared.add(later, "aborted later")


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
    assert (late.outcome.status, late.end) == ("timeout", "abort")
    assert (trained(late), late.turns) == ("4", (Turn(tokens=1),)), "its tokens are counted"
    assert late.outcome.detail == "step of the environment took over 0.2 s"
    odd = asyncio.run(Play(fn=f"{HERE}Odd").run(Scripted(["4"]), GAME))
    assert odd.outcome.status == "error"
    assert "must be finite" in odd.outcome.detail
    assert Guess.closed == 3
    NEVER.set()
    NEVER.clear()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Broken", "the port is taken"), ("Lingers", "close of the environment took over 0.2 s")],
)
def test_a_sample_is_what_it_is_whether_or_not_its_environment_closes(
    name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        episode = run(name, Scripted(["4", "7"]), timeout_s=0.2)
        with pytest.raises(ValueError, match="'x' is no number"):
            run(name, Scripted(["x"]), timeout_s=0.2)
    assert (episode.outcome.reward, episode.end) == (0.75, "stop")
    expected = f"closing an environment of {HERE}{name} failed: {reason}"
    assert [record.getMessage() for record in caplog.records] == [expected] * 2
    NEVER.set()
    NEVER.clear()


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"fn": f"{HERE}Guess", "unfinished_reward": math.inf}, "unfinished_reward is inf"),
        ({"fn": f"{HERE}Guess", "unfinished_reward": -1, "scored": True}, "leave out one of them"),
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
        numbered_problems(size=1, prompt_template="Game ")


def test_the_prompt_of_numbered_problems_does_not_tell_the_number() -> None:
    problems = numbered_problems(size=10, prompt_template="Let us play. ")
    assert {one.prompt for one in (*problems.train, *problems.held_out)} == {"Let us play. "}
    for template in ("", "{prompt}"):
        with pytest.raises(
            ValueError, match=r"dataset\.prompt_template is .* may tell the"
        ) as told:
            numbered_problems(size=10, prompt_template=template)
        assert "\n" not in str(told.value)
    config = load_config("tiny", {"dataset.type": "numbered"})
    with pytest.raises(ValueError, match=r"dataset\.prompt_template is '\{prompt\}'"):
        load_problems(config.dataset, seed=1)


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
        *("reward.max_error_rate=0", "dataset.prompt_template='1'"),
    )
    (step,) = trained_samples(do_run(config).folder)
    assert {sample["reward"] for sample in step} <= {0.0, 1.0, 2.0}
    for sample in step:
        assert sample["reward"] == sum(turn["reward"] for turn in sample["turns"])
        assert sample["prompt"].endswith(" = ")
