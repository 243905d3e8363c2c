"""Images in training: packed, one by one and in transformers' own forward, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.data.images import EncodedPrompt
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.engines.weights.folder import read_weights, stored_state, write_weights
from areal_lab.models.image_features import ImagePixels
from areal_lab.training.forward import PackedPolicy
from areal_lab.training.learner import Learner
from areal_lab.training.lora import add_lora, merged_tensors, target_modules
from areal_lab.training.minibatch import pack_parts
from areal_lab.training.model import forward_cost, load_policy
from areal_lab.training.process.output import save_folder
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.step import score, train_batch
from tests.training.tiny import learner_for
from tests.vision_folder import (
    END,
    IMAGE,
    KINDS,
    VIDEO,
    VOCABULARY,
    batch_with_pictures,
    facts_of,
    plain,
    prompts_with_pictures,
    transformers_logits,
    transformers_logprobs,
    write_vision_model,
)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the first kind only."""
    return write_vision_model(tmp_path_factory.mktemp("small") / "model")


def batch_of(folder: Path) -> list[Trajectory]:
    return batch_with_pictures(facts_of(folder))


def packed_logprobs(policy: PackedPolicy, batch: list[Trajectory], max_tokens: int) -> Tensor:
    """In the order of the trajectories."""
    cost = forward_cost(policy.model)
    parts = pack_parts(batch, list(range(len(batch))), cost=cost, max_tokens=max_tokens)
    found = torch.zeros(len(batch), 3)
    for part in parts:
        for row, value in zip(part.sequence_ids.tolist(), policy(part).logprobs, strict=True):
            at = int((found[row] != 0).sum())
            found = found.index_put((torch.tensor(row), torch.tensor(at)), value)
    return torch.cat([found[i, : t.generated_tokens] for i, t in enumerate(batch)])


def own_logprobs(model: Any, pixels: ImagePixels, batch: list[Trajectory]) -> Tensor:
    """By transformers' own forward, one sequence at a time."""
    return torch.cat(
        [
            transformers_logprobs(
                model, pixels, EncodedPrompt(t.prompt_tokens, t.images), t.response_tokens
            )
            for t in batch
        ]
    )


def test_packed_is_one_by_one_is_transformers(folder: Path) -> None:
    batch, pixels = batch_of(folder), ImagePixels(folder)
    packed, apart, theirs = load_policy(folder), load_policy(folder), plain(folder)
    weights = torch.randn(sum(t.generated_tokens for t in batch))
    found = {
        "packed": packed_logprobs(PackedPolicy(packed, pixels=pixels), batch, 4096),
        "apart": packed_logprobs(PackedPolicy(apart, pixels=pixels), batch, 1),
        "transformers": own_logprobs(theirs, pixels, batch),
    }
    for logprobs in found.values():
        (logprobs * weights).sum().backward()
        torch.testing.assert_close(logprobs, found["transformers"], atol=2e-5, rtol=1e-5)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert all(value is not None and value.abs().max() > 0 for value in expected.values())
    for model in (packed, apart):
        for name, parameter in model.named_parameters():
            scale = float(expected[name].abs().max())
            error = float((parameter.grad - expected[name]).abs().max())
            assert error < 1e-4 * scale, (name, error, scale)


def test_pictures_behind_equal_tokens_share_no_prefix(small: Path) -> None:
    batch, pixels = batch_of(small), ImagePixels(small)
    policy = PackedPolicy(load_policy(small), pixels=pixels)
    assert batch[0].prompt_tokens == batch[3].prompt_tokens
    assert batch[0].images != batch[3].images
    (part,) = pack_parts(
        batch, list(range(len(batch))), cost=forward_cost(policy.model), max_tokens=4096
    )
    # Each picture is in the batch once, though many sequences and two prompts have it.
    assert part.images is not None
    assert len(part.images.images) == 3
    # Two pictures of 2 placeholders and one of 6; the prompt with two shares only its first.
    placeholders = int((part.tokens == IMAGE).sum())
    assert placeholders == len(part.images.features) == 2 + 2 + 6 + 6


