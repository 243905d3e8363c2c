"""A model that generates and learns in this process, with the real run's batcher and trainer.

    begin(groups) --rows--> generate(rows, version) --> score(rows) --> learn(version, groups)
                                        ^                                      |
                                        '------ weights by version <-----------'

Who learns from what, and when, is the caller's business: a log's (`cosim.along`) or the simulator's
(`cosim.live`). Everything is computed in an order that the caller's calls fix, so that the same
calls give the same bytes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_lab.config.functions import load_function
from areal_lab.control.events import GroupId, Version
from areal_lab.data.images import encode_prompt
from areal_lab.data.problems import Problem, PromptSource, sample_seed
from areal_lab.resolve.resolved import Resolved
from areal_lab.rewards.worker import bound, reward_of
from areal_lab.training.learner import make_learner
from areal_lab.training.lora import add_lora, merged_tensors, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.process.output import save_folder
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.step import train_batch
from cosim.sampler import Row, Sampler


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One measurement on held-out problems."""

    version: Version
    problem_means: tuple[float, ...]
    """Mean reward of each problem's samples."""
    mean_tokens: float
    """Of a response."""

    @property
    def mean(self) -> float:
        """Mean reward."""
        return sum(self.problem_means) / len(self.problem_means)


class Policy:
    """The model of a co-simulated run, its weights by version, and its problems."""

    def __init__(self, resolved: Resolved) -> None:
        """Load the model twice: to generate, and to learn."""
        config, problems, folder = resolved.config, resolved.problems, resolved.model
        torch.manual_seed(config.seed)
        settings = TrainerSettings(config=config, model_path=str(folder), weights_root="")
        actor = config.actor
        model = load_policy(folder, gradient_checkpointing=actor.gradient_checkpointing)
        if actor.use_lora:
            targets = target_modules(model, actor.target_modules)
            add_lora(
                model, rank=actor.lora_rank, alpha=actor.lora_alpha, targets=targets, merged=True
            )
        self.version: Version = 0
        """Of the learner."""
        self.codec = resolved.codec
        self.sampler = Sampler(folder, config, self.codec)
        self._config = config
        self._folder = folder
        self._learner = make_learner(model, settings)
        self._source = PromptSource(problems.train, seed=config.seed)
        self._held_out = problems.held_out[: config.evaluation.max_problems]
        reward = config.reward
        self._reward = bound(load_function(reward.fn), reward.kwargs, reward.sandbox)
        self._weights: dict[Version, dict[str, Tensor]] = {}
        self._export()

    # --- generating ------------------------------------------------------------------------------

    def begin(self, group: GroupId) -> list[Row]:
        """The rows of a group without tokens: samples of prompt number `group`."""
        return self._rows(self._source[group], "train", group, self._config.gconfig.n_samples)

    def generate(self, rows: Sequence[Row], version: Version) -> None:
        """Continue rows to their end under a version; older versions are not needed any more."""
        self.sampler.hold(self._weights[version], version)
        for older in [one for one in self._weights if one < version]:
            del self._weights[older]
        self.sampler.generate(rows)

    def score(self, rows: Sequence[Row]) -> None:
        """Compute the rewards of the rows of one group."""
        example = self._source[rows[0].group].as_example()
        for row in rows:
            row.reward, row.rewards = self._scored(row, example)

    def masked(self, rows: Sequence[Row]) -> tuple[int, ...]:
        """Numbers of the rows that have no loss, because they were cut off."""
        if not self._config.actor.mask_truncated:
            return ()
        return tuple(row.sample for row in rows if row.trajectory().truncated)

    # --- learning --------------------------------------------------------------------------------

    def learn(self, groups: Sequence[Sequence[Row]]) -> dict[str, float]:
        """One training step on scored groups; returns its metrics."""
        trajectories = tuple(row.trajectory() for rows in groups for row in rows)
        outcome = train_batch(self._learner, TrainBatchRequest(self.version, trajectories))
        self.version += 1
        self._export()
        return dict(outcome.metrics)

    def save(self, path: Path) -> None:
        """Write the learner's weights as a Hugging Face folder."""
        save_folder(self._learner.model, self._folder, path)

    def _export(self) -> None:
        tensors = merged_tensors(self._learner.model)
        self._weights[self.version] = {
            name: tensor.detach().clone() for name, tensor in tensors.items()
        }

    # --- measuring -------------------------------------------------------------------------------

    def measure(self) -> HeldOut | None:
        """The newest weights on held-out problems, with the same seeds at every call.

        Returns: None if `evaluation.max_problems` is 0.
        """
        samples = self._config.evaluation.samples_per_problem
        groups = [
            self._rows(problem, "held-out", number, samples)
            for number, problem in enumerate(self._held_out)
        ]
        rows = [row for group in groups for row in group]
        if not rows:
            return None
        self.sampler.hold(self._weights[self.version], self.version)
        self.sampler.generate(rows)
        means = []
        for problem, group in zip(self._held_out, groups, strict=True):
            example = problem.as_example()
            means.append(sum(self._scored(row, example)[0] for row in group) / samples)
        mean_tokens = sum(len(row.tokens) for row in rows) / len(rows)
        return HeldOut(self.version, tuple(means), mean_tokens)

    def _rows(self, problem: Problem, stream: str, group: GroupId, samples: int) -> list[Row]:
        prompt = encode_prompt(self.codec, None, problem.prompt, begins=not problem.rendered).tokens
        seed = partial(sample_seed, self._config.seed, stream, group)
        return [Row(group, sample, prompt, seed(sample)) for sample in range(samples)]

    def _scored(self, row: Row, example: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        value = self._reward(self.codec.decode(row.tokens), dict(example))
        if inspect.isawaitable(value):
            value = asyncio.run(_result(value))
        return reward_of(value, self._config.reward.weights)


async def _result(awaitable: Any) -> Any:
    return await awaitable
