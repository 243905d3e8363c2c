"""A trainer that trains nothing: it moves the weights at random and keeps every version.

So each token of a run can be scored again with the version that the engine named, and a step ends
exactly when a case wants it to. Rewards are counted without a process, too.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_lab.data.problems import Problem
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.rewards.service import RewardOutcome
from areal_lab.training.protocol import Span

HELD_FROM = 2
"""The version before the first step that may wait for the case."""
POLL_S = 0.005
NOISE = 0.003
"""Standard deviation of what a step adds to each weight: enough to tell versions apart."""


@dataclass
class StandInTrainer:
    """Answers what a trainer answers."""

    model: PreTrainedModel
    root: Path
    version: int = 0
    versions: dict[int, PreTrainedModel] = field(default_factory=dict)
    trained: list[Trajectory] = field(default_factory=list)
    damage: Callable[[WeightsFolder], None] = lambda _: None
    """Done to each folder before engines are told of it."""
    hold: Callable[[], bool] = lambda: False
    """From the third on, no step ends while this holds, so that what is to happen comes in time."""

    def __post_init__(self) -> None:
        self.versions[0] = copy.deepcopy(self.model)

    def write(self) -> WeightsFolder:
        """The weights of the present version."""
        return write_weights(self.model, self.root, self.version, dtype=torch.float32)

    async def train(self, batch: Any) -> Any:
        """Move every weight a little."""
        self.trained.extend(batch.trajectories)
        while self.version >= HELD_FROM and self.hold():
            await asyncio.sleep(POLL_S)
        self.version += 1
        with torch.no_grad():
            torch.manual_seed(self.version)
            for weight in self.model.parameters():
                weight.add_(NOISE * torch.randn_like(weight))
        self.versions[self.version] = copy.deepcopy(self.model)
        names = ("reward_mean", "loss", "lag_token_mean", "lag_token_max")
        metrics = dict.fromkeys(names, 0.0)
        return SimpleNamespace(version=self.version, metrics=metrics, spans=())

    async def export(self) -> Any:
        """Write the weights, and damage them if this is asked for."""
        weights = self.write()
        self.damage(weights)
        return SimpleNamespace(weights=weights, span=_span())

    async def save(self, request: Any) -> Any:
        """An empty checkpoint."""
        request.path.mkdir(parents=True)
        return SimpleNamespace(path=request.path, span=_span())


class EvenDigits:
    """Rewards that need no process."""

    async def score(self, completions: tuple[str, ...], _problem: Problem) -> list[RewardOutcome]:
        """Count the even digits."""
        return [RewardOutcome("ok", float(sum(c in "02468" for c in text))) for text in completions]


def rescored_gap(versions: dict[int, PreTrainedModel], trajectory: Trajectory) -> float:
    """Largest difference of a log-prob from that of the version that it is said to be of."""
    tokens = [token for part in trajectory.segments for token in part.tokens]
    inputs = torch.tensor([[*trajectory.prompt_tokens, *tokens]])
    at, largest = len(trajectory.prompt_tokens), 0.0
    for part in trajectory.segments:
        with torch.no_grad():
            logprobs = versions[part.version](inputs).logits[0].log_softmax(-1)
        for token, behavior in zip(part.tokens, part.logprobs, strict=True):
            largest = max(largest, abs(float(logprobs[at - 1, token]) - behavior))
            at += 1
    return largest


def load_model(folder: Path) -> PreTrainedModel:
    """A model in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def _span() -> Span:
    return Span("work", time.time(), time.time())
