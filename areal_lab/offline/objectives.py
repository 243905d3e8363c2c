"""The losses of the three commands, as shares of a batch that is cut into micro-batches.

outputs of a micro-batch --> share of the loss, sums of measurements
                                      all micro-batches: sums --> metrics of the batch
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
    """What a loss needs to know of the whole batch; sequences 2n and 2n + 1 are pair n."""

    units: int
    """What the loss is a mean over: learned tokens, or pairs."""
    margins: Float[Tensor, " pairs"]
    reference: Float[Tensor, " sequences"]
    """Log-probs of the responses under the reference; empty without one."""


class Share(NamedTuple):
    """The part of a micro-batch in the loss of its batch."""

    loss: Tensor
    sums: dict[str, Tensor]
    """Detached; summed over the micro-batches, and divided by the units they are metrics."""


class Objective(Protocol):
    """A loss of packed batches."""

    @property
    def scores(self) -> bool:
        """Whether it takes one number per sequence rather than log-probs of tokens."""

    @property
    def pairs(self) -> bool:
        """Whether its units are pairs rather than tokens."""

    def share(self, outputs: Tensor, packed: PackedBatch, facts: BatchFacts) -> Share:
        """The share of a micro-batch.

        Args:
            outputs: values or log-probs of its rows [R], on the device.
            packed: on the host.
            facts: of the batch; its tensors are on the device.
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
    """Bradley-Terry loss of the scores at the ends of two responses."""

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
    """A loss of how much more the policy prefers the chosen response than the reference does."""

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
        """The sequences of a micro-batch in order, and the log-prob of each response."""
        sequences, rows = packed.sequence_ids.unique(return_inverse=True)
        reduce: Callable[..., Tensor] = (
            sequence_logprob_means if self.length_normalized else sequence_logprob_sums
        )
        mask = torch.ones_like(outputs, dtype=torch.bool)
        segments = Segments(to_device(rows, outputs.device), len(sequences))
        return to_device(sequences, outputs.device), reduce(outputs, mask, segments).double()


def make_objective(config: OfflineConfig) -> Objective:
    """The loss that a config names."""
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
    """What a loss takes of a model's forward: values, or log-probs."""
    return predicted.logprobs if isinstance(predicted, Predictions) else predicted


def mean_metrics(sums: Mapping[str, float], units: int) -> dict[str, float]:
    """Means over the units of a batch, or of several."""
    return {name: value / units for name, value in sums.items()}


def _preferred(preference: Tensor) -> Tensor:
    """Number of pairs whose chosen response is preferred; a tie is half of one."""
    return (preference > 0).sum() + (preference == 0).sum() / 2
