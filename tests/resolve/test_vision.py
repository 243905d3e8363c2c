"""What does not work with images is one line, before any process starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.data.small_tasks import rendered_sums
from areal_lab.engines.launch.backends import SGLANG, ServerOptions
from areal_lab.models.locate import INCLUDED_MODELS
from areal_lab.resolve.placement import place_run
from areal_lab.resolve.resolved import check
from areal_lab.resolve.vision import check_vision_model
from cosim.load import resolve_cosim
from cosim.schema import CosimConfig
from tests.resolve.test_placement import machine

READER = INCLUDED_MODELS["Reader-574K"]
SMALL = ("dataset.size=40", "dataset.eval_size=8", "dataset.batch_size=2")


def configured(*overrides: str) -> TrainConfig:
    return load_config("rendered_sums", [*SMALL, *overrides])


def refused(*overrides: str) -> str:
    """The lines of the refusal."""
    with pytest.raises(ConfigError) as raised:
        check(configured(*overrides))
    return "\n".join(problem.message for problem in raised.value.problems)


def test_the_shipped_config_is_accepted() -> None:
    assert len(check(configured()).problems.train) == 32
    check(configured("rollout.workflow={name: multi_turn}"))
    check(configured("actor.use_lora=true", "allocation_mode=embedded:d1+fsdp:d2"))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("actor.path=Adder-102K",), "but the model has none; choose a Qwen2-VL"),
        (("rollout.workflow={name: tool_use}",), "problems with images need none, or multi_turn"),
        (("allocation_mode=embedded:d1+fsdp:d1c2",), "write fsdp:d2"),
        (("actor.advantage=gae",), "set critic.share_body=true"),
        (
            ("actor.kl_loss_coef=0.1", "ref.path=Adder-102K"),
            "ref.path Adder-102K is no vision-language model",
        ),
        (("teacher.path=Sorter-102K",), "teacher.path Sorter-102K is no vision-language model"),
        (("gconfig.max_new_tokens=253",), "a prompt has 5 tokens with its images"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], why: str) -> None:
    lines = refused(*overrides)
    assert why in lines
    assert all(len(line) < 400 for line in lines.splitlines())


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("rollout.backend=vllm",), "vllm has not been tried with one; set it to embedded or sgl"),
        (("rollout.backend=sglang", "rollout.pause_mode=abort"), "set rollout.pause_mode=retract"),
        (("rollout.addresses=[http://127.0.0.1:1]",), "SGLANG_VLM_CACHE_SIZE_MB=0"),
        (
            ("rollout.backend=sglang", "rollout.transfer=adapter", "rollout.pause_mode=abort"),
            "rollout.transfer is adapter, which has not been tried",
        ),
        (("actor.compile=true",), "actor.compile is true, but has not been tried"),
    ],
)
def test_engines_and_settings_that_were_not_tried(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], why: str
) -> None:
    monkeypatch.setenv("CXX", "true")  # a program that is on every machine
    placed = place_run(configured(*overrides), machine())
    found = [one.message for one in check_vision_model(placed, READER)]
    assert any(why in line for line in found), found
    assert not list(check_vision_model(placed, INCLUDED_MODELS["Adder-102K"]))


def test_a_model_without_its_image_settings_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(READER, folder)
    (folder / "preprocessor_config.json").unlink()
    assert "without preprocessor_config.json" in refused(f"actor.path={folder}")


def test_rows_without_images_need_no_vision(tmp_path: Path) -> None:
    """And a vision-language model may learn from text."""
    rows = tmp_path / "rows.jsonl"
    lines = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(9)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = ("dataset.type=jsonl", f"dataset.path={rows}", "dataset.eval_size=2")
    check(configured(*text))
    check(configured(*text, "actor.path=Adder-102K"))


def test_co_simulation_refuses_images() -> None:
    config = CosimConfig().with_settings(
        {"actor.path": str(READER), "dataset.type": "rendered_sums", "dataset.size": 40}
    )
    with pytest.raises(ConfigError, match="co-simulation generates text only"):
        resolve_cosim(config)
    assert rendered_sums(size=40, seed=1).train[0].images


def test_a_vision_server_is_started_as_one() -> None:
    options = ServerOptions(model=READER, images=True)
    assert "--enable-multimodal" in SGLANG.arguments(options)
    assert "--enable-multimodal" not in SGLANG.arguments(ServerOptions(model=READER))
    # Otherwise features of older weights would be used.
    assert SGLANG.environment(options)["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
