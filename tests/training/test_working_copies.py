"""Training with working copies of the weights, in bfloat16, and from main memory, by one rank."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_lab.training.checkpoint import load_state, state_of_learner, write_state
from areal_lab.training.decoder_layers import fuse_norms
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import merged_tensors
from areal_lab.training.model import load_policy
from areal_lab.training.parallel import RankPlace, join, leave
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.process.output import export, prepare_save
from areal_lab.training.process.threads import BackgroundSaves
from areal_lab.training.protocol import STATE_FOLDER, SaveRequest
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.step import train_batch
from tests.training import live_bytes
from tests.training.parallel_checks import forget_groups, random_pictures
from tests.training.test_checkpoint import SCHEDULE
from tests.training.tiny import gradients, random_batch, save_model, settings_for
from tests.vision_folder import write_vision_model

COPIES: dict[str, Any] = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
TINY_LR = 1e-6
"""A step of it is far below the spacing of bfloat16 at almost every weight."""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    meet = tmp_path_factory.mktemp("ranks") / "meet"
    yield join(
        RankPlace(rank=0, count=1, shards=1, device="cpu", rendezvous=str(meet), timeout_s=60)
    )
    leave()
    forget_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", kind="qwen2")


def learner_of(folder: Path, ranks: Ranks, **changes: Any) -> Learner:
    kept = changes.get("gradient_checkpointing", False)
    model = load_policy(folder, gradient_checkpointing=kept)
    return make_learner(model, settings_for(folder, **changes), ranks)


def weights_of(learner: Learner) -> dict[str, Tensor]:
    tensors = merged_tensors(learner.model, learner.ranks)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_layers_compute_in_bfloat16_and_everything_that_stays_is_float32(
    folder: Path, one_rank: Ranks
) -> None:
    learner = learner_of(folder, one_rank, advantage="gae", kl_loss_coef=0.1, **COPIES)
    seen: dict[str, set[torch.dtype]] = {"states": set(), "weights": set(), "values": set()}

    def of_part(part: Any, given: Any, output: Tensor) -> None:
        seen["states"] |= {given[0].dtype, output.dtype}
        seen["weights"] |= {p.dtype for p in part.parameters()}

    models = [learner.model, learner.reference.policy.model, learner.critic.values.model]  # type: ignore[union-attr]
    for model in models:
        for layer in model.model.layers:  # whose weights are gathered while its parts compute
            layer.input_layernorm.register_forward_hook(of_part)
            layer.mlp.register_forward_hook(of_part)
    models[2].score.register_forward_hook(
        lambda _, given, output: seen["values"].update({given[0].dtype, output.dtype})
    )
    logprobs: list[torch.dtype] = []
    learner.policy.register_forward_hook(lambda *call: logprobs.append(call[2].logprobs.dtype))
    train_batch(learner, random_batch())
    bfloat16, float32 = {torch.bfloat16}, {torch.float32}
    assert seen == {"states": bfloat16, "weights": bfloat16, "values": float32}
    assert set(logprobs) == float32
    optimizers = (learner.optimizer.adamw, learner.critic.optimizer.adamw)  # type: ignore[union-attr]
    moments = [v for one in optimizers for state in one.state.values() for v in state.values()]
    assert {one.dtype for one in moments} == float32
    assert {p.dtype for model in models for p in model.parameters()} == float32


def test_master_weights_lose_nothing(folder: Path, one_rank: Ranks) -> None:
    """Against AdamW in Python's floats, and against weights that are kept in bfloat16."""
    optimizer = {"lr": TINY_LR, "warmup_steps": 0, "gradient_clipping": 1.0, "weight_decay": 0.1}
    learner = learner_of(folder, one_rank, optimizer=optimizer, **COPIES)
    weight: Any = learner.model.model.layers[1].input_layernorm.weight
    start = weight.full_tensor().tolist()
    steps: list[list[float]] = []
    learner.optimizer.adamw.register_step_pre_hook(
        lambda *_: steps.append(weight.grad.full_tensor().tolist())
    )
    for seed in range(8):
        train_batch(learner, random_batch(seed))
    found = weight.full_tensor().double() - torch.tensor(start, dtype=torch.double)
    expected, in_bfloat16 = [], []
    for index, value in enumerate(start):
        series = [step[index] for step in steps]
        expected.append(adamw(value, series, rounded=False) - value)
        in_bfloat16.append(adamw(value, series, rounded=True) - value)
    moved = torch.tensor(expected, dtype=torch.double)
    # Weights are 1, whose spacing in float32 is 1.2e-7: half of it can be lost at each step.
    torch.testing.assert_close(found, moved, rtol=0, atol=8 * 0.6e-7)
    assert (moved.abs() > 2e-6).sum() > len(start) / 2
    assert in_bfloat16 == [0.0] * len(start)


