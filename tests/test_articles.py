"""Names of AReaL and of articles: each is the real thing, and the page of settings is true."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab import articles
from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.multi_turn import MultiTurn
from areal_lab.agents.tool_use import ToolUse
from areal_lab.articles import (
    AgentConfig,
    AgentTrainer,
    AsyncReplayBuffer,
    DataConfig,
    DPOTrainer,
    GRPOConfig,
    Learner,
    MultiTurnWorkflow,
    PPOTrainer,
    RolloutConfig,
    RWTrainer,
    SFTTrainer,
    TIRWorkflow,
    VLMActor,
    VLMConfig,
    load_expr_config,
    vlm_math_reward,
)
from areal_lab.config.load import ALIASES, load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import settings
from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import Problem
from areal_lab.data.rows import read_rows
from areal_lab.data.small_tasks import rendered_sums
from areal_lab.training.learner import make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.step import train_batch
from tests.agents.own_tools import weather
from tests.agents.scripted import Scripted
from tests.offline.small import config_for
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import tiny_config, trained_samples
from tests.training.tiny import parameters, random_batch, save_model, settings_for

PAGE = (Path(__file__).parents[1] / "docs" / "from_areal.md").read_text(encoding="utf-8")
SETTINGS = PAGE.split("## Names in Python")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SETTINGS.splitlines()
    if line.startswith("| `")
]
KNOWN = {one.name for one in settings(TrainConfig)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_setting_of_the_page_exists_and_so_do_its_other_names(row: list[str]) -> None:
    here, areal, *_ = row
    assert len(row) == 5
    names = re.findall(r"`([^`]+)`", here)
    assert names
    assert set(names) <= KNOWN
    for other in re.findall(r"\*`([^`]+)`\*", areal):
        assert [ALIASES[other]] == names


def test_the_page_has_every_other_name_of_areal_and_no_setting_twice() -> None:
    accepted = set(re.findall(r"\*`([^`]+)`\*", SETTINGS))
    assert accepted == {name for name in ALIASES if name.startswith(("train_", "valid_"))}
    names = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])]
    assert len(set(names)) == len(names) > 50


def test_what_the_page_says_of_defaults_and_keywords_holds() -> None:
    config = load_config("tiny", ["actor.loss={name: dapo, correct: {name: mask_above, cap: 5.0}}"])
    assert config.actor.loss["correct"] == {"name": "mask_above", "cap": 5.0}
    assert TrainConfig().actor.use_decoupled_loss
    assert {"eps_clip", "behav_imp_weight_cap"} <= type(config.actor).model_fields.keys()


def test_the_snippet_of_the_page_prints_what_it_says() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (told,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == told


def test_every_name_is_on_the_page_and_in_the_module() -> None:
    named = PAGE.split("## Names in Python")[1]
    for name in articles.__all__:
        assert hasattr(articles, name)
        assert f"`{name}`" in named


def test_configs_are_the_records_themselves() -> None:
    config = GRPOConfig()
    assert type(config.rollout) is RolloutConfig
    assert type(config.dataset) is DataConfig


def test_a_command_line_of_areal_gives_the_config() -> None:
    argv = ["eta=2", "--config", "tiny", "train_dataset.batch_size=4"]
    config, file = load_expr_config(argv, GRPOConfig)
    assert file == "tiny"
    assert config == load_config("tiny", ["eta=2", "dataset.batch_size=4"])
    for wrong in ([], ["--config"], ["tiny"]):
        with pytest.raises(ConfigError, match="must have --config FILE"):
            load_expr_config(wrong, GRPOConfig)
    with pytest.raises(ConfigError, match="did you mean"):
        load_expr_config(["--config", "tiny", "actor.eps_clipp=0.1"], GRPOConfig)
    with pytest.raises(TypeError, match="must be GRPOConfig"):
        load_expr_config(argv, DataConfig)  # type: ignore[arg-type]  # what is tested


def test_a_trainer_trains_on_rows(tmp_path: Path) -> None:
    rows = [{"question": f"{left} + 1 =", "answer": f"#### {left + 1}"} for left in range(9)]
    config = tiny_config(tmp_path, "total_train_steps=1", "dataset.prompt_template={prompt}!")
    steps: list[int] = []
    with PPOTrainer(config, train_dataset=rows, valid_dataset=rows[:3]) as trainer:
        assert trainer.problems.held_out[0].prompt == "0 + 1 =!"
        assert {problem.answer for problem in trainer.problems.train} == set("456789")
        summary = trainer.train(reward_fn=even_digits, on_step=lambda one: steps.append(one.step))
    assert steps == [1]
    assert (summary["status"], summary["trained_samples"]) == ("complete", 12)
    with pytest.raises(ValueError, match="give both, or neither"):
        PPOTrainer(config, train_dataset=rows)
    with pytest.raises(ValueError, match="valid_dataset, row 1 has no field 'question'"):
        PPOTrainer(config, train_dataset=rows, valid_dataset=[{"prompt": "1 + 1"}])


def test_a_learner_updates_as_the_trainer_of_a_run(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    given = settings_for(folder)
    config = given.config.with_settings({"actor.path": str(folder)})
    learner, request = Learner(config), random_batch()
    learner.version = request.version
    slow = make_learner(load_policy(folder), given)
    expected = train_batch(slow, request).metrics
    found = learner.update(request.trajectories)
    assert found.keys() - expected.keys() == {
        *("peak_rss_bytes", "trainer_s", "trainer_tokens_per_s", "trainer_tflop_per_s")
    }
    assert {name: found[name] for name in expected} == expected
    assert learner.version == request.version + 1
    for name, value in parameters(learner.model).items():
        assert value.equal(parameters(slow.model)[name])


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(0, 3))
def test_a_buffer_gives_each_sample_once_oldest_first_and_none_too_old(
    lags: list[int], size: int, most: int
) -> None:
    buffer = AsyncReplayBuffer[tuple[int, int]](size, max_staleness=most)
    waiting: list[tuple[int, int]] = []
    version = dropped = 0
    for number, lag in enumerate(lags):
        sample = (max(0, version - lag), number)
        buffer.put(sample, sample[0])
        waiting.append(sample)
        fresh = sorted(one for one in waiting if one[0] >= version - most)
        got = buffer.get_batch(version)
        dropped += len(waiting) - len(fresh)
        if len(fresh) < size:
            assert got is None
            waiting = fresh
        else:
            assert got == fresh[:size]
            waiting = fresh[size:]
            version += 1
        assert len(buffer) == len(waiting)
        assert buffer.dropped == dropped


def test_a_buffer_needs_room_for_a_sample() -> None:
    with pytest.raises(ValueError, match="batch_size is 0, but must be >= 1"):
        AsyncReplayBuffer(0)
    with pytest.raises(ValueError, match="a lag is a number >= 0"):
        AsyncReplayBuffer(1, max_staleness=-1)


def test_trainers_on_fixed_data_run_here(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "response": str(2 * n)} for n in range(20)]
    config = config_for("sft", tmp_path)
    told: list[int] = []
    with SFTTrainer(config, rows[4:], rows[:4]) as trainer:
        summary = trainer.train(lambda step, _: told.append(step))
    assert told == [0, 1, 2, 3, 4, 5]
    assert summary["rows"]["train"] == 16
    assert (Path(summary["folder"]) / "model" / "config.json").is_file()
    assert RWTrainer(config_for("rm", tmp_path)).train()["command"] == "rm"
    assert DPOTrainer(config_for("dpo", tmp_path)).train()["command"] == "dpo"
    with pytest.raises(ValueError, match="belong together"):
        SFTTrainer(config, rows)
    with pytest.raises(ConfigError, match=r"actor\.processes is 2, but this trains in one process"):
        SFTTrainer(config_for("sft", tmp_path, actor__processes=2)).train()


TOOLS: list[dict[str, Any]] = [
    {
        "name": "web_search",
        "description": "Search the web",
        "parameters": {"query": {"type": "string"}},
    },
    {"name": "code_execute", "description": "Run Python", "parameters": {"source": "string"}},
    {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
    {
        "name": "look",
        "description": "Look out",
        "parameters": {"city": "string"},
        "function": "tests.agents.own_tools:weather",
    },
]


def test_tools_of_articles_are_ours(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('"the hand is red"\n"the milk is white"\n')
    config = AgentConfig(tools=TOOLS, max_turns=5, corpus=str(corpus))
    workflow = make_workflow(config.workflow(), sandbox="unsafe")
    assert isinstance(workflow, ToolUse)
    calls = [
        *(("web_search", {"query": "milk"}), ("code_execute", {"source": "print(6 * 7)"})),
        *(("calculator", {"expression": "1 / 4"}), ("look", {"city": "Kiel"})),
    ]
    said = "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in calls
    )
    engine = Scripted([said, "Done."], context_tokens=9000)
    engine.sampling = engine.sampling.__class__(max_new_tokens=1000)
    data = {"prompt": "{tools}\nGo.", "answer": ""}
    episode = asyncio.run(workflow.run(engine, data))
    assert [outcome for _, outcome in episode.turns[0].calls] == ["ok"] * 4
    told = engine.prompts[1].split("<tool_response>\n")[1:]
    assert [one.split("\n")[0] for one in told] == ["the milk is white", "42", "0.25", "Kiel: rain"]
    assert '"description": "Search the web"' in engine.prompts[0]
    assert '"description": "Look out"' in engine.prompts[0]
    assert '"days"' not in engine.prompts[0], "only the parameters that are given"
    bare = AgentConfig(tools=[{"function": weather}]).workflow()["tools"]
    assert bare == [{"name": "tests.agents.own_tools:weather"}]


def test_an_agent_config_refuses_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="web_search searches a local corpus and never the net"):
        AgentConfig(tools=["web_search"])
    with pytest.raises(ValueError, match="the tool is 'browser', but must be one of calculator"):
        AgentConfig(tools=[{"name": "browser"}])
    with pytest.raises(ValueError, match="reward_shaping is 'step', but must be trajectory"):
        AgentConfig(reward_shaping="step")


def math_reward_fn(response: str, ground_truth: str) -> float:
    return float(len(response) % 2 == len(ground_truth) % 2)


def agent_task_reward(trajectory: list[dict[str, Any]], task: str, answer: str) -> float:
    assert task.endswith("+ 1 =")
    assert answer.isdigit()
    assert trajectory[-1]["role"] == "assistant"
    return float(len(trajectory))


def close_to(response: str, ground_truth: str, tolerance: float = 1e-3) -> bool:
    return abs(float(response) - float(ground_truth)) <= tolerance


def of_trajectory(trajectory: Any, task: str, answer: str, *, scale: float = 2.0) -> float:
    return scale * len(trajectory) * (task == answer)


def test_a_reward_functions_arguments_are_those_without_a_default() -> None:
    by_name = articles._ByName({"close": close_to, "whole": of_trajectory})
    example = {"prompt": "1", "answer": "1", "trajectory": [{"role": "assistant"}]}
    assert by_name("1.0001", {**example, "reward_fn": "close"}) is True
    assert by_name("1.0001", {**example, "reward_fn": "whole"}) == 2.0
    trainer = AgentTrainer("Adder-75K")
    for function in (close_to, of_trajectory):
        trainer.register_reward_fn("any", function)
    for wrong, count in ((lambda a: a, 1), (lambda *a: a, 0), (lambda a, b, c, d: a, 4)):  # noqa: ARG005
        with pytest.raises(ValueError, match=rf"function 'wrong' has {count} positional .* 2 \("):
            trainer.register_reward_fn("wrong", wrong)


def test_a_task_says_which_of_several_reward_functions_it_is_for() -> None:
    trainer = AgentTrainer("Adder-75K")
    trainer.register_reward_fn("close", close_to)
    with pytest.raises(ValueError, match=r"row 1 has reward_fn 'far', but must name one of close"):
        trainer.train([{"task": "1", "answer": "1", "reward_fn": "far"}])
    trainer._check_rewards([{"task": "1", "answer": "1"}])
    trainer.register_reward_fn("whole", of_trajectory)
    with pytest.raises(ValueError, match=r"row 2 has no reward_fn, but must name one of close, wh"):
        trainer.train(
            [
                {"task": "1", "answer": "1", "reward_fn": "close"},
                Problem(prompt="2", answer="2", key="2"),
            ]
        )


def test_an_agent_trainer_trains_on_tasks(tmp_path: Path) -> None:
    rows = [
        {"task": f"{n} + 1 =", "answer": str(n + 1), "reward_fn": ("math", "agent")[n % 2]}
        for n in range(8)
    ]
    tasks = tmp_path / "tasks.json"
    tasks.write_text("\n".join(map(json.dumps, rows)))
    assert [row for _, row in read_rows(tasks)] == rows
    tasks.write_text(json.dumps(rows))
    tiny = tiny_config(tmp_path, "dataset.eval_size=2", "dataset.prompt_template={prompt}{tools}")
    short = tiny.with_settings({"dataset.prompt_template": "{prompt}", "gconfig.max_tokens": 0})
    trainer = AgentTrainer(tiny.actor.path, AgentConfig(tools=["calculator"], max_turns=3), short)
    assert trainer.config.dataset.prompt_template.startswith("{tools}")
    # A tiny model has a context of 256 tokens, without room for the description of a tool.
    trainer.config = trainer.config.with_settings({"dataset.prompt_template": "{prompt}"})
    trainer.register_reward_fn("math", math_reward_fn)
    trainer.register_reward_fn("agent", agent_task_reward)
    summary = trainer.train(tasks=str(tasks), num_epochs=1)
    assert (summary["status"], summary["steps"]) == ("complete", 2)
    assert summary["rewards"]["error"] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    groups = {sample["prompt"]: sample for step in trained_samples(folder) for sample in step}
    assert len(groups) == 6
    for prompt, sample in groups.items():
        agent = int(prompt.split()[0]) % 2
        assert sample["reward"] in ((1.0, 3.0, 5.0) if agent else (0.0, 1.0))


def test_tasks_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    trainer = AgentTrainer("Adder-75K")
    with pytest.raises(ValueError, match=r"nothing\.json does not exist"):
        trainer.train(tmp_path / "nothing.json")
    (tmp_path / "tasks.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"line 1 is not a JSON object: \[1, 2\]"):
        trainer.train(tmp_path / "tasks.json")
    (tmp_path / "tasks.json").write_text("[1, 2")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        trainer.train(tmp_path / "tasks.json")
    with pytest.raises(ValueError, match="tasks, row 1 has no field 'question'"):
        trainer.train([{"prompt": "1 + 1"}, {"prompt": "1 + 2"}])
    with pytest.raises(ValueError, match="num_epochs is 0"):
        trainer.train([{"task": "1 + 1", "answer": "2"}], num_epochs=0)


def test_workflows_of_areal_are_ours() -> None:
    assert MultiTurnWorkflow is MultiTurn
    made = make_workflow({"name": "areal_lab.articles:TIRWorkflow", "max_turns": 3})
    assert isinstance(made, ToolUse)
    engine = Scripted(["```python\nprint(6 * 7)\n```\n", "42"])
    asyncio.run(TIRWorkflow(timeout_s=20).run(engine, {"prompt": "Go.\n", "answer": "42"}))
    assert engine.prompts[1].endswith("```output\n42\n```\n")


def test_a_vision_actor_trains_on_images(tmp_path: Path) -> None:
    rows = []
    for number, problem in enumerate(rendered_sums(size=8, eval_size=2, seed=2).train):
        (tmp_path / f"{number}.png").write_bytes(problem.images[0].png)
        rows.append({"question": "<image>=", "answer": problem.answer, "image": f"{number}.png"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "run_dir": str(tmp_path / "runs"),
        "dataset.batch_size": 2,
        "dataset.eval_size": 2,
        "evaluation.samples_per_problem": 1,
        "rollout.dtype": "float32",
        "actor.dtype": "float32",
        "plots": False,
    }
    few = VLMConfig(n_samples=2, max_new_tokens=3)
    actor = VLMActor("Reader-574K", config=few, async_config=settings)
    summary = actor.train(tmp_path / "rows.jsonl")
    assert (summary["status"], summary["steps"]) == ("complete", 2)
    assert summary["rewards"]["error"] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    # Each image is in the run folder once, and every group names its own.
    named = {
        image["sha256"]
        for step in (folder / "trajectories").glob("*.jsonl")
        for line in step.read_text().splitlines()
        for image in json.loads(line)["images"]
    }
    assert {file.stem for file in (folder / "images").iterdir()} == named
    assert len(named) == 4


def test_a_vision_reward_is_about_the_answer() -> None:
    assert vlm_math_reward("So it is \\boxed{1/2}.", "0.5") == 1
    assert vlm_math_reward("<image> <image> 3", "4", [1.0, 2.0]) == 0
    with pytest.raises(ValueError, match="vision_encoder is 'clip', but the model has its own"):
        VLMActor("Reader-574K", "clip")
