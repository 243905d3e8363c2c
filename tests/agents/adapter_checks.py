"""Checks of the adapters to TextArena and Reasoning Gym, where these are installed.

`test_adapters.py` runs them in an environment of their own.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.environments.textarena import LEFT_OUT as GAMES_OUT
from areal_lab.agents.workflow import Episode
from areal_lab.config.load import load_config
from areal_lab.data.problems import ProblemSet
from areal_lab.data.reasoning_gym import LEFT_OUT as TASKS_OUT
from areal_lab.data.reasoning_gym import generated_entries
from areal_lab.data.sources import load_problems
from areal_lab.engines.protocol import SamplingParams
from areal_lab.resolve.functions import check_functions
from areal_lab.rewards.reasoning_gym import EVALUATES, ReasoningGym
from areal_lab.rewards.service import RewardService
from tests.agents.scripted import Scripted
from tests.agents.test_workflows import trained, whole
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples
from tools.pages import environments

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
        # These start with one player.
        ("QuantumTicTacToe-v0", "has opponents, which are not supported"),
        ("SpiteAndMalice-v0", "has opponents, which are not supported"),
        ("PublicGoodsGame-v0", "has opponents, which are not supported"),
        ("MarketEntryGame-v0", "has opponents, which are not supported"),
        ("GuessTheNumbr-v0", "cannot be made: .*not found"),
        ("Bandit-v0-hard", "is refused: it pays the regret"),
        ("Cryptarithm-v0", "is refused: it is one puzzle for all seeds"),
        ("PegJump-v0-raw", "is refused: it is one puzzle for all seeds"),
        ("TowerOfHanoi-v0-hard", "is refused: it is one puzzle for all seeds"),
        ("ScorableGames-v0", "cannot be started: .*missing in the package"),
        ("GuessWho-v0", "cannot be made: OpenRouter API key not found"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(
    game: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=reason) as raised:
        make_workflow({"name": "textarena", "game": game})
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="its syntax is that of Python 3.12")
def test_a_game_that_needs_a_newer_python_says_so() -> None:
    with pytest.raises(ValueError, match=r"'Klondike-v0' cannot be made: it needs a newer Python"):
        make_workflow({"name": "textarena", "game": "Klondike-v0"})


def test_a_game_that_needs_a_list_of_nltk_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nltk = importlib.import_module("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    with pytest.raises(ValueError, match=r"run: python -m nltk\.downloader words") as raised:
        make_workflow({"name": "textarena", "game": "Hangman-v0"})
    assert "\n" not in str(raised.value)


def rewarded(game: str, moves: list[str], seed: int = 2, **options: Any) -> tuple[float, str]:
    """Reward of a script, and what the game said first."""
    keywords: dict[str, Any] = {"options": options} if options else {}
    workflow = make_workflow({"name": "textarena", "game": game, **keywords})
    assert workflow is not None
    sampling = SamplingParams(max_new_tokens=6000)
    engine = Scripted(moves, context_tokens=50_000, sampling=sampling)
    data = {"prompt": "Play.\n", "answer": "", "seed": seed}
    episode = asyncio.run(workflow.run(engine, data))
    assert episode.outcome.status == "ok"
    return episode.outcome.reward, engine.prompts[0]


@pytest.mark.parametrize(
    ("game", "reward"),
    # Seed 2: 75 of 100 x 6, and so on; half of the clues are 0; nothing.
    [("Countdown-v0", 0.743), ("Slitherlink-v0", 0.5), ("ThreeCardMonte-v0", 0.0)],
)
def test_a_malformed_move_has_a_reward_where_the_library_swaps_it_with_its_reason(
    game: str, reward: float
) -> None:
    assert rewarded(game, ["no move", "no move"])[0] == pytest.approx(reward)


def test_a_move_that_makes_a_game_raise_is_an_invalid_move() -> None:
    """Python reads no number of more than 4,300 digits."""
    moves = [f"[{'9' * 5000}]"] * 2
    assert rewarded("GuessTheNumber-v0", moves)[0] == -1.0


def test_a_seed_is_a_puzzle_of_countdown() -> None:
    first, again, other = (rewarded("Countdown-v0", ["no move"] * 2, seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    given = {"numbers": [100, 75, 6, 4, 3, 2], "target": 175}
    reward, text = rewarded("Countdown-v0", ["[0 1 +]"], **given)
    assert reward == 1.0
    assert "TARGET: 175" in text


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
        ({"composite": {"datasets": [{"name": "gcd"}]}}, "composite is refused: it is a mix"),
        ({"game_of_life_halting": {}}, "is refused: its score accepts any text"),
        ({"game_of_life": {}}, "is refused: .* an empty board gets 0.96"),
        ({"coin_flip": {}}, "is refused: .* 0 gets 0.95"),
        ({"puzzle24": {}}, "is refused: its score does not compare the numbers"),
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
                assert found[2].rewards == {"reward": 0.0, "no_answer": 1.0, "unreadable": 0.0}

    asyncio.run(score())


HASHED = ("isomorphic_strings", "list_functions", "ransom_note", "word_ladder")


def test_problems_do_not_change_with_the_hash_seed() -> None:
    program = (
        "import json, sys; from areal_lab.data.reasoning_gym import reasoning_problems; "
        "print(reasoning_problems(json.loads(sys.argv[1]), size=8, seed=3).digest())"
    )
    tasks = json.dumps({name: {} for name in HASHED})
    digests = {
        subprocess.run(
            [sys.executable, "-c", program, tasks],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("prime_factorization", "x"),
        ("boxnet", "0"),
        ("game_of_life", "{}"),
        ("complex_arithmetic", "nan"),
    ],
)
def test_an_answer_that_makes_a_score_raise_gets_0_and_is_named(task: str, answer: str) -> None:
    made = generated_entries({task: {}}, size=1, seed=1)[
        task
    ]  # game_of_life is refused as a data set
    found = ReasoningGym("")(answer, {"task": task, "options": {}, "entry": made[0]})
    assert found == {"reward": 0.0, "no_answer": 0.0, "unreadable": 1.0}


@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_a_gold_answer_is_right_after_json(task: str) -> None:
    problem = problems({task: {}}, size=5).train[0]
    example = json.loads(json.dumps(problem.as_example()))
    assert ReasoningGym("")(problem.answer, example)["reward"] == 1.0


def test_refused_environments_are_those_of_the_page() -> None:
    found = json.loads(environments.FILE.read_text(encoding="utf-8"))
    tasks = found["reasoning-gym"]["environments"]
    refused = {name: one["left_out"] for name, one in tasks.items() if one["left_out"]}
    # A mix of the others, without problems of its own.
    assert refused == {name: why for name, why in TASKS_OUT.items() if name != "composite"}
    for name, facts in found["textarena"]["environments"].items():
        assert ("is refused" in facts.get("refused", "")) == (name.split("-v")[0] in GAMES_OUT)


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
