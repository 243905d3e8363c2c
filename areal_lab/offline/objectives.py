"""Losses of SFT, reward models and DPO, as shares of a batch that is split into micro-batches.

outputs of a micro-batch --> share of the loss, sums of measurements
                                      sums of all micro-batches --> metrics of the batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.config.offline import DPOConfig, OfflineConfig, RewardModelConfig, SFTConfig
from areal_lab.data.batch import PackedBatch
from areal_lab.functional.aggregate import token_mean
from areal_lab.functional.losses.preference import (
    PreferenceObjective,
    bradley_terry_loss,
    logistic_objective,
    preference_loss,
    sequence_logprob_means,
    sequence_logprob_sums,
    squared_objective,
)
from areal_lab.functional.losses.supervised import sft_loss
from areal_lab.functional.segments import Segments
from areal_lab.models.copies import to_device
from areal_lab.training.forward import Predictions


class BatchFacts(NamedTuple):
    """Facts about the whole batch for a loss; sequences 2n and 2n + 1 are pair n."""

    units: int
    """Number of learned tokens, or of pairs, over which the loss is a mean."""
    margins: Float[Tensor, " pairs"]
    reference: Float[Tensor, " sequences"]
    """Reference log-probs of the responses; empty without a reference."""


class Share(NamedTuple):
    """Share of a micro-batch in the loss and the metrics of its batch."""

    loss: Tensor
    sums: dict[str, Tensor]
    """Detached sums; their totals over all micro-batches, divided by the units, are metrics."""


class Objective(Protocol):
    """A loss of packed batches."""

    @property
    def scores(self) -> bool:
        """True if the loss takes one number per sequence instead of log-probs of tokens."""

    @property
    def pairs(self) -> bool:
        """True if the units of the loss are pairs instead of tokens."""

    def share(self, outputs: Tensor, packed: PackedBatch, facts: BatchFacts) -> Share:
        """Compute the share of a micro-batch.

        Args:
            outputs: values or log-probs of its rows [R], on the device.
            packed: the micro-batch, on the host.
            facts: facts about the batch, with tensors on the device.
        """


@dataclass(frozen=True, slots=True)
class SFT:
    """Mean negative log-likelihood of the learned tokens."""

    scores: bool = False
    pairs: bool = False

    def share(self, outputs: Tensor, packed: PackedBatch, facts: BatchFacts) -> Share:  # noqa: ARG002
        """See `Objective`."""
        mask = torch.ones_like(outputs, dtype=torch.bool)
        found = sft_loss(outputs, mask, aggregate=partial(token_mean, token_count=facts.units))
        return Share(found.loss, {"loss": found.nll.sum()})


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Bradley-Terry loss of the scores at the ends of a chosen and a rejected response."""

    center: float
    scores: bool = True
    pairs: bool = True

    def share(self, outputs: Tensor, packed: PackedBatch, facts: BatchFacts) -> Share:
        """See `Objective`."""
        chosen, rejected = outputs[0::2], outputs[1::2]
        of = to_device(packed.sequence_ids[0::2] // 2, outputs.device)
        found = bradley_terry_loss(
            chosen, rejected,
            margin=facts.margins[of].to(outputs.dtype), center=self.center, pair_count=facts.units,
        )  # fmt: skip
        return Share(
            found.loss,
            {
                "loss": found.loss.detach() * facts.units,
                "accuracy": _preferred(found.preference),
                "margin": found.preference.sum(),
                "score_mean": (outputs.detach() / 2).sum(),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """Loss of the policy's preference for the chosen response, relative to the reference."""

    objective: PreferenceObjective
    beta: float
    length_normalized: bool
    scores: bool = False
    pairs: bool = True

    def share(self, outputs: Tensor, packed: PackedBatch, facts: BatchFacts) -> Share:
        """See `Objective`."""
        sequences, ours = self.of_sequences(outputs, packed)
        theirs = facts.reference[sequences]
        found = preference_loss(
            ours[0::2], ours[1::2], theirs[0::2], theirs[1::2],
            objective=self.objective, pair_count=facts.units,
        )  # fmt: skip
        return Share(
            found.loss,
            {
                "loss": found.loss.detach() * facts.units,
                "accuracy": _preferred(found.preference),
                "margin": self.beta * found.preference.sum(),
                "chosen_reward": self.beta * found.chosen_log_ratio.sum(),
                "rejected_reward": self.beta * found.rejected_log_ratio.sum(),
            },
        )

    def of_sequences(self, outputs: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the sequence numbers of a micro-batch, and the log-prob of each response."""
        sequences, rows = packed.sequence_ids.unique(return_inverse=True)
        reduce: Callable[..., Tensor] = (
            sequence_logprob_means if self.length_normalized else sequence_logprob_sums
        )
        mask = torch.ones_like(outputs, dtype=torch.bool)
        segments = Segments(to_device(rows, outputs.device), len(sequences))
        return to_device(sequences, outputs.device), reduce(outputs, mask, segments).double()


def make_objective(config: OfflineConfig) -> Objective:
    """Make the loss of a config."""
    match config:
        case SFTConfig():
            return SFT()
        case RewardModelConfig():
            return RewardModel(center=config.center_rewards_coefficient)
        case DPOConfig():
            objective: PreferenceObjective = partial(squared_objective, beta=config.beta)
            if config.loss == "dpo":
                objective = partial(
                    logistic_objective, beta=config.beta, label_smoothing=config.label_smoothing
                )
            return DPO(
                objective=objective, beta=config.beta, length_normalized=config.length_normalized
            )
    raise TypeError(f"{type(config).__name__} has no loss")


def outputs_of(predicted: Tensor | Predictions) -> Tensor:
    """Return the values or log-probs of a model's forward."""
    return predicted.logprobs if isinstance(predicted, Predictions) else predicted


def mean_metrics(sums: Mapping[str, float], units: int) -> dict[str, float]:
    """Return means over the units of one or several batches."""
    return {name: value / units for name, value in sums.items()}


def _preferred(preference: Tensor) -> Tensor:
    """Number of pairs whose chosen response is preferred; a tie counts half."""
    return (preference > 0).sum() + (preference == 0).sum() / 2