def adamw(value: float, series: list[float], *, rounded: bool) -> float:
    """A weight after these gradients; `rounded` keeps it in bfloat16."""
    first = second = 0.0
    for step, gradient in enumerate(series, start=1):
        value *= 1 - TINY_LR * 0.1
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        scale = (second / (1 - 0.95**step)) ** 0.5 + 1e-8
        value -= TINY_LR * first / (1 - 0.9**step) / scale
        if rounded:
            value = float(torch.tensor(value).bfloat16())
    return value


def test_gradients_of_micro_batches_are_summed_in_float32(folder: Path, one_rank: Ranks) -> None:
    sums = []
    for tokens in (4096, 20):
        learner = learner_of(folder, one_rank, max_tokens_per_mb=tokens, **COPIES)
        metrics = train_batch(learner, random_batch()).metrics
        found = gradients(learner.model)
        whole: list[Tensor] = [one.full_tensor() for one in found.values()]  # type: ignore[attr-defined]
        exact = [torch.equal(one, one.bfloat16().float()) for one in whole]
        # Those of one pass are its products, in their type.
        assert all(exact) if metrics["micro_batches"] == 1 else not any(exact)
        sums.append(torch.cat([one.flatten() for one in whole]))
    assert torch.cosine_similarity(sums[0], sums[1], dim=0) > 0.999


def test_it_trains_as_with_casts_of_products(folder: Path, one_rank: Ranks) -> None:
    exact = learner_of(folder, ALONE)
    casts = learner_of(folder, ALONE, dtype="bfloat16")
    copies = learner_of(folder, one_rank, **COPIES)
    for seed in range(3):
        batch = random_batch(seed)
        metrics = [train_batch(one, batch).metrics for one in (exact, casts, copies)]
        for name, share in (("loss", 0.05), ("grad_norm", 0.1), ("entropy", 0.005)):
            values = [one[name] for one in metrics]
            assert values[2] == pytest.approx(values[0], rel=share), (name, values)
            assert values[2] == pytest.approx(values[1], rel=share), (name, values)


def test_an_output_for_values_stays_float32(folder: Path, one_rank: Ranks) -> None:
    """One that shares the policy's body, outside of the unit of its weights."""
    shared: dict[str, Any] = {
        "advantage": {"name": "gae", "lambda_": 0.9},
        "more": {"critic.share_body": True, "critic.optimizer.lr": 1e-2},
    }
    casts = learner_of(folder, ALONE, dtype="bfloat16", **shared)
    copies = learner_of(folder, one_rank, **shared, **COPIES)
    seen = []
    copies.policy.register_forward_hook(lambda *call: seen.append(call[2].values.dtype))
    for seed in range(2):
        one, other = (train_batch(x, random_batch(seed)).metrics for x in (casts, copies))
        # The policy's part of the loss is a difference of terms, and small.
        for name, share in (("loss", 0.2), ("grad_norm", 0.1), ("critic_loss", 0.01)):
            assert other[name] == pytest.approx(one[name], rel=share), name
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_a_vision_tower_computes_with_copies(tmp_path: Path, one_rank: Ranks, kind: str) -> None:
    model = tmp_path / "model"
    write_vision_model(model, kind, tied=True)
    casts = learner_of(model, ALONE, dtype="bfloat16")
    copies = learner_of(model, one_rank, **COPIES)
    one, other = (train_batch(x, random_pictures(0)).metrics for x in (casts, copies))
    for name, share in (("loss", 0.05), ("grad_norm", 0.05), ("entropy", 0.005)):
        assert other[name] == pytest.approx(one[name], rel=share), name


