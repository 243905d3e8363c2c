"""A training step on a GPU: that of the CPU by every kernel, without waits, in the memory that was
estimated."""

from __future__ import annotations

import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from areal_lab.resolve.memory import estimate
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.model import load_policy
from areal_lab.training.parallel import RankPlace, join, leave
from areal_lab.training.process.serve import come_back, leave_device
from areal_lab.training.ranks import Ranks
from areal_lab.training.step import StepOutcome, train_batch
from tests.training.live_bytes import LiveBytes, full_micro_batches
from tests.training.tiny import random_batch, save_model, settings_for
from tools.gpu_day.record import host_waits

SHAPE = {"hidden_size": 64, "initializer_range": 0.1}
"""Heads of 16, the smallest that FlexAttention takes on a GPU."""
GPU_SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
"""1.7 GB of weights, gradients and moments, beside which cuBLAS's 32 MB do not count."""
CPU_SHAPE = {**GPU_SHAPE, "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384}


def learner_on(
    device: torch.device, folder: Path, ranks: Ranks | None = None, **actor: Any
) -> Learner:
    """The model of the folder, trained on the device."""
    settings = dataclasses.replace(settings_for(folder, **actor), device=device.type)
    model = load_policy(
        folder, device=device.type, gradient_checkpointing=settings.actor.gradient_checkpointing
    )
    # On the CPU torch would compile C++ for minutes; the graphs are the same.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    return make_learner(model, settings, ranks, compile_backend=backend)


class Case(NamedTuple):
    attention: str
    checkpointing: Any = False
    compiled: bool = False
    dtype: str = "bfloat16"
    shared_prompts: bool = False


CASES = [
    Case("sdpa", dtype="float32"),
    Case("sdpa", True, dtype="float32", shared_prompts=True),
    Case("sdpa", "selective", compiled=True),
    Case("varlen"),
    Case("varlen", "selective"),
    Case("varlen", True, compiled=True),
    Case("varlen", "selective", compiled=True),
    Case("flex", shared_prompts=True),
    Case("flex", "selective", shared_prompts=True),
    Case("auto", "selective", compiled=True, shared_prompts=True),
]


def batch_of(case: Case) -> Any:
    """Groups with prompts of one token, or with prompts that are worth sharing."""
    request = random_batch(5, groups=6, samples=4)
    longer = tuple(range(2, 42)) if case.shared_prompts else ()
    return dataclasses.replace(
        request,
        trajectories=tuple(
            dataclasses.replace(
                one,
                prompt_tokens=(*longer, *one.prompt_tokens) if longer else one.prompt_tokens[-1:],
            )
            for one in request.trajectories
        ),
    )


@cache
def plain(shared_prompts: bool) -> StepOutcome:
    """The step on the CPU in float32, with everything kept and nothing compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder) / "model", kind="qwen2", **SHAPE)
        learner = learner_on(torch.device("cpu"), path, max_tokens_per_mb=60)
        return train_batch(learner, batch_of(Case("sdpa", shared_prompts=shared_prompts)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_step_is_that_of_the_cpu(case: Case, device: torch.device, tmp_path: Path) -> None:
    torch._dynamo.reset()
    path = save_model(tmp_path / "model", kind="qwen2", **SHAPE)
    learner = learner_on(
        device,
        path,
        # Only a GPU has the other kernels for training.
        attention=case.attention if device.type == "cuda" else "sdpa",
        gradient_checkpointing=case.checkpointing,
        compile=case.compiled,
        dtype=case.dtype,
        max_tokens_per_mb=60,
    )
    expected, found = plain(case.shared_prompts), train_batch(learner, batch_of(case))
    assert found.metrics["packed_tokens"] == expected.metrics["packed_tokens"]
    assert found.metrics["micro_batches"] == expected.metrics["micro_batches"] > 1
    theirs, ours = (torch.cat([r.logprobs.float() for r in o.records]) for o in (expected, found))
    apart = (ours - theirs).abs()
    most, mean, norm = (1e-4, 1e-5, 1e-3) if case.dtype == "float32" else (0.06, 0.01, 0.03)
    assert apart.max() <= most
    assert apart.mean() <= mean
    assert found.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=norm)


def test_the_host_waits_once_a_step_and_never_in_a_micro_batch(
    device: torch.device, tmp_path: Path
) -> None:
    """torch's own list of waits; the pretended device of tests/training counts them elsewhere."""
    path = save_model(tmp_path / "model", kind="qwen2", **SHAPE)
    counts = []
    for max_tokens in (1000, 30):
        learner = learner_on(device, path, max_tokens_per_mb=max_tokens, ppo_n_minibatches=2)
        train_batch(learner, random_batch(0))
        with host_waits() as waits:
            outcome = train_batch(learner, random_batch(1))
        counts.append((outcome.metrics["micro_batches"], len(waits)))
        if device.type == "cuda":
            assert len(waits) <= outcome.metrics["optimizer_steps"] + 1, waits
    (few, waits_of_few), (many, waits_of_many) = counts
    assert many > few == 2
    assert waits_of_many == waits_of_few


@pytest.mark.parametrize("checkpointing", [False, "selective", True])
def test_the_peak_of_a_step_is_what_doctor_estimates(
    checkpointing: Any, device: torch.device, tmp_path: Path
) -> None:
    on_gpu = device.type == "cuda"
    tokens, shape = (8192, GPU_SHAPE) if on_gpu else (256, CPU_SHAPE)
    path = save_model(tmp_path / "model", kind="qwen2", **shape)
    learner = learner_on(
        device,
        path,
        gradient_checkpointing=checkpointing,
        max_tokens_per_mb=tokens,
        dtype="bfloat16" if on_gpu else "float32",
    )
    first = full_micro_batches(0, shape["vocab_size"], tokens=tokens // 2)
    second = full_micro_batches(1, shape["vocab_size"], tokens=tokens)
    train_batch(learner, first)  # makes the moments
    learner.optimizer.zero_grad()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        outcome = train_batch(learner, second)
        peak = torch.cuda.max_memory_allocated()
    else:
        held = [*learner.policy.parameters(), *learner.policy.buffers()]
        moments = [v for state in learner.optimizer.adamw.state.values() for v in state.values()]
        with LiveBytes([*held, *moments]) as live:
            outcome = train_batch(learner, second)
        peak = live.peak
    assert outcome.metrics["micro_batches"] == 2
    estimated = estimate(learner.settings.config, path, device=device.type)
    assert estimated is not None
    assert peak == pytest.approx(estimated.tensors, rel=0.1)


def test_leaving_the_device_frees_its_memory_and_changes_nothing(
    device: torch.device, tmp_path: Path
) -> None:
    on_gpu = device.type == "cuda"
    path = save_model(tmp_path / "model", kind="qwen2", **(GPU_SHAPE if on_gpu else SHAPE))
    turns, stays = (learner_on(device, path, kl_loss_coef=0.1) for _ in range(2))
    before = torch.cuda.memory_allocated() if on_gpu else 0
    for seed in (0, 1):
        come_back(turns)
        of_turns = train_batch(turns, random_batch(seed)).metrics
        of_stays = train_batch(stays, random_batch(seed)).metrics
        for name in ("loss", "grad_norm"):
            assert of_turns[name] == pytest.approx(of_stays[name], rel=1e-4, abs=1e-6)
        there = torch.cuda.memory_allocated() if on_gpu else 0
        leave_device(turns)
        stays.optimizer.zero_grad()
        if on_gpu:
            left = torch.cuda.memory_allocated()
            assert there > 1.5 * before, "moments and gradients"
            numbers = sum(p.numel() for p in turns.model.parameters())
            # Weights, moments and reference of the one that stays; cuBLAS keeps its workspace.
            assert left <= 1.05 * 4 * 4 * numbers + (64 << 20)
            assert all(p.device.type == "cpu" for p in turns.model.parameters())


def test_a_group_of_one_rank_trains_what_one_process_does(
    device: torch.device, tmp_path: Path
) -> None:
    """NCCL on a GPU, gloo on the CPU; shards of one rank are gathered and reduced all the same."""
    path = save_model(tmp_path / "model", kind="qwen2", **SHAPE)
    alone = [
        train_batch(learner, random_batch(seed)).metrics
        for learner in [learner_on(device, path, max_tokens_per_mb=40)]
        for seed in (0, 1)
    ]
    place = RankPlace(
        rank=0,
        count=1,
        shards=1,
        device=device.type,
        rendezvous=str(tmp_path / "rendezvous"),
        timeout_s=60.0,
    )
    ranks = join(place)
    try:
        learner = learner_on(device, path, ranks, max_tokens_per_mb=40)
        together = [train_batch(learner, random_batch(seed)).metrics for seed in (0, 1)]
    finally:
        leave()
    for one, other in zip(alone, together, strict=True):
        for name in ("loss", "grad_norm", "entropy", "ratio_mean"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
