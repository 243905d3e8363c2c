"""`areal-lab sft`, `rm` and `dpo`: settings, errors in one line, nothing is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.config.dump import format_settings
from areal_lab.config.offline import ALIASES, KINDS, load_offline
from areal_lab.config.problem import ConfigError


@pytest.mark.parametrize(
    ("command", "setting"),
    [("sft", "train_on"), ("rm", "center_rewards_coefficient"), ("dpo", "label_smoothing")],
)
def test_help_lists_the_settings(command: str, setting: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"]).stdout
    assert format_settings(KINDS[command], ALIASES) in text
    assert f"\n  {setting} = " in text
    assert f"{command}_adder" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft"], "error: give a CONFIG (sft_adder, a file), settings"),
        (["sft", "sft_addr"], "unknown config of areal-lab sft 'sft_addr'; did you mean"),
        (["rm", "sft_adder"], "unknown config of areal-lab rm 'sft_adder'"),
        (["dpo", "dpo_adder", "bta=1"], "unknown setting 'bta'"),
        (["dpo", "dpo_adder", "beta=-1"], "beta is -1, but must be a finite number > 0"),
        (["sft", "train_dataset.path=nowhere.jsonl"], "dataset: nowhere.jsonl does not exist"),
        (["sft", "sft_adder", "--resume", "x"], "'sft_adder' is a config, but --resume takes"),
        (["sft", "--resume", "nowhere"], "nowhere is not a run folder: it has no config.yaml"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [["sft", "train_dataset.path=nowhere.jsonl"], ["train", "gsm8k", "dataset.path=nowhere.jsonl"]],
)
def test_a_mistake_is_told_before_a_model_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_LAB_CACHE", str(tmp_path / "cache"))
    model = "actor.path=SmolLM2-135M-Instruct"
    result = CliRunner().invoke(app, [*arguments, model])
    assert result.exit_code == 2
    assert "nowhere.jsonl does not exist" in result.stderr
    assert "converting" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_offline("dpo", "dpo_adder", ["loss=kto", "dataset.batch_size=0"])
    assert len(caught.value.problems) == 2
    assert re.search("loss is 'kto', but must be one of", str(caught.value))
