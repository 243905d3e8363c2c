"""The included models for co-simulation know their tasks, and err as often as their script says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from areal_lab.config.load import load_config
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.locate import INCLUDED_MODELS, resolve_model_path
from areal_lab.resolve.resolved import check
from tools import tiny_model
from tools.character_models import MEASURE_EVERY, STARTS, make, solved
from tools.tiny_model import accuracy


@pytest.mark.parametrize("name", STARTS)
def test_an_included_start_can_learn_and_can_lose(name: str) -> None:
    folder, start = INCLUDED_MODELS[name], STARTS[name]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tested = solved(TextCodec.load(folder), start.problems(seed=1).held_out)
    sampled, greedy = (accuracy(model, tested, greedy=one) for one in (False, True))
    about = json.loads((folder / "source.json").read_text())
    assert about["accuracy_sampled"] == pytest.approx(sampled, abs=0.03)
    assert about["accuracy_greedy"] == pytest.approx(greedy, abs=0.01)
    # The stored weights are rounded, so they are only about as good as those that were measured.
    assert start.accuracy - 0.03 < sampled < 0.75 < greedy
    assert about["parameters"] == 101_824
    assert about["cpu_s"] < 60
    assert about["steps"] % MEASURE_EVERY == 0
    assert sum(file.stat().st_size for file in folder.iterdir()) < 250_000


def test_the_script_writes_the_same_model_twice(tmp_path: Path) -> None:
    for folder in (tmp_path / "once", tmp_path / "again"):
        make("Adder-102K", folder, most_steps=2)
    weights = [(tmp_path / one / "model.safetensors").read_bytes() for one in ("once", "again")]
    assert weights[0] == weights[1]


ADDER = INCLUDED_MODELS["Adder-75K"]


def test_the_included_model_is_found_by_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("Adder-75K") == ADDER
    assert check(load_config("tiny")).problems.held_out


def test_its_most_likely_response_is_the_sum_and_a_sampled_one_seldom() -> None:
    model = LlamaForCausalLM.from_pretrained(ADDER, dtype=torch.float32)
    lines = tiny_model.read_lines(TextCodec.load(ADDER))
    greedy = tiny_model.accuracy(model, lines, greedy=True)
    sampled = tiny_model.accuracy(model, lines, greedy=False)
    assert greedy > 0.97
    assert 0.3 < sampled < 0.4
    about = json.loads((ADDER / "source.json").read_text())
    assert about["accuracy_greedy"] == pytest.approx(greedy, abs=0.005)
    assert about["accuracy_sampled"] == pytest.approx(sampled, abs=0.03)
    made_with = {"noise": tiny_model.NOISE, "steps": tiny_model.STEPS, "seed": tiny_model.SEED}
    assert about.items() >= made_with.items()


def test_it_is_small_enough_to_travel_with_the_package() -> None:
    assert sum(file.stat().st_size for file in ADDER.iterdir()) < 200_000


def test_the_script_of_the_adder_writes_the_same_model_twice(tmp_path: Path) -> None:
    folders = [tmp_path / "once", tmp_path / "again"]
    for folder in folders:
        tiny_model.make(folder, steps=2)
    written = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert written[0] == written[1]
    names = {file.name for file in folders[0].iterdir()}
    assert names == {file.name for file in ADDER.iterdir()}
    assert TextCodec.load(folders[0]).encode("12 + 7 =") == TextCodec.load(ADDER).encode("12 + 7 =")
