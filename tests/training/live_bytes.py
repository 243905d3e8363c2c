"""The bytes of all tensors of a training step, against the estimate made before it."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.memory import Estimate, estimate
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.step import train_batch
from tests.training import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ROW_TOKENS = 64
GROUP = 4
PROMPT_TOKENS = 4


class LiveBytes(TorchDispatchMode):
    """Largest size of all tensors that exist at one time; FSDP resizes storages in between."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._total = 0
        self._known: dict[int, tuple[Any, int]] = {}
        self._resizes = any(isinstance(tensor, DTensor) for tensor in tensors)
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        if self._resizes:
            storages = [known() for known, _ in list(self._known.values())]
            self._total = sum(s.nbytes() for s in storages if s is not None)
        self.peak = max(self.peak, self._total)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._remove(key)), size
            self._total += size

    def _remove(self, key: int) -> None:
        self._total -= self._known.pop(key)[1]


def full_micro_batches(
    version: int, vocab: int, *, tokens: int, ranks: int = 1
) -> TrainBatchRequest:
    """Two micro-batches of rows without a common prefix, for each rank."""
    draw = random.Random(version)

    def row(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab) for _ in range(length))

    answer = ROW_TOKENS - PROMPT_TOKENS + 1  # the last token is no input
    return TrainBatchRequest(
        version,
        tuple(
            Trajectory(
                group=index // GROUP,
                sample=index % GROUP,
                prompt_tokens=row(PROMPT_TOKENS),
                parts=(Segment(row(answer), (-8.0,) * answer, version),),
                finish_reason="stop",
                reward=float(index % 2),
            )
            for index in range(2 * ranks * tokens // ROW_TOKENS)
        ),
    )


def measured_and_estimated(
    folder: Path, tokens: int, ranks: Ranks = ALONE, **actor: Any
) -> tuple[int, Estimate]:
    """Bytes of the tensors of a step at its peak, and the estimate of them."""
    settings = tiny.settings_for(folder, max_tokens_per_mb=tokens, **actor)
    model = load_policy(folder, gradient_checkpointing=settings.actor.gradient_checkpointing)
    if settings.actor.use_lora:
        targets = target_modules(model, settings.actor.target_modules)
        rank, alpha = settings.actor.lora_rank, settings.actor.lora_alpha
        add_lora(model, rank=rank, alpha=alpha, targets=targets, merged=True)
    learner = make_learner(model, settings, ranks)
    vocab = model.config.vocab_size
    # A step of a group per rank: it makes the moments of the optimizer.
    small = GROUP * ROW_TOKENS // 2
    train_batch(learner, full_micro_batches(0, vocab, tokens=small, ranks=ranks.data_count))
    learner.optimizer.zero_grad()
    batch = full_micro_batches(1, vocab, tokens=tokens, ranks=ranks.data_count)
    with LiveBytes(list(_tensors(learner))) as live:
        outcome = train_batch(learner, batch)
    if ranks.first:
        assert outcome.metrics["micro_batches"] == 2 * ranks.data_count
        assert outcome.metrics["packed_tokens"] == 2 * ranks.data_count * tokens
    estimated = estimate(settings.config, folder, layout_of(settings.config).trainer)
    assert estimated is not None
    return live.peak, estimated


def _tensors(learner: Learner) -> Iterator[torch.Tensor]:
    """What exists between two steps."""
    models: list[torch.nn.Module] = [learner.policy]
    optimizers = [learner.optimizer]
    if learner.critic is not None:
        models.append(learner.critic.values)
        optimizers.append(learner.critic.optimizer)
    models += [one.policy for one in (learner.reference, learner.teacher) if one is not None]
    for model in models:
        yield from model.parameters()
        yield from model.buffers()
        yield from (p.grad for p in model.parameters() if p.grad is not None)
    for optimizer in optimizers:
        for state in optimizer.adamw.state.values():
            yield from state.values()
