"""Compiled parts of layers: the same numbers, and few graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from areal_lab.training import attention
from areal_lab.training.attention import tree_layout
from areal_lab.training.decoder_layers import Checkpointing
from areal_lab.training.learner import make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.step import train_batch
from tests.training.test_attention import attended, packed_trees, states
from tests.training.tiny import gradients, random_batch, save_model, settings_for

# torch warns of what it does itself while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated"),
]
BATCHES = 5
CASES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "more": {}},
    "qwen2, checkpointed": {"kind": "qwen2", "gradient_checkpointing": True},
    "qwen3, selective": {"kind": "qwen3", "gradient_checkpointing": "selective"},
    "bfloat16": {"kind": "llama", "dtype": "bfloat16"},
    "LoRA": {"kind": "llama", "use_lora": True, "lora_rank": 2},
    "critic, reference": {"kind": "llama", "advantage": "gae", "kl_loss_coef": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_without_compilation_and_graphs_are_few(tmp_path: Path, case: str) -> None:
    """Batches of five sizes; a part of a layer has two graphs with a gradient and two without."""
    changes = dict(CASES[case])
    folder = save_model(tmp_path / "model", kind=changes.pop("kind"))
    checkpointing: Checkpointing = changes.get("gradient_checkpointing", False)
    torch._dynamo.reset()
    counters.clear()
    outcomes = []
    for compiled in (False, True):
        settings = settings_for(folder, max_tokens_per_mb=40, compile=compiled, **changes)
        model = load_policy(folder, gradient_checkpointing=checkpointing)
        names = [*model.state_dict()]
        if settings.actor.use_lora:
            torch.manual_seed(0)
            targets = target_modules(model, settings.actor.target_modules)
            add_lora(model, rank=2, alpha=2, targets=targets, merged=True)
        else:
            assert names == [*model.state_dict()]
        learner = make_learner(model, settings, compile_backend="aot_eager")
        metrics = []
        for seed in range(BATCHES):
            outcome = train_batch(learner, random_batch(seed, groups=2 + 2 * seed))
            metrics.append(outcome.metrics)
        outcomes.append((metrics, gradients(model)))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
    (plain, expected), (others, found) = outcomes
    assert len({one["packed_tokens"] for one in plain}) == BATCHES
    exact = settings.actor.dtype == "float32"
    for one, other in zip(plain, others, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-6 if exact else 1e-2)
    for name, gradient in expected.items():
        atol = 1e-6 if exact else 1e-2
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=1e-4 if exact else 0.1)
    assert not counters["graph_break"]
    kinds = 3 * (2 if case == "critic, reference" else 1)
    assert counters["stats"]["unique_graphs"] <= 4 * kinds


def test_batches_of_all_lengths_share_two_graphs_of_flex_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(flex_attention, backend="aot_eager")
    monkeypatch.setattr(attention, "_flex", lambda _: compiled)
    lengths = set()
    for seed in range(BATCHES):
        packed = packed_trees(seed, rows=9 + 3 * seed, longest=40 + 7 * seed)
        lengths.add(len(packed.tokens))
        given = states(packed, seed)
        expected = attended(tree_layout(packed, asked="sdpa"), given)
        with torch.no_grad():
            found = attended(tree_layout(packed, asked="flex"), given)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len(lengths) == BATCHES
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