def test_placeholders_have_no_probability(small: Path) -> None:
    """The others' probabilities sum to one, as those that engines report."""
    batch = batch_of(small)[:1]
    model, pixels = load_policy(small), ImagePixels(small)
    with torch.no_grad():  # a policy that would choose nothing else
        head: Any = model.get_output_embeddings()
        head.weight[[IMAGE, VIDEO]] = 100 * head.weight.mean(0)
    policy = PackedPolicy(model, pixels=pixels, entropy_gradient=True)
    one = batch[0]
    total, predicted = 0.0, {}
    for token in range(VOCABULARY):
        part = (Segment((token,), (-1.0,), 0),)
        ended = Trajectory(
            group=0,
            sample=0,
            prompt_tokens=one.prompt_tokens,
            images=one.images,
            parts=part,
            finish_reason="stop",
            reward=0.0,
        )
        (packed,) = pack_parts([ended], [0], cost=forward_cost(model), max_tokens=99)
        predicted[token] = policy(packed)
        total += predicted[token].logprobs.exp().item()
    assert total == pytest.approx(1, abs=1e-5)
    assert predicted[IMAGE].logprobs.item() == predicted[VIDEO].logprobs.item() == -torch.inf
    logprobs = torch.stack([predicted[token].logprobs for token in range(VOCABULARY)])
    chosen = logprobs[logprobs > -torch.inf]
    assert predicted[END].entropy.item() == pytest.approx(-(chosen.exp() * chosen).sum().item())


def stepped(learner: Learner, batch: list[Trajectory]) -> dict[str, float]:
    return train_batch(learner, TrainBatchRequest(0, tuple(batch))).metrics


def test_a_step_does_not_depend_on_micro_batches(small: Path) -> None:
    batch, found = batch_of(small), []
    for max_tokens in (4096, 12):
        learner = learner_for(small, max_tokens_per_mb=max_tokens, ppo_n_minibatches=2)
        metrics = stepped(learner, batch)
        state = {name: value.clone() for name, value in learner.model.named_parameters()}
        found.append((metrics, state))
    (one, first), (several, second) = found
    assert several["micro_batches"] > one["micro_batches"]
    for name in ("loss", "grad_norm", "entropy"):
        assert several[name] == pytest.approx(one[name], abs=1e-5)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, atol=1e-4, rtol=0)


def test_a_step_moves_the_vision_tower_and_can_be_exported(folder: Path, tmp_path: Path) -> None:
    learner = learner_for(folder, kl_loss_coef=0.1)
    before = {name: value.clone() for name, value in learner.model.named_parameters()}
    stepped(learner, batch_of(folder))
    moved = [n for n, v in learner.model.named_parameters() if not torch.equal(v, before[n])]
    assert moved == list(before)
    # By the names of the folder that it was loaded from, which SGLang reads.
    state = stored_state(learner.model)
    assert state.keys() == read_weights(folder).keys()
    written = write_weights(learner.model, tmp_path / "root", 1, dtype=torch.float32)
    save_folder(learner.model, folder, tmp_path / "saved")
    for path in (written.path, tmp_path / "saved"):
        loaded = load_policy(path)
        for name, value in loaded.named_parameters():
            assert torch.equal(value, dict(learner.model.named_parameters())[name]), name
    assert (tmp_path / "saved" / "preprocessor_config.json").is_file()


def test_scores_before_a_step_are_those_of_the_step(small: Path) -> None:
    """Proximal log-probs of later minibatches come from a pass of their own."""
    learner, batch = learner_for(small), batch_of(small)
    (part,) = pack_parts(batch, list(range(len(batch))), cost=learner.cost, max_tokens=4096)
    torch.testing.assert_close(score(learner, part), learner.policy(part).logprobs.detach())


def test_values_may_share_the_body(small: Path) -> None:
    learner = learner_for(
        small, advantage={"name": "gae"}, more={"critic.share_body": True, "critic.loss_coef": 1.0}
    )
    metrics = [stepped(learner, batch_of(small))["critic_loss"] for _ in range(1)]
    assert metrics[0] > 0


def test_activations_may_be_computed_again(small: Path) -> None:
    batch, norms = batch_of(small), []
    for checkpointing in (False, True, "selective"):
        norms.append(stepped(learner_for_checkpointing(small, checkpointing), batch)["grad_norm"])
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-5)


def learner_for_checkpointing(folder: Path, checkpointing: Any) -> Learner:
    from areal_lab.training.learner import make_learner
    from tests.training.tiny import settings_for

    model = load_policy(folder, gradient_checkpointing=checkpointing)
    return make_learner(model, settings_for(folder, gradient_checkpointing=checkpointing))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_adapters_are_of_the_language_model(kind: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "model", kind)
    model = load_policy(folder)
    targets = target_modules(model, ["all-linear"])
    assert set(targets) == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    add_lora(model, rank=2, alpha=4, targets=targets, merged=True)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert not any("visual" in name for name in trained)
    assert merged_tensors(model).keys() == read_weights(folder).keys()


def test_transformers_needs_the_pictures(small: Path) -> None:
    """The reference here would notice a picture that is lost."""
    prompts, pixels, model = (
        prompts_with_pictures(facts_of(small)),
        ImagePixels(small),
        plain(small),
    )
    one, other = (transformers_logits(model, pixels, *prompts[at])[-1] for at in (0, 1))
    assert (one - other).abs().nan_to_num(0).max() > 0.1
