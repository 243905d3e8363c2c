"""A stand-in trainer that changes the weights at random and keeps every version.

So log-probs of each token can be computed again with the version that the engine reported, and a
case decides when a step ends. Rewards need no process either.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_lab.data.problems import Problem
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.rewards.service import RewardOutcome
from areal_lab.training.protocol import (
    Copied,
    Exported,
    Pushed,
    PushRequest,
    Saved,
    SaveRequest,
    Span,
    TrainBatchRequest,
    TrainStepResult,
)

HELD_FROM = 2
"""The version before the first step that may wait for the case."""
POLL_S = 0.005
NOISE = 0.003
"""Standard deviation of the change of each weight per step: enough to distinguish versions."""


@dataclass
class StandInTrainer:
    """A `Trainer` without processes; its weights are folders."""

    model: PreTrainedModel
    root: Path
    version: int = 0
    versions: dict[int, PreTrainedModel] = field(default_factory=dict)
    trained: list[Trajectory] = field(default_factory=list)
    damage: Callable[[WeightsFolder], None] = lambda _: None
    """Applied to each folder before engines load it."""
    hold: Callable[[], bool] = lambda: False
    """While it returns True, no step after the second ends, so that a fault can happen first."""
    _saved: Saved | None = None

    def __post_init__(self) -> None:
        self.versions[0] = copy.deepcopy(self.model)

    def write(self) -> WeightsFolder:
        """Write the weights of the current version."""
        return write_weights(self.model, self.root, self.version, dtype=torch.float32)

    async def train(self, request: TrainBatchRequest) -> TrainStepResult:
        """Change every weight slightly."""
        self.trained.extend(request.trajectories)
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
        return TrainStepResult(self.version, metrics, ())

    async def export(self) -> Exported:
        """Write the weights, damaged if the case wants that."""
        weights = self.write()
        self.damage(weights)
        return Exported(weights, (_span(),))

    async def remove(self, weights: WeightsFolder) -> None:
        """Remove a folder that no engine needs any more."""
        shutil.rmtree(weights.path)

    async def push(self, request: PushRequest) -> Pushed:
        """Nothing is in its memory."""
        raise NotImplementedError(f"version {request.version} is a folder")

    async def save(self, request: SaveRequest) -> Saved:
        """An empty checkpoint."""
        request.path.mkdir(parents=True)
        return Saved(request.path, self.version, _span())

    async def start_save(self, request: SaveRequest) -> Copied:
        """It is complete at once."""
        self._saved = await self.save(request)
        return Copied(self._saved.version, self._saved.span)

    async def saved(self) -> Saved:
        """The checkpoint that was started."""
        assert self._saved is not None, "started before"
        return self._saved


class EvenDigits:
    """Rewards that need no process."""

    async def score(self, completions: tuple[str, ...], _problem: Problem) -> list[RewardOutcome]:
        """Count the even digits."""
        return [RewardOutcome("ok", float(sum(c in "02468" for c in text))) for text in completions]


def rescored_gap(versions: dict[int, PreTrainedModel], trajectory: Trajectory) -> float:
    """Largest difference between a reported log-prob and that of its reported version."""
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
