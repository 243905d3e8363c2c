"""The packed forward pass along prefix trees equals one padded row per sequence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lab.data.batch import PackedBatch, input_tokens, pack, pad
from areal_lab.data.prefix_tree import ForwardCost, grow_trees
from areal_lab.training.decoder_layers import Checkpointing
from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.model import load_policy, load_value_model
from tests.training.tiny import gradients, random_batch, save_model

CHECKPOINTING: list[Checkpointing] = [False, True, "selective"]
SHARE = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=0.0)
ALONE = ForwardCost(linear_flops_per_token=0.0, attention_flops_per_pair=1.0)


def packed_batch(cost: ForwardCost, max_tokens: int = 10_000) -> PackedBatch:
    trajectories = random_batch().trajectories
    rows = [input_tokens(trajectory) for trajectory in trajectories]
    return pack(trajectories, grow_trees(rows, cost, max_tokens=max_tokens))


def padded_logprobs(model: Any, temperature: float) -> torch.Tensor:
    """The plain way: one row per sequence, all logits, transformers' own attention."""
    padded = pad(random_batch().trajectories)
    model.set_attn_implementation("sdpa")
    logits = model(padded.tokens, attention_mask=padded.attention_mask.long()).logits
    model.set_attn_implementation("areal_lab_tree")
    logprobs = torch.log_softmax(logits[:, :-1] / temperature, dim=-1)
    chosen = logprobs.gather(-1, padded.tokens[:, 1:, None])[..., 0]
    return chosen[padded.response_mask[:, 1:]]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_value_is_the_output_before_its_token(tmp_path: Path, kind: str) -> None:
    model: Any = load_value_model(save_model(tmp_path / "model", kind=kind))
    torch.nn.init.normal_(model.score.weight)
    padded = pad(random_batch().trajectories)
    model.set_attn_implementation("sdpa")
    body = model.get_submodule(model.base_model_prefix)
    outputs = body(padded.tokens, attention_mask=padded.attention_mask.long()).last_hidden_state
    expected = model.score(outputs)[:, :-1, 0][padded.response_mask[:, 1:]]
    model.set_attn_implementation("areal_lab_tree")
    got = PackedValues(model)(packed_batch(SHARE, max_tokens=25))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    low = PackedValues(model, dtype=torch.bfloat16)(packed_batch(SHARE))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, expected, atol=0.5, rtol=0.05)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("cost", "max_tokens"), [(SHARE, 10_000), (SHARE, 25), (ALONE, 10_000)])
def test_packed_equals_padded_in_values_and_gradients(
    tmp_path: Path, kind: str, tied: bool, cost: ForwardCost, max_tokens: int
) -> None:
    model = load_policy(save_model(tmp_path / "model", kind=kind, tied=tied))
    expected = padded_logprobs(model, temperature=0.7)
    weights = torch.linspace(-1, 1, len(expected)) / len(expected)
    (weights * expected).sum().backward()
    expected_gradients = gradients(model)
    model.zero_grad()

    packed = packed_batch(cost, max_tokens)
    got = PackedPolicy(model, temperature=0.7, dtype=torch.float32)(packed).logprobs
    (weights * got).sum().backward()

    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-5, rtol=1e-5)


def test_the_cases_above_have_branches_chains_and_several_trees() -> None:
    shared, cut, alone = (
        packed_batch(cost, tokens) for cost, tokens in ((SHARE, 10_000), (SHARE, 25), (ALONE, 9999))
    )
    assert len(shared.trees) == 1
    assert shared.trees[0].branching
    assert len(cut.trees) > 1
    assert any(tree.branching for tree in cut.trees)
    assert len(alone.trees) > len(cut.trees)
    assert not any(tree.branching for tree in alone.trees)
    assert len(shared.tokens) < len(cut.tokens) < len(alone.tokens)
    assert len(shared.targets) < len(shared.prediction)


