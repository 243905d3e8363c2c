"""Names of AReaL and of articles: each is the real thing, and the page of settings is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab import articles
from areal_lab.articles import (
    AsyncReplayBuffer,
    DataConfig,
    DPOTrainer,
    GRPOConfig,
    Learner,
    PPOTrainer,
    RolloutConfig,
    RWTrainer,
    SFTTrainer,
    load_expr_config,
)
from areal_lab.config.load import ALIASES, load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import settings
from areal_lab.config.schema import TrainConfig
from areal_lab.training.learner import make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.step import train_batch
from tests.offline.small import config_for
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import tiny_config
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
    del expected["peak_rss_bytes"], found["peak_rss_bytes"]
    assert found == expected
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
    with pytest.raises(ConfigError, match=r"actor\.processes is 2, but this trains in its own"):
        SFTTrainer(config_for("sft", tmp_path, actor__processes=2)).train()
