"""A step is that of a slow loop over whole sequences, however the batch is cut."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_lab.config.offline import DPOConfig, OfflineConfig, RewardModelConfig, SFTConfig
from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.offline.examples import Example, Item, Span
from areal_lab.offline.objectives import DPO, make_objective
from areal_lab.offline.trainee import (
    Network,
    Trainee,
    evaluate,
    load_network,
    make_trainee,
    reference_logprobs,
    train_step,
)
from areal_lab.training.ranks import ALONE, Ranks
from tests.training.tiny import VOCABULARY, gradients, save_model

APART = ForwardCost(linear_flops_per_token=1.0, attention_flops_per_pair=1e6)
"""Attention so dear that no two sequences share a tree."""
CONFIGS: dict[str, OfflineConfig] = {
    "sft": SFTConfig(),
    "rm": RewardModelConfig(center_rewards_coefficient=0.1),
    "dpo": DPOConfig(beta=0.5, label_smoothing=0.1),
    "ipo": DPOConfig(loss="ipo", beta=0.2),
    "normalized": DPOConfig(beta=2.0, length_normalized=True),
}


def make_items(kind: str, seed: int = 0, count: int = 9) -> list[Item]:
    """Rows with shared prompts and responses of several lengths; of pairs also two responses."""
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(draw.randint(least, most))]

    shared, items = tokens(4, 4), []
    for _ in range(count):
        prompt = shared + tokens(1, 3)
        responses = [tokens(1, 6) for _ in range(1 if kind == "sft" else 2)]
        examples = []
        for response in responses:
            whole = array("i", prompt + response)
            spans = (Span(len(prompt), len(whole)),)
            if kind == "sft" and len(response) > 4:  # two turns
                spans = (Span(len(prompt), len(prompt) + 1), Span(len(prompt) + 3, len(whole)))
            examples.append(Example(whole, () if kind == "rm" else spans))
        items.append(Item(tuple(examples), draw.choice([0.0, 0.5])))
    return items


def load(folder: Path, kind: str, ranks: Ranks = ALONE, **actor: Any) -> Network:
    """The network of a case."""
    numbers = CONFIGS[kind].actor.with_settings({"dtype": "float32", **actor})
    return load_network(folder, numbers, ranks, scores=kind == "rm", device="cpu", seed=3)


def trainee_of(folder: Path, kind: str, ranks: Ranks = ALONE, **actor: Any) -> Trainee:
    """The trainee of a case; a reward model's head is not zero, so that all weights learn."""
    network = load(folder, kind, ranks, **actor)
    numbers = CONFIGS[kind].actor.with_settings(
        {"dtype": "float32", "optimizer.lr": 1e-3, "optimizer.warmup_steps": 0, **actor}
    )
    return make_trainee(network, make_objective(CONFIGS[kind]), numbers, steps=20)


def references(kind: str, items: list[Item]) -> torch.Tensor:
    """Log-probs of a made-up reference."""
    if kind in ("sft", "rm"):
        return torch.empty(len(items), 0)
    draw = random.Random(5)
    return torch.tensor([[draw.uniform(-9, -1) for _ in range(2)] for _ in items]).double()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model."""
    return save_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A model with a head that is not zero."""
    path = tmp_path_factory.mktemp("tiny") / "scores"
    torch.manual_seed(4)
    kind: Any = AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.config.pad_token_id = None
    model.save_pretrained(path)
    return path


