"""Log-probs of responses under the reference model, computed once before the first step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.config.problem import refusal
from areal_lab.data.problems import EpochOrder
from areal_lab.offline.dataset import Data
from areal_lab.offline.examples import Item
from areal_lab.offline.job import Job, Phase, Tell
from areal_lab.offline.objectives import DPO, make_objective
from areal_lab.offline.trainee import Network, load_network, reference_logprobs

_TELL_S: Final = 1.0
"""Shortest time between two lines about one phase."""


@dataclass(frozen=True, slots=True)
class References:
    """Log-probs of each item's responses; without columns where there is no reference."""

    train: Float[Tensor, "N members"]
    held_out: Float[Tensor, "M members"]


def no_references(data: Data) -> References:
    """Of a run that compares with nothing."""
    return References(torch.empty(len(data.train), 0), torch.empty(len(data.held_out), 0))


def references(job: Job, data: Data, network: Network, steps: int, said: Tell) -> References:
    """Log-probs of all responses that the run will use, under the reference.

    Without a model of its own, that is the trained one before its first step: adapters are zero. A
    run that continues computes them all again: with another cut into micro-batches their last bits
    would differ.

    Args:
        job: with a pair loss that takes a reference.
        data: of the run.
        network: that will be trained.
        steps: of the whole run; rows that none of them trains on are left out.
        said: told how far it is.

    Raises:
        ConfigError: the reference has another vocabulary.
    """
    config, objective = job.config, make_objective(job.config)
    assert isinstance(objective, DPO), "the only one with a reference"
    if job.reference_path is not None:
        trained = network
        actor = config.actor.model_copy(update={"use_lora": False})
        network = load_network(
            job.reference_path,
            actor,
            network.ranks,
            scores=False,
            device=job.device,
            seed=config.seed,
        )
        _check_vocabulary(job, network, trained)
    size = config.rows.batch_size
    order = EpochOrder(len(data.train), seed=config.seed, stream="rows")
    used = sorted({order[n] for n in range(steps * size)})
    total = len(used) + len(data.held_out)

    def scored(items: Sequence[Item], done: int) -> Tensor:
        told_s = -math.inf

        def tell(count: int) -> None:
            nonlocal told_s
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                said(Phase(f"reference log-probs of {done + count:,} of {total:,} pairs"))

        return reference_logprobs(network, objective, items, at_once=size, tell=tell)

    train = torch.zeros(len(data.train), 2, dtype=torch.float64)
    train[used] = scored([data.train[index] for index in used], 0)
    return References(train, scored(data.held_out, len(used)))


def _check_vocabulary(job: Job, reference: Network, trained: Network) -> None:
    theirs, ours = (one.model.config.get_text_config().vocab_size for one in (reference, trained))
    if theirs != ours:
        raise refusal(
            "ref.path",
            f"ref.path {job.reference_path} has a vocabulary of {theirs} tokens, but the model of "
            f"actor.path has {ours}; choose a reference with the same tokenizer",
        )