def test_entropy_is_that_of_the_distribution_at_the_temperature(tmp_path: Path) -> None:
    model: Any = load_policy(save_model(tmp_path / "model"))
    got = PackedPolicy(model, temperature=0.7, dtype=torch.float32)(packed_batch(SHARE)).entropy
    padded = pad(random_batch().trajectories)
    model.set_attn_implementation("sdpa")
    logits = model(padded.tokens, attention_mask=padded.attention_mask.long()).logits
    entropy = torch.distributions.Categorical(logits=logits[:, :-1] / 0.7).entropy()
    torch.testing.assert_close(got, entropy[padded.response_mask[:, 1:]], atol=1e-5, rtol=1e-5)
    assert not got.requires_grad


def test_bfloat16_compute_is_close_and_leaves_float32_weights(tmp_path: Path) -> None:
    model = load_policy(save_model(tmp_path / "model"))
    exact = PackedPolicy(model, temperature=1.0, dtype=torch.float32)(packed_batch(SHARE)).logprobs
    got = PackedPolicy(model, temperature=1.0, dtype=torch.bfloat16)(packed_batch(SHARE)).logprobs
    assert got.dtype == torch.float32
    assert 0 < (got - exact).abs().max() < 0.3
    got.sum().backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_checkpointing_changes_memory_only(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    folder = save_model(tmp_path / "model", kind=kind)
    results: list[tuple[Any, Any, list[str]]] = []
    for checkpointing in CHECKPOINTING:
        model = load_policy(folder, gradient_checkpointing=checkpointing)
        got = PackedPolicy(model, temperature=1.0, dtype=dtype)(packed_batch(SHARE))
        got.logprobs.mean().backward()
        results.append((got.logprobs, gradients(model), [*model.state_dict()]))
    logprobs, expected, names = results[0]
    for others, found, other_names in results[1:]:
        assert torch.equal(logprobs, others)
        assert names == other_names
        for name, gradient in expected.items():
            torch.testing.assert_close(gradient, found[name], atol=5e-7, rtol=0)


def test_full_checkpointing_computes_every_product_again_and_selective_half_of_them(
    tmp_path: Path,
) -> None:
    """Matrix products of the forward pass, in both passes, over two layers of seven."""
    folder = save_model(tmp_path / "model")
    products, attentions = {}, {}
    for checkpointing in CHECKPOINTING:
        model = load_policy(folder, gradient_checkpointing=checkpointing)
        policy, counted = PackedPolicy(model), Operations()
        with counted:
            policy(packed_batch(SHARE)).logprobs.sum().backward()
        products[checkpointing] = counted.seen["mm"]
        attentions[checkpointing] = counted.seen["_scaled_dot_product_flash_attention_for_cpu"]
    # The last product of a layer is asked for by nothing, so it is not computed again.
    assert products[True] - products[False] == 2 * 6
    assert products["selective"] - products[False] == 2 * 3
    assert attentions[True] == 2 * attentions[False] == 2 * attentions["selective"]


class Operations(TorchDispatchMode):
    """Counts what is computed, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.__name__.split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def test_a_plain_call_with_tree_attention_is_refused(tmp_path: Path) -> None:
    model: Any = load_policy(save_model(tmp_path / "model"))
    with pytest.raises(ValueError, match="packed batches only"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_window_shorter_than_the_sequences_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", kind="qwen2")
    config = json.loads((folder / "config.json").read_text())
    sliding = {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}

    def loaded_with(window: int) -> Any:
        changed = {**config, **sliding, "sliding_window": window}
        (folder / "config.json").write_text(json.dumps(changed))
        return load_policy(folder)

    PackedPolicy(loaded_with(1000), temperature=1.0, dtype=torch.float32)(packed_batch(SHARE))
    with pytest.raises(ValueError, match="sliding window of 4 tokens"):
        PackedPolicy(loaded_with(4), temperature=1.0, dtype=torch.float32)(packed_batch(SHARE))
