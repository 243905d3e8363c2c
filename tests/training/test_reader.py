"""The included vision-language model reads and adds as often as its script says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2VLForConditionalGeneration

from areal_lab.data.tokenize import TextCodec
from areal_lab.models.locate import INCLUDED_MODELS, resolve_model_path
from tools import vision_model
from tools.vision_model import ACCURACY, MEASURE_EVERY, TESTED, accuracy, make

FOLDER = INCLUDED_MODELS["Reader-574K"]


def test_the_included_start_can_learn() -> None:
    assert resolve_model_path("Reader-574K") == FOLDER
    model = Qwen2VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    # The held-out pictures are drawn first, however many follow.
    problems = vision_model.rendered_sums(size=TESTED + 1, eval_size=TESTED, seed=vision_model.SEED)
    tested = vision_model.read_pictures(FOLDER, problems.held_out)
    sampled, greedy = (accuracy(model, tested, greedy=one) for one in (False, True))
    about = json.loads((FOLDER / "source.json").read_text())
    # Another version of Pillow may draw otherwise.
    assert about["accuracy_sampled"] == pytest.approx(sampled, abs=0.03)
    assert about["accuracy_greedy"] == pytest.approx(greedy, abs=0.03)
    assert ACCURACY - 0.03 < sampled < 0.55 < greedy < 0.7
    assert about["parameters"] == 574_208
    assert about["steps"] % MEASURE_EVERY == 0
    assert about["made_by"].startswith("python -m tools.vision_model")
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_200_000


def test_its_tokenizer_reads_its_own_text() -> None:
    """SGLang turns prompts with images into text and back."""
    codec = TextCodec.load(FOLDER)
    every = tuple(range(codec.vocabulary))
    assert codec.encode(codec.decode_all(every)) == every


def test_the_script_writes_the_same_model_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_model, "PICTURES", 40)
    monkeypatch.setattr(vision_model, "TESTED", 8)
    for folder in (tmp_path / "once", tmp_path / "again"):
        make(folder, most_steps=2)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "preprocessor_config.json"):
        contents = [(tmp_path / one / file).read_bytes() for one in ("once", "again")]
        assert contents[0] == contents[1]
    assert (tmp_path / "once" / "tokenizer.json").read_bytes() == (
        FOLDER / "tokenizer.json"
    ).read_bytes()
