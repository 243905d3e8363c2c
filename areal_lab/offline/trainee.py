"""The trained model with its optimizer and loss: training steps and evaluation.

    items --> trajectories --> micro-batches of this rank --> forward, share of the loss, backward
                                                                          --> clip --> AdamW

A loss divides by the tokens or pairs of the whole batch, so the split into micro-batches and ranks
does not change results. Ranks with fewer micro-batches compute extra ones without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_lab.config.offline import OfflineActorConfig
from areal_lab.data.batch import PackedBatch
from areal_lab.data.prefix_tree import ForwardCost
from areal_lab.models.copies import to_device
from areal_lab.models.folder import compute_dtype
from areal_lab.offline.examples import Item, trajectories
from areal_lab.offline.objectives import DPO, BatchFacts, Objective, mean_metrics, outputs_of
from areal_lab.training.decoder_layers import BACKEND, compile_layers
from areal_lab.training.forward import PackedPolicy, PackedValues
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.minibatch import Minibatch, make_minibatch, on_device
from areal_lab.training.model import VALUE_HEAD, forward_cost, load_policy, load_value_model
from areal_lab.training.optimizer import Optimizer, make_optimizer
from areal_lab.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Network:
    """A model whose forward takes packed batches, with the ranks that share it."""

    module: PackedPolicy | PackedValues
    """Module of the forward, which contains the model."""
    cost: ForwardCost
    max_tokens: int
    """Maximum tokens of a micro-batch."""
    device: torch.device
    ranks: Ranks

    @property
    def model(self) -> PreTrainedModel:
        """The model of transformers."""
        return self.module.model

    def outputs(self, packed: PackedBatch) -> Float[Tensor, " R"]:
        """Compute values or log-probs of a micro-batch on the host."""
        return outputs_of(self.module(on_device(packed, self.device)))

    def cut(self, items: Sequence[Item], *, pairs: bool) -> Minibatch:
        """Split items into micro-batches; returns those of this rank, and counts over all ranks."""
        sequences = trajectories(items)
        return make_minibatch(
            sequences,
            list(range(len(sequences))),
            version=0,
            has_gradient=lambda _: True,
            cost=self.cost,
            max_tokens=self.max_tokens,
            ranks=self.ranks,
            whole_groups=pairs,
        )


@dataclass(frozen=True, slots=True)
class Trainee:
    """A network with its optimizer and loss."""

    network: Network
    optimizer: Optimizer
    objective: Objective


def load_network(
    folder: Path,
    actor: OfflineActorConfig,
    ranks: Ranks,
    *,
    scores: bool,
    device: str,
    seed: int,
    compile_backend: str = BACKEND,
) -> Network:
    """Load a model, add adapters with `use_lora`, and shard it.

    Args:
        folder: folder of the model.
        actor: settings of the model.
        ranks: the processes that share the model.
        scores: the model predicts one number per sequence instead of the next token.
        device: `cpu` or `cuda`.
        seed: seed of new adapters.
        compile_backend: backend of `torch.compile`, with `actor.compile`.

    Raises:
        ModelNotFound: the folder has no model.
        ValueError: `target_modules` names a layer that the model does not have.
    """
    load = load_value_model if scores else load_policy
    # Sharding moves it to the device layer by layer.
    loaded = "cpu" if ranks.count > 1 else device
    model = load(folder, device=loaded, gradient_checkpointing=actor.gradient_checkpointing)
    cost = forward_cost(model)
    if actor.use_lora:
        _add_adapters(model, actor, seed)
    dtype = compute_dtype(actor.dtype, device)
    module: PackedPolicy | PackedValues
    kind = PackedValues if scores else PackedPolicy
    module = kind(model, dtype=dtype, attention=actor.attention)
    if actor.compile:
        compile_layers(model, backend=compile_backend)
    ranks.shard(module)
    return Network(module, cost, actor.max_tokens_per_mb, torch.device(device), ranks)


def make_trainee(
    network: Network, objective: Objective, actor: OfflineActorConfig, *, steps: int
) -> Trainee:
    """Make a trainee with a new optimizer.

    Args:
        network: the model.
        objective: the loss.
        actor: settings of the optimizer.
        steps: optimizer steps of the whole run, for the schedule of the learning rate.
    """
    optimizer = make_optimizer(network.model, actor.optimizer, steps=steps, ranks=network.ranks)
    return Trainee(network, optimizer, objective)


def train_step(
    trainee: Trainee, items: Sequence[Item], reference: Float[Tensor, "N members"]
) -> dict[str, float]:
    """Do one optimizer step on a batch; returns its metrics.

    Args:
        trainee: the model.
        items: items of the whole batch.
        reference: reference log-probs of each item's examples; empty without a reference.

    Raises:
        NonFiniteStep: on every rank, if the loss or gradient is not finite; the model is unchanged.
    """
    network, ranks = trainee.network, trainee.network.ranks
    trainee.optimizer.zero_grad()
    minibatch = network.cut(items, pairs=trainee.objective.pairs)
    facts = _facts(trainee, minibatch, items, reference)
    total = torch.zeros((), device=network.device)
    sums: dict[str, Tensor] = {}
    for packed in minibatch.parts:
        share = trainee.objective.share(network.outputs(packed), packed, facts)
        # Ranks average their gradients, but the shares of all ranks have to be summed.
        (share.loss * ranks.data_count).backward()
        total += share.loss.detach()
        _add(sums, share.sums)
    for packed in minibatch.idle:
        (network.outputs(packed).sum() * 0.0).backward()
    stepped = trainee.optimizer.step(total)
    of_ranks = ranks.collect(
        (
            _read(sums),
            sum(len(part.tokens) for part in minibatch.parts),
            len(minibatch.parts),
        )
    )
    return {
        **mean_metrics(_summed([one for one, _, _ in of_ranks]), facts.units),
        "loss": stepped.loss,
        "grad_norm": stepped.grad_norm,
        "lr": stepped.lr,
        "trained_tokens": float(_trained_tokens(trainee, minibatch, items)),
        "packed_tokens": float(sum(tokens for _, tokens, _ in of_ranks)),
        "micro_batches": float(sum(parts for _, _, parts in of_ranks)),
    }


@torch.no_grad()
def evaluate(
    trainee: Trainee,
    items: Sequence[Item],
    reference: Float[Tensor, "N members"],
    *,
    at_once: int,
) -> dict[str, float]:
    """Compute means of the loss and its metrics over items, without training; on rank 0 only.

    Args:
        trainee: the model.
        items: items of all ranks.
        reference: see `train_step`.
        at_once: number of items that are split into micro-batches together.
    """
    sums: dict[str, Tensor] = {}
    units = 0
    for start in range(0, len(items), at_once):
        chosen = slice(start, start + at_once)
        minibatch = trainee.network.cut(items[chosen], pairs=trainee.objective.pairs)
        facts = _facts(trainee, minibatch, items[chosen], reference[chosen])
        units += facts.units
        for index, packed in enumerate(minibatch.passes):
            outputs = trainee.network.outputs(packed)
            if index < len(minibatch.parts):
                _add(sums, trainee.objective.share(outputs, packed, facts).sums)
    of_ranks = trainee.network.ranks.collect(_read(sums))
    return mean_metrics(_summed(of_ranks), units)


@torch.no_grad()
def reference_logprobs(
    network: Network,
    objective: DPO,
    items: Sequence[Item],
    *,
    at_once: int,
    done: Callable[[int], object],
) -> Float[Tensor, "N 2"]:
    """Compute the log-prob of each response for the loss; the same on every rank.

    Args:
        network: the reference model.
        objective: the loss.
        items: pairs of all ranks.
        at_once: number of pairs that are split into micro-batches together.
        done: called with the number of finished pairs.
    """
    found = torch.zeros(2 * len(items), dtype=torch.float64)
    for start in range(0, len(items), at_once):
        done(start)
        minibatch = network.cut(items[start : start + at_once], pairs=True)
        for index, packed in enumerate(minibatch.passes):
            outputs = network.outputs(packed)
            if index < len(minibatch.parts):
                sequences, logprobs = objective.of_sequences(outputs, packed)
                found[2 * start + sequences.cpu()] = logprobs.cpu()
    return network.ranks.total(found).reshape(-1, 2)


def _add_adapters(model: PreTrainedModel, actor: OfflineActorConfig, seed: int) -> None:
    head = getattr(model, VALUE_HEAD, None)
    targets = target_modules(model, actor.target_modules)
    torch.manual_seed(seed)
    add_lora(
        model,
        rank=actor.lora_rank,
        alpha=actor.lora_alpha,
        targets=[name for name in targets if head is None or name != VALUE_HEAD],
    )
    if isinstance(head, nn.Module):
        head.requires_grad_(requires_grad=True)  # the head is new, and small


def _facts(
    trainee: Trainee, minibatch: Minibatch, items: Sequence[Item], reference: Tensor
) -> BatchFacts:
    device = trainee.network.device
    margins = torch.tensor([item.margin for item in items])
    return BatchFacts(
        units=len(items) if trainee.objective.pairs else minibatch.token_count,
        margins=to_device(margins, device),
        reference=to_device(reference.flatten(), device),
    )


def _trained_tokens(trainee: Trainee, minibatch: Minibatch, items: Sequence[Item]) -> int:
    """Return the number of learned tokens, or of all tokens if the loss takes scores."""
    if not trainee.objective.scores:
        return minibatch.token_count
    return sum(len(example.tokens) for item in items for example in item.examples)


def _add(sums: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value.double()


def _read(sums: dict[str, Tensor]) -> dict[str, float]:
    """Copy the sums to the host with one wait for the device."""
    values = torch.stack(list(sums.values())).cpu().tolist() if sums else []
    return dict(zip(sums, values, strict=True))


def _summed(of_ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = {name for one in of_ranks for name in one}
    return {name: sum(one.get(name, 0.0) for one in of_ranks) for name in sorted(names)}