@pytest.mark.parametrize("kept", [True, "selective"])
def test_checkpointed_activations_change_nothing(
    folder: Path, one_rank: Ranks, kept: bool | str
) -> None:
    plain = learner_of(folder, one_rank, **COPIES)
    again = learner_of(folder, one_rank, gradient_checkpointing=kept, **COPIES)
    for seed in range(2):
        one, other = (train_batch(x, random_batch(seed)).metrics for x in (plain, again))
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("engines", ["float32", "bfloat16"])
def test_engines_get_the_working_copies(
    folder: Path, one_rank: Ranks, tmp_path: Path, engines: str
) -> None:
    learner = learner_of(
        folder,
        one_rank,
        weights_root=tmp_path / "weights",
        more={"rollout.dtype": engines},
        **COPIES,
    )
    train_batch(learner, random_batch())
    weights: Any = export(learner, 1, None)
    found = load_file(weights.path / "model.safetensors")
    masters = weights_of(learner)
    assert found.keys() == masters.keys()
    for name, master in masters.items():
        assert found[name].dtype == getattr(torch, engines)
        assert torch.equal(found[name].bfloat16(), master.bfloat16()), name
        assert torch.equal(found[name].float(), master.bfloat16().float()), name
    assert not all(torch.equal(one, one.bfloat16().float()) for one in masters.values())


@pytest.mark.parametrize("changes", [COPIES, {"offload": True}], ids=["copies", "offload"])
def test_a_checkpoint_has_the_masters_and_training_continues_bit_by_bit(
    folder: Path, one_rank: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole, first = (learner_of(folder, one_rank, more=SCHEDULE, **changes) for _ in range(2))
    expected = [train_batch(whole, random_batch(seed)).metrics["loss"] for seed in range(4)]
    for seed in range(2):
        train_batch(first, random_batch(seed))
    write_state(state_of_learner(first), tmp_path / "state", one_rank)
    second = learner_of(folder, one_rank, more=SCHEDULE, **changes)
    load_state(second, tmp_path / "state")
    saved = weights_of(second)
    assert all(torch.equal(one, saved[name]) for name, one in weights_of(first).items())
    found = [train_batch(second, random_batch(seed)).metrics["loss"] for seed in (2, 3)]
    assert found == expected[2:]
    final = weights_of(second)
    assert all(torch.equal(one, final[name]) for name, one in weights_of(whole).items())
    # One format: a process without a group reads the same masters.
    plain = learner_of(folder, ALONE, more=SCHEDULE)
    load_state(plain, tmp_path / "state")
    assert all(torch.equal(one, saved[name]) for name, one in weights_of(plain).items())


def test_masters_are_saved_while_training_continues(
    folder: Path, one_rank: Ranks, tmp_path: Path
) -> None:
    learner = learner_of(folder, one_rank, **COPIES)
    train_batch(learner, random_batch())
    before = weights_of(learner)
    saves = BackgroundSaves(ranks=one_rank, pipe=None, group=None, timeout_s=60.0)
    request = SaveRequest(tmp_path / "later", state=True, asynchronous=True)
    saves.start(prepare_save(learner, request), 1)
    train_batch(learner, random_batch(1))
    saves.wait()
    again = learner_of(folder, one_rank, **COPIES)
    load_state(again, tmp_path / "later" / STATE_FOLDER)
    model = load_file(tmp_path / "later" / "model.safetensors")
    for name, value in weights_of(again).items():
        assert torch.equal(value, before[name]), name
        assert torch.equal(value, model[name]), name


def test_one_process_that_offloads_computes_the_same(folder: Path, one_rank: Ranks) -> None:
    plain, offloads = learner_of(folder, ALONE), learner_of(folder, one_rank, offload=True)
    for seed in range(2):
        one, other = (train_batch(x, random_batch(seed)).metrics for x in (plain, offloads))
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
    expected = weights_of(plain)
    for name, found in weights_of(offloads).items():
        torch.testing.assert_close(found, expected[name], atol=1e-6, rtol=1e-6)


def test_without_a_group_working_copies_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"actor.param_dtype is torch.bfloat16, but only trainer"):
        learner_of(folder, ALONE, **COPIES)


