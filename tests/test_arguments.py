"""What is tried first with each public function: it works, or one line says what to give."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import areal_lab
import simulator
from areal_lab import articles, load_config
from areal_lab.config.offline import load_offline
from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.trajectory import Segment
from areal_lab.shell.display import Silent
from cosim.load import load_cosim
from tests.fuzz import one_line

ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]
ONE = Problem(prompt="1", answer="1", key="1")


class Reward:
    """A reward function that is an object."""

    def __call__(self, completion: str, example: Any) -> float:
        """No reward."""
        del completion, example
        return 0.0


def steps(config: Any) -> int:
    """The setting that the tests change."""
    return int(config.total_train_steps)


def test_configs_and_overrides_are_taken_in_any_form(tmp_path: Path) -> None:
    tiny = load_config("tiny")
    file = tmp_path / "mine.yaml"
    file.write_text("total_train_steps: 3\n")
    asked = {"total_train_steps": 3}
    for given in (
        file,
        str(file),
        asked,
        [file],
        ("tiny", asked),
        [tiny, asked],
        (tiny, str(file)),
    ):
        assert steps(load_config(given)) == 3, given
    assert load_config(tiny) == tiny
    assert load_config(None, None) == load_config([]) == load_config({}) == TrainConfig()
    assert steps(load_config({"total_train_steps": np.int64(3)})) == 3
    for changes in (
        "total_train_steps=3",
        ("total_train_steps=3",),
        (text for text in ["total_train_steps=3"]),
        asked,
        {"total_train_steps": np.int64(3)},
    ):
        assert steps(load_config("tiny", changes)) == 3
    nested = {"dataset": {"batch_size": 5}, "gconfig.stop": ("\n",), "run_dir": tmp_path}
    found = load_config("tiny", nested)
    assert (found.dataset.batch_size, found.gconfig.stop) == (5, ["\n"])
    assert found.run_dir == tiny.with_settings({"run_dir": tmp_path}).run_dir == str(tmp_path)
    assert steps(load_offline("sft", asked)) == steps(load_offline("sft", (), asked)) == 3
    assert steps(load_cosim(asked)) == steps(load_cosim(["cosim", asked])) == 3
    small = simulator.load_simulation("small")
    assert simulator.load_simulation(small) == small
    assert simulator.load_simulation({"seeds": 2}).seeds == 2
    assert simulator.load_simulation("small", "seeds=2").seeds == 2
    plan = simulator.load_plan("plan_small")
    assert simulator.load_plan(plan) == plan
    assert simulator.plan_yaml("plan_small") == simulator.plan_yaml(plan)


def test_functions_that_take_a_config_take_what_makes_one(tmp_path: Path) -> None:
    tiny = load_config("tiny", {"run_dir": tmp_path})
    asked = {"run_dir": tmp_path, "total_train_steps": 2}
    assert areal_lab.train(asked).running is areal_lab.train("tiny").running is False
    for problems in (
        ROWS,
        pd.DataFrame(ROWS),
        (row for row in ROWS),
        (*ROWS, *ROWS),
    ):
        config = tiny.with_settings({"dataset.eval_size": 4})
        assert areal_lab.train(config, problems=problems)
    for more in (
        {"loss": "gspo"},
        {"loss": {"name": "gspo"}},
        {"reward_fn": Reward()},
        {"reward_fn": lambda said, example: len(said) * len(example)},
        {"reward_fn": "areal_lab.rewards.exact:gsm8k"},
        {"display": Silent()},
    ):
        assert areal_lab.train(tiny, **more)
    assert areal_lab.compare_losses(["gspo", "dapo"], tiny, seeds=np.int64(1)).runs == 2
    assert areal_lab.compare_losses({"mine": "gspo"}, "tiny", seeds=np.array([4])).runs == 1
    assert articles.FSDPPPOActor(asked).config.total_train_steps == 2
    assert articles.RemoteSGLangEngine("tiny").config.rollout.backend == "sglang"
    assert articles.AgentTrainer(Path("Adder-75K"), async_config="tiny").config.actor.path
    assert articles.PPOTrainer("tiny", pd.DataFrame(ROWS), ROWS[:5]).problems.held_out
    simulated = {"cluster.gpus": 16, "cluster.rollout_gpus": 8, "workload.steps": 9}
    assert simulator.simulate(simulated).seed == simulator.simulate(simulated, seed=1).seed
    assert simulator.problems(simulated) == []
    assert simulator.build("small") is not None
    assert simulator.find_gpu(simulator.find_gpu("H100")).name == simulator.find_gpu("H100").name
    model = simulator.find_model("R1-Distill-Qwen-1.5B")
    assert simulator.find_model(model) is model
    assert simulator.estimate(np.array([1.0, 3.0])).mean == 2.0
    assert simulator.fit_lengths(pd.Series([10, 20, 30, 40] * 10)) is not None


def test_arguments_of_articles_are_taken_in_any_form() -> None:
    config, file = articles.load_expr_config("--config tiny total_train_steps=3")
    assert (steps(config), file) == (3, "tiny")
    expected = articles.AgentConfig(tools=["calculator"]).workflow()
    for tools in ("calculator", {"name": "calculator"}, (name for name in ["calculator"])):
        assert articles.AgentConfig(tools=tools).workflow() == expected
    asked = articles.AgentTrainer("Adder-75K", {"tools": "calculator", "max_turns": 3})
    assert asked.config.rollout.workflow["max_turns"] == 3
    assert articles.VLMActor("Reader-574K", config={"n_samples": 2}).config.gconfig.n_samples == 2
    assert len(articles.AsyncReplayBuffer(np.int64(2), np.float32(1))) == 0


def test_records_take_lists_and_numbers_of_numpy() -> None:
    given: Any = [1, 2], np.array([-0.5, -0.25])
    segment = Segment(*given, 0)
    assert segment == Segment((1, 2), (-0.5, -0.25), 0)
    other = Problem(prompt="2", answer="2", key="2")
    assert ProblemSet(train=[ONE], held_out=iter([other])).held_out == (other,)


def refusals(tmp_path: Path) -> dict[str, tuple[Callable[[], object], str]]:
    """What cannot be meant, by what was tried, with words of the error."""
    tiny = load_config("tiny", {"run_dir": tmp_path})
    run = areal_lab.train
    wrong: Any = 3
    return {
        "pairs": (lambda: load_config("tiny", [("seed", 3)]), 'override is tuple .*"seed=2"'),
        "dicts": (lambda: load_config("tiny", [{"seed": 3}]), "an override is dict"),
        "number": (lambda: load_config(wrong), "a config is int \\(3\\), but must be the name"),
        "content": (lambda: load_config("seed: 3\n" * 99), "a path has at most 4095 bytes"),
        "too long": (
            lambda: simulator.find_model("x" * 300),
            "the model is 'x.*255 between slashes",
        ),
        "long run": (lambda: areal_lab.read_run("x" * 300), "path is 'x.*255 between slashes"),
        "bytes": (lambda: load_config(b"tiny"), "a config is bytes"),
        "open file": (lambda: load_config(io.StringIO("seed: 3")), "a config is StringIO"),
        "no such name": (lambda: load_config("tyny"), "unknown config 'tyny'"),
        "class": (lambda: run(TrainConfig), "is the class TrainConfig; write TrainConfig\\(\\)"),
        "none": (lambda: run(None), "config is NoneType, but must be a TrainConfig"),
        "other config": (lambda: run(load_offline("sft")), "config is SFTConfig"),
        "model": (lambda: tiny.with_settings({"actor.path": object()}), "path is <object .* text"),
        "list": (lambda: tiny.with_settings(["seed=3"]), "must be values by name"),
        "reward class": (lambda: run(tiny, reward_fn=Reward), "must be a function of"),
        "reward list": (lambda: run(tiny, reward_fn=[Reward()]), "must be a function of"),
        "reward number": (lambda: run(tiny, reward_fn=1.0), "must be a function of"),
        "loss name": (lambda: run(tiny, loss="gsp"), "gspo"),
        "loss number": (lambda: run(tiny, loss=3), "cannot be called as a policy loss"),
        "display": (lambda: run(tiny, display=True), "display is True, but must be None"),
        "problems": (lambda: run(tiny, problems=3), "problems is int, but must be a list of rows"),
        "one problem": (lambda: run(tiny, problems=ONE), "problems is one Problem"),
        "function": (lambda: run(tiny, problems=lambda: ROWS), "problems is function"),
        "texts": (lambda: run(tiny, problems=["2 + 3 ="]), "row 1 is str .* must have fields"),
        "no path": (lambda: run(tiny, problems="a.jsonl"), "a.jsonl does not exist"),
        "workflow": (
            lambda: run({"rollout.workflow": {"name": "multi_turn", "max_turns": "3"}}),
            r"multi_turn cannot be made of max_turns='3': .*; it takes max_turns: 'int'",
        ),
        "detached": (lambda: areal_lab.start_run(TrainConfig), "is the class TrainConfig"),
        "losses": (lambda: areal_lab.compare_losses(wrong, tiny), "losses is 3, but must be names"),
        "seeds": (lambda: areal_lab.compare_losses(["gspo"], tiny, seeds=1.5), "seeds is 1.5"),
        "resume": (lambda: areal_lab.resume_run(wrong), "folder is int .*, but must be a path"),
        "resumed": (lambda: areal_lab.resume_run("no", {"seed": 3}), "no is not a run folder"),
        "attach": (lambda: areal_lab.attach_run(None), "folder is NoneType"),
        "live": (lambda: areal_lab.live_runs(wrong), "parent is int"),
        "read": (lambda: areal_lab.read_run(["a", "b"]), "path is list"),
        "sweep": (lambda: areal_lab.read_sweep(wrong), "folder is int"),
        "seed results": (lambda: areal_lab.load_seed_results(wrong), "path is int"),
        "gold number": (lambda: Problem(prompt="1", answer=wrong, key="1"), "the answer .* is int"),
        "rows": (lambda: ProblemSet(train=ROWS, held_out=ROWS), "train has dict .*problems=rows"),
        "no rows": (lambda: ProblemSet(train=None, held_out=()), "train is None"),
        "offline": (lambda: load_offline("kto"), "kind is 'kto', but must be one of sft, rm, dpo"),
        "sft": (lambda: articles.SFTTrainer("sft_adder"), "config is str, but must say what"),
        "ppo": (lambda: articles.PPOTrainer(tiny, [1], [2]), "row 1 is int .* must have fields"),
        "engine": (lambda: articles.TrainController(tiny, wrong), "engine is .*FSDPPPOActor"),
        "scheduler": (
            lambda: articles.TrainController(articles.FSDPPPOActor(tiny), wrong),
            "scheduler is 3, but must be one",
        ),
        "simulate": (lambda: simulator.simulate(None), "config is NoneType, .*SimulationConfig"),
        "simulated": (lambda: simulator.simulate("smallest"), "unknown preset .smallest."),
        "plan": (lambda: simulator.find_plan(wrong), "config is int, but must be a PlanConfig"),
        "calibrate": (lambda: simulator.calibrate_from(wrong), "source is int"),
        "lengths": (lambda: simulator.fit_lengths(wrong), "the lengths are int"),
        "gpu": (lambda: simulator.find_gpu(wrong), "the GPU is int"),
        "simulated model": (lambda: simulator.find_model(wrong), "the model is int"),
        "no arguments": (
            lambda: articles.load_expr_config(None),
            "argv is None, but must",
        ),
        "tools": (
            lambda: articles.AgentConfig(tools=3).workflow(),
            "tools is 3, but must",
        ),
        "tool": (
            lambda: articles.AgentConfig(tools=[3]).workflow(),
            "a tool is 3, but must",
        ),
        "agent": (lambda: articles.AgentTrainer("Adder-75K", 3), "agent_config is 3, but must be"),
        "fields": (lambda: articles.AgentTrainer("Adder-75K", {"turns": 3}), "max_turns"),
        "vision": (lambda: articles.VLMActor("Reader-574K", config=3), "config is 3, but must be"),
        "registered": (
            lambda: articles.AgentTrainer("Adder-75K").register_reward_fn("x", 3),
            "the reward function 'x' is 3, but must be a function",
        ),
        "epochs": (
            lambda: articles.AgentTrainer("Adder-75K").train(ROWS, num_epochs="1"),
            "num_epochs is '1', but must be a number",
        ),
        "buffer": (
            lambda: articles.AsyncReplayBuffer("2"),
            "batch_size is '2', but must",
        ),
        "half": (
            lambda: articles.AsyncReplayBuffer(1.5),
            "batch_size is 1.5, but must",
        ),
        "late": (lambda: articles.AsyncReplayBuffer(2, "1"), "max_staleness is '1', but must be"),
        "cosim": (lambda: load_cosim(wrong), "a config is int"),
    }


def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, (attempt, words) in refusals(tmp_path).items():
        with pytest.raises(ValueError, match=words) as caught:
            attempt()
        assert one_line(caught.value, 500), (name, str(caught.value))
    assert not list(tmp_path.iterdir())