def slow_loss(path: Path, kind: str, items: list[Item]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers' own forward of one whole sequence after the other."""
    auto: Any = AutoModelForSequenceClassification if kind == "rm" else AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    frozen = references(kind, items)
    losses: list[torch.Tensor] = []
    for index, item in enumerate(items):
        found = []
        for example in item.examples:
            logits = model(torch.tensor([list(example.tokens)])).logits[0]
            if kind == "rm":
                found.append(logits[0])
                continue
            logprobs = logits.log_softmax(-1)
            learned = [
                logprobs[at - 1, example.tokens[at]]
                for start, end in example.learned
                for at in range(start, end)
            ]
            if kind == "sft":
                losses += [-value for value in learned]
            else:
                total = torch.stack(learned).double().sum()
                found.append(total / len(learned) if kind == "normalized" else total)
        if kind == "sft":
            continue
        difference = found[0] - found[1]
        sigmoid = torch.nn.functional.logsigmoid
        if kind == "rm":
            losses.append(-sigmoid(difference - item.margin) + 0.1 * (found[0] + found[1]) ** 2)
            continue
        h = difference - (frozen[index, 0] - frozen[index, 1])
        if kind == "ipo":
            losses.append((h - 1 / (2 * 0.2)) ** 2)
        elif kind == "dpo":
            losses.append(-0.9 * sigmoid(0.5 * h) - 0.1 * sigmoid(-0.5 * h))
        else:
            losses.append(-sigmoid(2.0 * h))
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("max_tokens", "cost"), [(25, None), (25, APART), (4096, None)])
def test_a_step_equals_a_loop_over_sequences(
    folder: Path, scoring: Path, kind: str, max_tokens: int, cost: ForwardCost | None
) -> None:
    path = scoring if kind == "rm" else folder
    items = make_items(kind)
    slow, expected = slow_loss(path, kind, items)
    trainee = trainee_of(path, kind, max_tokens_per_mb=max_tokens)
    if cost is not None:
        trainee = replace(trainee, network=replace(trainee.network, cost=cost))
    trainee.optimizer.adamw.register_step_pre_hook(lambda *_: found.update(gradients(model)))
    found: dict[str, torch.Tensor] = {}
    model = trainee.network.model
    object.__setattr__(trainee.optimizer, "gradient_clipping", float("inf"))
    metrics = train_step(trainee, items, references(kind, items))
    assert metrics["loss"] == pytest.approx(slow, rel=1e-5)
    assert (metrics["micro_batches"] > 2) == (max_tokens == 25)
    assert found.keys() == expected.keys()
    # An element is a sum whose terms are as large as the largest gradient.
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=max(1e-5, 2e-6 * largest))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_cut_of_an_evaluation_changes_nothing(folder: Path, scoring: Path, kind: str) -> None:
    path = scoring if kind == "rm" else folder
    items = make_items(kind, seed=1)
    frozen = references(kind, items)
    results = []
    for max_tokens, at_once in ((4096, 100), (30, 100), (25, 4), (4096, 1)):
        trainee = trainee_of(path, kind, max_tokens_per_mb=max_tokens)
        results.append(evaluate(trainee, items, frozen, at_once=at_once))
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5, abs=1e-5)
    step = train_step(trainee_of(path, kind), items, frozen)
    shared = {name: step[name] for name in results[0]}
    assert shared == pytest.approx(results[0], rel=1e-5, abs=1e-5)


def test_a_pair_stays_in_one_micro_batch(folder: Path) -> None:
    network = replace(load(folder, "dpo", max_tokens_per_mb=25), cost=APART)
    minibatch = network.cut(make_items("dpo", count=12), pairs=True)
    assert len(minibatch.parts) > 3
    found = [sorted(set(part.sequence_ids.tolist())) for part in minibatch.parts]
    assert sorted(index for part in found for index in part) == list(range(24))
    for part, ids in zip(minibatch.parts, found, strict=True):
        assert len(part.trees) > len(ids) // 2  # a pair is several trees
        assert [index // 2 for index in ids[0::2]] == [index // 2 for index in ids[1::2]]
        assert len(part.tokens) <= 25 or len(ids) == 2


def test_reference_logprobs_are_those_of_the_policy_before_its_first_step(folder: Path) -> None:
    items = make_items("dpo", seed=2)
    for actor in ({}, {"use_lora": True, "lora_rank": 2}):
        trainee = trainee_of(folder, "dpo", max_tokens_per_mb=40, **actor)
        objective = trainee.objective
        assert isinstance(objective, DPO)
        network = trainee.network
        told: list[int] = []
        frozen = reference_logprobs(network, objective, items, at_once=4, done=told.append)
        assert told == [0, 4, 8]
        before = evaluate(trainee, items, frozen, at_once=100)
        assert before["loss"] == pytest.approx(0.6931471805599453)
        assert before["margin"] == pytest.approx(0.0, abs=1e-6)
        train_step(trainee, items, frozen)
        assert evaluate(trainee, items, frozen, at_once=100)["loss"] < 0.69


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_adapters_alone_learn_and_the_head_of_a_reward_model(folder: Path, kind: str) -> None:
    trainee = trainee_of(folder, kind, use_lora=True, lora_rank=2)
    model = trainee.network.model
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert all("lora_" in name or name == "score.weight" for name in trained)
    assert ("score.weight" in trained) == (kind == "rm")
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    items = make_items(kind)
    for _ in range(3):  # a new head moves first, then B, then A
        train_step(trainee, items, references(kind, items))
    moved = {n for n, one in model.named_parameters() if not torch.equal(one, before[n])}
    assert moved == trained


def test_equal_scores_are_half_right(folder: Path) -> None:
    trainee = trainee_of(folder, "rm")  # its head is zero
    found = evaluate(trainee, make_items("rm"), torch.empty(9, 0), at_once=9)
    assert found["accuracy"] == 0.5


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["sft", "rm"])
def test_compiled_and_checkpointed_layers_change_nothing(
    folder: Path, scoring: Path, kind: str
) -> None:
    items, found = make_items(kind), []
    for changes in ({}, {"compile": True, "gradient_checkpointing": "selective"}):
        actor = CONFIGS[kind].actor.with_settings({"dtype": "float32", **changes})
        network = load_network(
            scoring if kind == "rm" else folder, actor, ALONE,
            scores=kind == "rm", device="cpu", seed=3, compile_backend="aot_eager",
        )  # fmt: skip
        trainee = make_trainee(network, make_objective(CONFIGS[kind]), actor, steps=20)
        train_step(trainee, items, references(kind, items))
        found.append(gradients(network.model))
    plain, others = found
    for name, gradient in plain.items():
        torch.testing.assert_close(others[name], gradient, atol=1e-6, rtol=1e-4)
