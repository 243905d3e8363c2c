"""Checks of the adapters to TextArena and Reasoning Gym, where these are installed.

`test_adapters.py` runs them in an environment of their own.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import random
import re
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.workflow import Episode
from areal_lab.config.load import load_config
from areal_lab.data.problems import ProblemSet
from areal_lab.data.sources import load_problems
from areal_lab.preflight.functions import check_functions
from areal_lab.rewards.reasoning_gym import EVALUATES, ReasoningGym
from areal_lab.rewards.service import RewardService
from tests.agents.scripted import Scripted
from tests.agents.test_workflows import trained, whole
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples

# What the libraries themselves import is not up to our filters.
pytestmark = pytest.mark.filterwarnings("default")

GUESS = {"name": "textarena", "game": "GuessTheNumber-v0", "options": {"max_number": 8}}
FN = "areal_lab.rewards.reasoning_gym:ReasoningGym"


def played(script: list[str], seed: int = 3) -> tuple[Episode, Scripted]:
    workflow = make_workflow(GUESS)
    assert workflow is not None
    engine = Scripted(script, context_tokens=5000)
    data = {"prompt": "Play.\n", "answer": "", "seed": seed}
    return asyncio.run(workflow.run(engine, data)), engine


def test_a_game_is_played_to_its_end() -> None:
    low, high, script = 1, 8, list[str]()
    while True:  # by halves; each play begins the same game again
        middle = (low + high) // 2
        script.append(f"[{middle}]")
        episode, engine = played([*script, "no move", "no move"])
        if len(engine.prompts) == len(script):
            break
        if engine.prompts[len(script)].endswith("The target number is higher.\n"):
            low = middle + 1
        else:
            high = middle - 1
    assert len(script) <= 4
    assert (episode.outcome.reward, episode.end) == (1.0, "stop")
    assert trained(episode) == "".join(script)
    assert whole(episode).count("You are Player 0") == 1, "what was said is not said again"
    assert "[Player]" not in whole(episode)


def test_a_seed_is_a_game_and_our_random_numbers_are_ours() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    texts = [whole(played(["[4]", "[4]", "[4]"], seed)[0]) for seed in (1, 1)]
    assert texts[0] == texts[1]
    hints = {whole(played(["[4]", "x", "x"], seed)[0]) for seed in range(9)}
    assert len(hints) > 1
    assert random.random() == expected


def test_a_problem_without_a_seed_is_refused() -> None:
    workflow = make_workflow(GUESS)
    assert workflow is not None
    data = {"prompt": "Play.\n", "answer": ""}
    with pytest.raises(ValueError, match=r"no field 'seed'; use dataset\.type=numbered"):
        asyncio.run(workflow.run(Scripted([]), data))


@pytest.mark.parametrize(
    ("game", "reason"),
    [
        ("TicTacToe-v0", "has opponents, which are not supported"),
        ("GuessTheNumbr-v0", "cannot be made: .*not found"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(game: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_workflow({"name": "textarena", "game": game})


def problems(tasks: dict[str, Any], **more: Any) -> ProblemSet:
    settings = {"type": "reasoning_gym", "tasks": tasks, "eval_size": 2, **more}
    settings = {f"dataset.{name}": value for name, value in settings.items()}
    return load_problems(load_config("tiny", settings).dataset, seed=1)


TASKS = {"leg_counting": {"max_animals": 4}, "basic_arithmetic": {}}


def test_problems_of_tasks_are_mixed_and_split() -> None:
    made, again, other = (problems(TASKS, size=size) for size in (30, 30, 31))
    assert {one.metadata["task"] for one in made.train} == TASKS.keys()
    assert made.digest() == again.digest()
    assert made.digest() != other.digest()


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ({}, r"dataset\.tasks is empty"),
        ({"leg_countin": {}}, r"dataset\.tasks: leg_countin: .*not registered"),
        ({"leg_counting": {"legs": 3}}, "unexpected keyword argument 'legs'"),
        ({"leg_counting": {"max_animals": 0}}, "max_animals must be"),
    ],
)
def test_wrong_tasks_are_one_line(tasks: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        problems(tasks)
    assert "\n" not in str(raised.value)


def test_a_task_scores_its_answers_in_reward_processes() -> None:
    made = problems(TASKS, size=5).train[:4]

    async def score() -> None:
        async with RewardService(FN, timeout_s=60) as rewards:
            for problem in made:
                texts = [
                    f"So: <answer>{problem.answer}</answer>",
                    "<answer>-1</answer>",
                    f"It is {problem.answer}.",
                ]
                found = await rewards.score(texts, problem)
                assert [one.status for one in found] == ["ok"] * 3
                assert found[0].reward == 1.0
                assert found[1].reward < 1.0
                assert found[2].rewards == {"reward": 0.0, "no_answer": 1.0}

    asyncio.run(score())


EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify"}
NOT_OF_THE_MODEL = {
    "bitwise_arithmetic",  # the problem
    "number_sorting",  # the gold answer, where it is no JSON
    "propositional_logic",  # a parser of its own of that name
}


def evaluates(task: type) -> bool:
    """Whether `score_answer`, or what it calls in its own module, evaluates a text."""
    score: Any = task.score_answer  # type: ignore[attr-defined]
    source = Path(inspect.getsourcefile(score) or "").read_text(encoding="utf-8")
    calls: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
            names = {getattr(one, "id", getattr(one, "attr", "")) for one in called}
            calls[node.name] = calls.get(node.name, set()) | names
    seen, left = set[str](), {"score_answer"}
    while left:
        name = left.pop()
        seen.add(name)
        left |= calls.get(name, set()) - seen
    # Regular expressions are compiled, too, but at the top of modules.
    return bool(seen & EVALUATORS)


def test_the_tasks_that_evaluate_the_models_text_are_known() -> None:
    """By the source of the installed package, helpers in the same module included."""
    importlib.import_module("reasoning_gym")
    tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    found = {name for name, (task, *_) in tasks.items() if evaluates(task)}
    assert len(tasks) > 90
    assert found >= NOT_OF_THE_MODEL
    assert found - NOT_OF_THE_MODEL == EVALUATES - {"composite"}
    assert "composite" in tasks
    # Helpers of the whole package that scores import.
    utils = inspect.getsource(importlib.import_module("reasoning_gym.utils"))
    assert not re.search(rf"\b({'|'.join(EVALUATORS)})\(", utils.replace("re.compile(", ""))


def test_a_task_that_evaluates_runs_no_completion(tmp_path: Path) -> None:
    problem = problems({"binary_matrix": {}}, size=5).train[0]
    file = tmp_path / "written"
    text = f"<answer>[open({str(file)!r}, 'w')]</answer>"
    with pytest.raises(ValueError, match="scores of binary_matrix evaluate"):
        ReasoningGym()(text, problem.as_example())
    assert not file.exists()
    ReasoningGym(sandbox="unsafe")(text, problem.as_example())
    assert file.exists(), "which is why it is refused"


def test_a_run_trains_on_a_task(tmp_path: Path) -> None:
    config = tiny_config(
        *(tmp_path, "total_train_steps=1", "dataset.type=reasoning_gym", "dataset.size=30"),
        *("dataset.tasks={basic_arithmetic: {}}", f"reward.fn={FN}", "reward.kwargs.pattern=''"),
        *("reward.max_error_rate=0", "reward.timeout_s=60"),
    )
    assert not list(check_functions(config))
    (step,) = trained_samples(do_run(config).folder)
    assert all(0 <= sample["reward"] <= 1 for sample in step)
