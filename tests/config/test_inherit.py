"""Files that stand on others, and mappings of free names laid over one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.dump import to_yaml
from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.schema import TrainConfig
from areal_lab.runlog.folder import RunFolder
from cosim.load import load_cosim


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_wins_over_its_bases_and_later_bases_over_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path, "first.yaml", "base: tiny\nseed: 5\ntotal_train_steps: 7\neta: 1\n")
    write(tmp_path, "parts/second.yml", "seed: 6\ntotal_train_steps: 8\n")
    mine = write(tmp_path, "mine.yaml", "base: [first.yaml, parts/second.yml]\nseed: 9\n")
    expected = load_config("tiny", ["seed=9", "total_train_steps=8", "eta=1"])
    assert load_config(mine) == expected
    assert load_config(mine, ["eta=2"]).rollout.max_head_offpolicyness == 2


def test_several_configs_are_like_a_file_with_these_bases(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine.yaml", "base: [tiny, dapo]\n")
    assert load_config(["tiny", "dapo"]) == load_config(mine)
    assert load_cosim(["cosim", "gspo"]).actor.loss["name"] == "gspo"


def test_a_base_of_two_bases_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "task.yaml", "seed: 3\n")
    write(tmp_path, "left.yaml", "base: task.yaml\neta: 1\n")
    write(tmp_path, "right.yaml", "base: task.yaml\n")
    mine = write(tmp_path, "mine.yaml", "base: [left.yaml, right.yaml]\n")
    assert load_config(mine) == load_config(None, ["seed=3", "eta=1"])


def test_references_are_resolved_after_everything_is_merged(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine.yaml", "base: dr_grpo\ngconfig.max_new_tokens: 77\n")
    assert load_config(mine).actor.loss == {"name": "dr_grpo", "max_tokens": 77}
    assert load_config(mine, ["gconfig.max_new_tokens=9"]).actor.loss["max_tokens"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: mine.yaml\n", r"mine.yaml is its own base \(mine.yaml -> mine.yaml\); leave"),
        ("base: other.yaml\n", r"is its own base \(mine.yaml -> other.yaml -> mine.yaml\)"),
        ("base: tinny\n", r"^base in .*mine.yaml: unknown config 'tinny'; did you mean 'tiny'\?"),
        ("base: gone.yaml\n", r"^base in .*: .*gone.yaml does not exist; paths are relative to"),
        ("base: 3\n", "is 3, but must be the name of a shipped config, a path relative to"),
        ("base: [tiny, {a: b}]\n", "but must be the name of a shipped config, a path relative"),
        ("base: wrong.yaml\n", r"unknown setting 'sed' in .*wrong.yaml; did you mean 'seed'"),
    ],
)
def test_a_wrong_base_is_described_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "other.yaml", "base: mine.yaml\n")
    write(tmp_path, "wrong.yaml", "sed: 1\n")
    with pytest.raises(ValueError, match=message) as caught:
        load_config(write(tmp_path, "mine.yaml", text))
    assert "\n" not in str(caught.value)


def test_the_command_line_takes_several_configs_and_no_base() -> None:
    assert split_arguments(["dapo", "eta=0", "x.yaml", "seed"]) == (
        ["dapo", "x.yaml"],
        ["eta=0", "seed"],
    )
    with pytest.raises(ValueError, match="'base' in the overrides belongs into a file; on the com"):
        load_config("tiny", ["base=dapo"])


# --- mappings ------------------------------------------------------------------------------------

CLIP = {"name": "gspo", "clip_epsilon": [0.0003, 0.0004]}
CAPPED = {"name": "dapo", "correct": {"name": "truncate", "cap": 2.0}}


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        (["actor.loss.name=gspo", "actor.loss.clip_epsilon=[3e-4,4e-4]"], CLIP),
        (["actor.loss.clip_epsilon=[3e-4,4e-4]", "actor.loss.name=gspo"], CLIP),
        (["actor.loss={name: gspo, clip_epsilon: [3e-4, 4e-4]}"], CLIP),
        (["actor.loss=gspo", "actor.loss.clip_epsilon=[3e-4,4e-4]"], CLIP),
        (["actor.loss=gspo"], {"name": "gspo"}),
        ({"actor": {"loss": {"name": "gspo"}}}, {"name": "gspo"}),
        ({"actor.loss": "gspo"}, {"name": "gspo"}),
        (["actor.loss={}"], {}),
        (["actor.loss.correct.cap=3.0"], CAPPED | {"correct": {"name": "truncate", "cap": 3.0}}),
        (["actor.loss.correct=unbounded"], {"name": "dapo", "correct": "unbounded"}),
        (["actor.loss.correct={name: keep}"], {"name": "dapo", "correct": {"name": "keep"}}),
        (["actor.loss.clip_epsilon=0.1"], CAPPED | {"clip_epsilon": 0.1}),
        (["actor.loss.correct=[{name: a}]"], {"name": "dapo", "correct": [{"name": "a"}]}),
        (["seed=3"], CAPPED),
    ],
)
def test_a_name_starts_afresh_and_keywords_are_laid_over(
    tmp_path: Path, overrides: Any, loss: dict[str, Any]
) -> None:
    text = "actor:\n  loss: {name: dapo, correct: {name: truncate, cap: 2.0}}\n"
    assert load_config(write(tmp_path, "mine.yaml", text), overrides).actor.loss == loss
    if not isinstance(overrides, dict):
        nested = "base: mine.yaml\n" + "".join(
            f"{name}: {value}\n" for name, _, value in (one.partition("=") for one in overrides)
        )
        assert load_config(write(tmp_path, "next.yaml", nested)).actor.loss == loss


@pytest.mark.parametrize("name", ["dapo", "decoupled_gspo", "dr_grpo", "rloo"])
def test_what_is_written_is_read_back(tmp_path: Path, name: str) -> None:
    config = load_config(["tiny", name], ["actor.loss.correct=[{name: truncate, cap: 1e-5}]"])
    mine = write(tmp_path, "mine.yaml", to_yaml(config))
    assert load_config(mine) == config
    other = load_config("decoupled_cispo")
    assert load_config(["decoupled_cispo", write(tmp_path, "d.yaml", to_yaml(config, other))]) == (
        config
    )
    folder = RunFolder.create(config.with_settings({"run_dir": str(tmp_path)}))
    flat = folder.path / "config.yaml"
    assert "base:" not in flat.read_text()
    assert load_config(flat) == config.with_settings({"run_dir": str(tmp_path)})


def test_copies_share_no_mapping() -> None:
    config = load_config("dapo")
    copy = config.with_settings({"seed": 2})
    copy.actor.loss["clip_epsilon"] = 0.5
    assert config.actor.loss["clip_epsilon"] == [0.2, 0.28]
    assert TrainConfig().actor.loss == {}
