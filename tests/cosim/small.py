"""Co-simulated runs of a few seconds: four prompts a step on a cluster of round times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cosim.run
from areal_lab.data.trajectory import Trajectory
from areal_lab.runlog.read_run import RecordedRun, read_run
from cosim.load import load_cosim
from cosim.policy import Policy
from cosim.run import run_cosim
from cosim.schema import CosimConfig

SMALL = (
    *("total_train_steps=6", "dataset.batch_size=4", "gconfig.n_samples=4"),
    *("actor.ppo_n_minibatches=2", "evaluation.max_problems=8", "eval_every_steps=3"),
    *("actor.optimizer.lr=1e-3", "simulator.preset=small", "eta=2"),
)
"""Responses of the preset take 0.5 to 6 s, a step 2 s, so that new weights interrupt them."""


def small(folder: Path, *overrides: str) -> CosimConfig:
    """A small run of sums, which have five tokens, or of lists, which have 5 to 9."""
    return load_cosim("cosim", [f"run_dir={folder}", *SMALL, *overrides])


SORTING = (
    *("dataset.type=sorting", "dataset.digits=[4,8]", "gconfig.max_new_tokens=10"),
    "actor.path=Sorter-102K",
)


def run(folder: Path, *overrides: str) -> RecordedRun:
    """Run it, and read its folder."""
    return read_run(run_cosim(small(folder, *overrides)).folder)


class Learned:
    """What each step of the runs since has learned from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[tuple[Trajectory, ...]] = []

        class Watched(Policy):
            def learn(self, groups: Any) -> dict[str, float]:
                steps.append(tuple(row.trajectory() for rows in groups for row in rows))
                return super().learn(groups)

        monkeypatch.setattr(cosim.run, "Policy", Watched)
        self.steps = steps

    def take(self) -> list[tuple[Trajectory, ...]]:
        """The steps since the last call."""
        taken = list(self.steps)
        self.steps.clear()
        return taken


def written(run: RecordedRun) -> dict[str, bytes]:
    """The files of a run that must be the same in every repetition."""
    names = ("metrics.jsonl", "events.jsonl", "summary.json", "model/model.safetensors")
    return {name: (run.folder / name).read_bytes() for name in names}


def metrics(run: RecordedRun, *without: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(one).items() if k not in without} for one in lines]
