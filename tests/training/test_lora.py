"""Low-rank adapters: equal to the formula of the paper, and the weights under them do not move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_lab.engines.protocol import LoraShape
from areal_lab.engines.weights.folder import deduplicated_state
from areal_lab.engines.weights.verify_folder import adapter_parameters, check_folder, linear_layers
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import (
    add_lora,
    has_lora,
    lora_shape,
    merged_tensors,
    target_modules,
)
from areal_lab.training.merged_linear import Adapted, merged_product
from areal_lab.training.minibatch import pack_parts
from areal_lab.training.model import load_policy
from areal_lab.training.process.output import (
    ADAPTER_FOLDER,
    export,
    first_weights,
    save_folder,
)
from areal_lab.training.step import score, train_batch
from tests.training.tiny import (
    gradients,
    learner_for,
    parameters,
    random_batch,
    save_model,
    settings_for,
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 3, 12


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    return save_model(place / "model", kind=request.param, tied=request.param != "qwen3")


def adapted(
    folder: Path, *, targets: tuple[str, ...] = ALL, moved: bool = True, merged: bool = False
) -> Any:
    """A model with adapters; after `moved` they are not zero."""
    torch.manual_seed(1)
    model = add_lora(load_policy(folder), rank=RANK, alpha=ALPHA, targets=targets, merged=merged)
    if moved:
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_B" in name:
                    value.normal_(std=0.1)
    return model


def matrices(model: Any, layer: str) -> tuple[Tensor, Tensor]:
    """A and B of a layer."""
    found = model.get_submodule(layer)
    return found.lora_A["default"].weight, found.lora_B["default"].weight


def learner_of(model: Any, folder: Path, **changes: Any) -> Learner:
    return make_learner(model, settings_for(folder, **changes))


@pytest.mark.parametrize("merged", [False, True])
def test_the_gradients_are_those_of_the_paper(folder: Path, merged: bool) -> None:
    """With W' = W + (alpha / r) B A: dL/dA = (alpha / r) B^T dL/dW', dL/dB = (alpha / r) dL/dW' A^T
    (arXiv 2106.09685, eq. 3, and the chain rule)."""
    model = adapted(folder, merged=merged)
    with_adapters = learner_of(model, folder)
    plain = learner_for(folder)
    plain.model.load_state_dict(merged_tensors(model), strict=False)
    before = {layer: (a.clone(), b.clone()) for layer, (a, b) in layers(model).items()}
    request = random_batch()

    outcome = train_batch(with_adapters, request)
    reference = train_batch(plain, request)

    assert outcome.metrics["loss"] == pytest.approx(reference.metrics["loss"], abs=1e-5)
    full = gradients(plain.model)
    for layer, (a, b) in before.items():
        slope = full[f"{layer}.weight"] * ALPHA / RANK
        now_a, now_b = matrices(model, layer)
        torch.testing.assert_close(now_a.grad, b.T @ slope, atol=1e-5, rtol=1e-3, msg=layer)
        torch.testing.assert_close(now_b.grad, slope @ a.T, atol=1e-5, rtol=1e-3, msg=layer)


def layers(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    names = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    return {name: matrices(model, name) for name in names}


def test_a_new_adapter_changes_nothing_and_a_step_moves_nothing_but_adapters(
    folder: Path,
) -> None:
    base = {name: value.clone() for name, value in deduplicated_state(load_policy(folder)).items()}
    model = adapted(folder, moved=False)
    assert has_lora(model)
    assert not has_lora(load_policy(folder))
    first = merged_tensors(model)
    assert list(first) == list(base)
    assert all(torch.equal(first[name], value) for name, value in base.items())

    learner = learner_of(model, folder)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained == {name for name in parameters(model) if ".lora_" in name}
    before = parameters(model)
    metrics = [train_batch(learner, random_batch(seed)).metrics for seed in range(3)]
    after = parameters(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == trained
    assert all(step["grad_norm"] > 0 for step in metrics)

    now = merged_tensors(model)
    changed = {name for name in now if not torch.equal(now[name], base[name])}
    assert changed == {f"{layer}.weight" for layer in layers(model)}


# peft 0.21 asks transformers 5 by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_merged_weights_and_the_adapter_are_the_model(folder: Path, tmp_path: Path) -> None:
    """Three ways to the same log-probs: adapters beside the weights, merged ones in a checkpoint,
    and peft with the adapter of the checkpoint."""
    model = adapted(folder, targets=("q_proj", "down_proj"))
    tokens = torch.randint(0, 97, (2, 30), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(tokens).logits
    save_folder(model, folder, tmp_path / "checkpoint")

    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    base: Any = AutoModelForCausalLM.from_pretrained(folder)
    beside = PeftModel.from_pretrained(base, str(tmp_path / "checkpoint" / ADAPTER_FOLDER))
    with torch.no_grad():
        torch.testing.assert_close(saved(tokens).logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(beside(tokens).logits, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(
            AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, expected, atol=1e-2
        )
    assert {name for name in saved.state_dict() if "lora" in name} == set()


@pytest.mark.parametrize("transfer", ["folder", "adapter"])
def test_weights_for_engines(folder: Path, tmp_path: Path, transfer: str) -> None:
    model = adapted(folder, targets=("q_proj", "v_proj"))
    learner = learner_of(model, folder, more={"rollout.transfer": transfer}, weights_root=tmp_path)
    weights: Any = export(learner, 4, None)
    first = first_weights(learner, 4, weights)

    check_folder(weights)  # the checksum matches the files
    assert weights.version == first.version == 4
    if transfer == "folder":
        assert weights.adapter is first.adapter is None
        assert first.path == weights.path
        read = load_file(weights.path / "model.safetensors")
        assert read.keys() == merged_tensors(model).keys()
        return
    assert (
        weights.adapter
        == first.adapter
        == LoraShape(rank=RANK, target_modules=("q_proj", "v_proj"))
    )
    assert first.path == folder
    read = load_file(weights.path / "adapter_model.safetensors")
    assert weights.size_bytes == sum(value.nbytes for value in read.values())
    assert weights.size_bytes < sum(v.nbytes for v in merged_tensors(model).values()) / 4
    a, _ = matrices(model, "model.layers.0.self_attn.q_proj")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert torch.equal(read[name], a)
    config = json.loads((weights.path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (
        RANK, ALPHA, ["q_proj", "v_proj"],
    )  # fmt: skip


@pytest.mark.parametrize("merged", [False, True])
def test_gradient_checkpointing_changes_nothing(folder: Path, merged: bool) -> None:
    plain, checkpointed = (
        learner_of(
            add_lora(
                load_policy(folder, gradient_checkpointing=again),
                rank=2,
                alpha=2,
                targets=ALL,
                merged=merged,
            ),
            folder,
        )
        for again in (False, True)
    )
    checkpointed.model.load_state_dict(plain.model.state_dict())
    for learner in (plain, checkpointed):
        train_batch(learner, random_batch())
    here, there = gradients(plain.model), gradients(checkpointed.model)
    assert here.keys() == there.keys()
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, atol=1e-6, rtol=1e-4)


def test_in_bfloat16_the_trainer_computes_what_engines_with_merged_weights_do(
    folder: Path,
) -> None:
    """Each log-prob to the last bit; the sum of two products is off by the rounding of weights."""
    request = random_batch()
    scored = {}
    for name in ("merged", "apart", "engine"):
        model = adapted(folder, merged=name == "merged")
        if name == "engine":
            plain = load_policy(folder)
            plain.load_state_dict(merged_tensors(model), strict=False)
            model = plain
        learner = learner_of(model, folder, dtype="bfloat16")
        everyone = list(range(len(request.trajectories)))
        (part,) = pack_parts(request.trajectories, everyone, cost=learner.cost, max_tokens=4096)
        scored[name] = score(learner, part)
    assert torch.equal(scored["merged"], scored["engine"])
    assert (scored["apart"] - scored["engine"]).abs().max() > 1e-3


@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 4),
    biased=st.booleans(),
    scale=st.floats(-3, 3),
    seed=st.integers(0, 99),
)
def test_the_product_has_the_gradients_of_its_formula(
    sizes: tuple[int, int, int, int], biased: bool, scale: float, seed: int
) -> None:
    tokens, inputs, outputs, rank = sizes
    torch.manual_seed(seed)
    x, a, b = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, tokens, inputs), (rank, inputs), (outputs, rank))
    )
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    bias = torch.randn(outputs, dtype=torch.float64) if biased else None

    def product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return merged_product(x, Adapted(weight, bias, a, b, scale), torch.float64)

    assert torch.autograd.gradcheck(product, (x, a, b))
    expected = x @ (weight + scale * b @ a).T + (0 if bias is None else bias)
    torch.testing.assert_close(product(x, a, b), expected)


def test_which_layers_get_one(folder: Path) -> None:
    model = load_policy(folder)
    assert target_modules(model, ["all-linear"]) == ALL
    assert target_modules(model, ["down_proj", "q_proj"]) == ("q_proj", "down_proj")
    for wrong, words in (
        (["lm_head"], "'lm_head' is not a linear layer of this model that can have an adapter"),
        (["q_proj", "query"], "'query' is not a linear layer .*; use some of q_proj, k_proj"),
        (["all-linear", "q_proj"], "'all-linear' is not a linear layer"),
        ([], "names no linear layer"),
    ):
        with pytest.raises(ValueError, match=words):
            target_modules(model, wrong)
    chosen = target_modules(model, ["v_proj"])
    shape = lora_shape(add_lora(model, rank=2, alpha=2, targets=chosen))
    assert shape == LoraShape(rank=2, target_modules=("v_proj",))


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
def test_the_size_of_an_adapter_shows_in_the_models_headers(
    folder: Path, targets: tuple[str, ...]
) -> None:
    assert set(linear_layers(folder)) == set(ALL)
    wanted = LoraShape(rank=RANK, target_modules=targets)
    model = adapted(folder, targets=target_modules(load_policy(folder), targets))
    numbers = sum(a.numel() + b.numel() for a, b in layers(model).values())
    assert adapter_parameters(folder, wanted) == numbers