def test_a_trainer_process_has_a_group_of_its_own(folder: Path, tmp_path: Path) -> None:
    batch = dataclasses.replace(random_batch(), version=0)
    expected = train_batch(learner_of(folder, ALONE, dtype="bfloat16"), batch).metrics

    async def run() -> None:
        settings = settings_for(folder, weights_root=tmp_path / "w", offload=True, **COPIES)
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            found = (await trainer.train(batch)).metrics
            for name in ("loss", "grad_norm", "entropy"):
                assert found[name] == pytest.approx(expected[name], rel=0.05), name
            exported: Any = (await trainer.export()).weights
            tensors = load_file(exported.path / "model.safetensors")
            assert all(torch.equal(x, x.bfloat16().float()) for x in tensors.values())
        finally:
            await trainer.stop()

    asyncio.run(asyncio.wait_for(run(), 300))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_norms_in_one_kernel_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """In float32 exactly, with weights other than 1; in bfloat16 but for one rounding."""
    model = load_policy(save_model(tmp_path / "model", kind=kind))
    model.set_attn_implementation("sdpa")
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) == (9 if kind == "qwen3" else 5)
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 2.0)  # type: ignore[arg-type]
    tokens = torch.arange(12)[None]
    hidden = torch.randn(40, norms[0].weight.shape[0]).bfloat16()  # type: ignore[union-attr]
    expected = model(tokens).logits
    rounded = copy.deepcopy(norms[0]).bfloat16()(hidden)
    names = list(model.state_dict())
    fuse_norms(model)
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(norms[0].bfloat16()(hidden), rounded, atol=0, rtol=2**-7)


@pytest.mark.parametrize("kept", [False, True, "selective"])
def test_the_estimate_of_memory_knows_working_copies(
    tmp_path: Path, one_rank: Ranks, kept: bool | str
) -> None:
    model = save_model(tmp_path / "model", **live_bytes.SHAPE)
    peak, estimated = live_bytes.measured_and_estimated(
        model, 1024, one_rank, gradient_checkpointing=kept, **COPIES
    )
    assert estimated.tensors == pytest.approx(peak, rel=0.04)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [COPIES, {"offload": True}], ids=["copies", "offload"])
def test_a_gpu_trains_as_a_cpu_does(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """With one rank, over NCCL; offloaded parameters are in pinned memory."""
    here = learner_of(folder, ALONE, dtype=changes.get("dtype", "float32"))
    expected = train_batch(here, random_batch()).metrics
    place = RankPlace(
        rank=0, count=1, shards=1, device="cuda", rendezvous=str(tmp_path / "meet"), timeout_s=60
    )
    ranks = join(place)
    try:
        settings = dataclasses.replace(settings_for(folder, **changes), device="cuda")
        learner = make_learner(load_policy(folder, device=settings.load_device), settings, ranks)
        found = train_batch(learner, random_batch()).metrics
        kept = {p.to_local().device.type for p in learner.model.parameters()}  # type: ignore[attr-defined]
        assert kept == {"cpu" if "offload" in changes else "cuda"}
    finally:
        leave()
        forget_groups()
    share = 0.05 if "dtype" in changes else 1e-4
    for name in ("loss", "grad_norm", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=share), name
