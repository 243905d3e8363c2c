"""Models that the embedded engine would compute wrongly are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from areal_lab.engines.embedded.loading import end_token_ids, load_model
from areal_lab.engines.weights.folder import CorruptWeights, write_weights
from tests.engines.tiny import END_TOKEN, SHAPE, tiny_model


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    folder = write_weights(model, tmp_path, 0, dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot run mistral models without full attention"):
        load_model(folder.path, torch.float32)


def test_rotary_embeddings_that_change_with_the_length_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope))
    folder = write_weights(model, tmp_path, 0, dtype=torch.float32)
    with pytest.raises(ValueError, match="it has dynamic"):
        load_model(folder.path, torch.float32)


def test_a_damaged_folder_is_not_loaded(tmp_path: Path) -> None:
    folder = write_weights(tiny_model(), tmp_path, 0, dtype=torch.float32)
    manifest = folder.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace("xxh3_128:", "xxh3_128:0"))
    with pytest.raises(CorruptWeights, match="is damaged"):
        load_model(folder.path, torch.float32)


def test_a_loaded_model_has_the_type_asked_for(tmp_path: Path) -> None:
    folder = write_weights(tiny_model(), tmp_path, 0, dtype=torch.float32)
    model = load_model(folder.path, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert end_token_ids(model) == {END_TOKEN}
    assert not any(weight.requires_grad for weight in model.parameters())
