"""Train a small model synchronously, keep weights of its updates, and sample prompts with them.

    version 16 ...  24 ... 28 . 30 31 32 -- 3 of 4 minibatches --> 32.75
        |           |      |    |  |  |                              |
      lag 16        8      4    2  1  0    samples of each      the trainer's weights in mid-step

The same prompts with the same random numbers under every version, so that differences between them
are those of the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from areal_lab.data.problems import sample_seed
from areal_lab.training.objective.advantages import choose_advantages
from areal_lab.training.settings import TrainerSettings
from cosim.load import load_cosim, resolve_cosim
from cosim.policy import Policy
from cosim.sampler import Row
from cosim.schema import CosimConfig

Weights = Mapping[str, Tensor]
"""Parameters by name."""
_FIRST_GROUP: Final = 1_000_000
"""Number of the first prompt that is sampled here; training takes those from 0 on."""
_FIRST_LABEL: Final = 1_000_000
"""Of weights by updates, as the sampler's version; a run's versions count from 0."""


class Samples(NamedTuple):
    """Groups of samples, one after the other."""

    tokens: Int[Tensor, "N L"]
    """Prompt and response, padded at the end."""
    behavior_logprobs: Float[Tensor, "N T"]
    """Of the response's tokens, as the sampler reported them."""
    mask: Bool[Tensor, "N T"]
    """True where the response has a token."""
    advantages: Float[Tensor, " N"]
    rewards: Float[Tensor, " N"]


@dataclass(frozen=True, slots=True)
class Training:
    """A synchronous run of `areal-lab cosim cosim`, and its weights after some of its updates."""

    config: CosimConfig
    policy: Policy
    model: PreTrainedModel
    """The same architecture, to be called with any weights."""
    weights: Mapping[int, Weights]
    """By the number of optimizer steps (minibatches) that led to them, from 1."""

    def sample(self, updates: int, groups: range, draw: str) -> Samples:
        """Groups of samples under the weights after `updates` optimizer steps.

        Args:
            updates: a key of `weights`.
            groups: numbers of prompts.
            draw: names the random numbers; the same name gives the same ones for all weights.
        """
        return tensors_of(self.generate(updates, groups, draw), self.config)

    def generate(self, updates: int, groups: range, draw: str) -> list[Row]:
        """The same, as scored rows."""
        rows = [row for group in groups for row in self._rows(group, draw)]
        # The sampler skips a version that it holds, and the run's own are small numbers, too.
        self.policy.sampler.hold(self.weights[updates], _FIRST_LABEL + updates)
        self.policy.sampler.generate(rows)
        size = self.config.gconfig.n_samples
        for start in range(0, len(rows), size):
            self.policy.score(rows[start : start + size])
        return rows

    def _rows(self, group: int, draw: str) -> list[Row]:
        rows = self.policy.begin(_FIRST_GROUP + group)
        for row in rows:
            row.seed = sample_seed(self.config.seed, draw, row.group, row.sample)
        return rows


def train(overrides: Sequence[str], versions: int, kept: Collection[int]) -> Training:
    """Train for some steps and keep the weights after the updates in `kept`.

    Every step generates and learns one batch, as a run with `eta=0` does.

    Args:
        overrides: settings of the shipped config `cosim`.
        versions: number of training steps.
        kept: numbers of optimizer steps.
    """
    config = load_cosim("cosim", ["eta=0", *overrides])
    resolved = resolve_cosim(config)
    transformers_logging.disable_progress_bar()
    policy = Policy(resolved)
    size = config.dataset.batch_size
    # Attention in plain products: torch.func cannot map over the trainer's or a fused one.
    model = AutoModelForCausalLM.from_pretrained(
        resolved.model, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    names = [name for name, _ in model.named_parameters()]
    with _recorded_updates(names, kept) as weights:
        for version in range(versions):
            groups = [policy.begin(group) for group in range(version * size, (version + 1) * size)]
            policy.generate([row for rows in groups for row in rows], policy.version)
            for rows in groups:
                policy.score(rows)
            policy.learn(groups)
    return Training(config, policy, model.eval(), weights)


@contextmanager
def _recorded_updates(names: Sequence[str], kept: Collection[int]) -> Iterator[dict[int, Weights]]:
    """Copies of all parameters after the optimizer steps with these numbers, from 1."""
    found: dict[int, Weights] = {}
    done = 0

    def after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal done
        done += 1
        if done in kept:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            copies = (parameter.detach().clone() for parameter in parameters)
            found[done] = dict(zip(names, copies, strict=True))

    # The trainer's own loop has no hook between minibatches, and needs none: torch has one.
    handle = register_optimizer_step_post_hook(after_update)
    try:
        yield found
    finally:
        handle.remove()


def tensors_of(rows: Sequence[Row], config: CosimConfig) -> Samples:
    """Scored rows as tensors, with the advantages that the trainer takes; prompts have equal
    lengths."""
    most = config.gconfig.max_new_tokens
    mask = torch.arange(most) < torch.tensor([len(row.tokens) for row in rows])[:, None]
    behavior = torch.zeros(len(rows), most)
    behavior[mask] = torch.tensor([logprob for row in rows for logprob in row.logprobs])
    responses = torch.zeros(len(rows), most, dtype=torch.long)
    responses[mask] = torch.tensor([token for row in rows for token in row.tokens])
    rewards = torch.tensor([row.reward for row in rows])
    groups = torch.tensor([row.group for row in rows])
    settings = TrainerSettings(config=config, model_path="", weights_root="")
    return Samples(
        tokens=torch.cat([torch.tensor([row.prompt_tokens for row in rows]), responses], 1),
        behavior_logprobs=behavior,
        mask=mask,
        advantages=choose_advantages(settings)(rewards, groups),
        rewards=rewards,
    )
