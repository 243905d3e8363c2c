"""The included models for co-simulation know their tasks, and err as often as their script says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from areal_lab.data.tokenize import TextCodec
from areal_lab.models.locate import INCLUDED_MODELS
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
