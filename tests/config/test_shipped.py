"""Settings that travel with the package: by name from anywhere, by path in a checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.config.load import load_config
from areal_lab.config.offline import KINDS, load_offline
from areal_lab.config.shipped import (
    CONFIGS,
    cosim_configs,
    offline_configs,
    plan_questions,
    recipes,
    studies,
    training_configs,
)
from areal_lab.sweep.study import load_study
from cosim.load import load_cosim
from simulator.plan.schema import load_plan


def test_shipped_settings_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("arithmetic", "Arithmetic"):
        assert load_config(name) == load_config(CONFIGS / "arithmetic.yaml")
    Path("arithmetic").mkdir()  # a folder of that name is not meant
    assert load_config("arithmetic") == load_config(CONFIGS / "arithmetic.yaml")
    Path("arithmetic").rmdir()
    Path("arithmetic").write_text("seed: 5\n")
    assert load_config("arithmetic").seed == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "arithmetic2",
            "unknown config 'arithmetic2'; did you mean 'arithmetic'?",
        ),
        ("dapoo", "unknown config 'dapoo'; did you mean 'dapo'"),
        (
            "plan_example",
            "unknown config 'plan_example'; known are arithmetic, gsm8k, rendered_sums, tiny, ",
        ),
        ("mine.yaml", "mine.yaml does not exist (looked in "),
        (Path("gsm8k"), "gsm8k does not exist (looked in "),
        ("configs/gsm8k.yaml", "; the shipped config is named 'gsm8k'"),
    ],
)
def test_an_unknown_name_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | Path, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_config(source)
    assert "\n" not in str(caught.value)


def test_every_shipped_file_is_a_config_a_plan_or_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in training_configs():
        assert load_config(name).experiment_name == name
    for name in plan_questions():
        assert load_plan(name).name == name
    for name in cosim_configs():
        assert load_cosim(name).experiment_name == name
    for name in studies():
        assert load_study(name).config.name == name.removeprefix("study_")
    for command in KINDS:
        for name in offline_configs(command):
            assert load_offline(command, name).experiment_name == name
    shipped = {
        *(*training_configs(), *plan_questions(), *cosim_configs(), *studies()),
        *offline_configs(),
    }
    files = {*CONFIGS.glob("*.yaml"), *(CONFIGS / "agents").glob("*.yaml")}
    assert {path.stem for path in files} == shipped
    assert {path.name for path in CONFIGS.iterdir() if path.is_dir()} == {"agents", "recipes"}
    assert not shipped & recipes().keys()
    assert {path.stem for path in (CONFIGS / "recipes").iterdir()} == recipes().keys()


def test_a_checkout_has_them_at_its_root_too() -> None:
    assert (CONFIGS.parents[1] / "configs").resolve() == CONFIGS.resolve()


@pytest.mark.parametrize(
    ("command", "names"),
    [("train", training_configs()), ("plan", plan_questions()), ("cosim", cosim_configs())],
)
def test_the_help_of_a_command_lists_them(command: str, names: dict[str, Path]) -> None:
    text = " ".join(CliRunner().invoke(app, [command, "--help"]).stdout.split())
    assert f": {', '.join(names)}." in text
