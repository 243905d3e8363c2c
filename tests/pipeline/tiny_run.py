"""A real run with a tiny random model: real processes, real HTTP, seconds instead of minutes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import GroupId
from areal_lab.data.problems import ProblemSet
from areal_lab.pipeline.run import RunResult, run
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.resolved import resolve
from areal_lab.shell.display import Display, Silent
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from benchmarks.tiny_model import write_tiny_model

MEASURED: Final = ("evaluation.max_problems=4", "evaluation.samples_per_problem=2")


def tiny_config(folder: Path, *overrides: str) -> TrainConfig:
    """A few steps on one-digit addition; the model and the runs live below `folder`."""
    model = folder / "model"
    if not model.exists():
        write_tiny_model(model, initializer_range=0.2)
    return load_config(
        None,
        [
            f"actor.path={model}",
            f"run_dir={folder / 'runs'}",
            "actor.optimizer.lr=2e-4",
            "actor.dtype=float32",
            "rollout.dtype=float32",
            "rollout.threads=1",
            "actor.threads=1",
            "dataset.batch_size=3",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=12",
            *([] if "evaluation.max_problems=0" in overrides else MEASURED),
            "plots=false",
            *overrides,
        ],
    )


def do_run(
    config: TrainConfig,
    *,
    on_step: Callable[[StepReport], None] = lambda _: None,
    response_tokens: Callable[[GroupId, int], int] | None = None,
    reward_fn: Callable[..., float] | None = None,
    state: RunState | None = None,
    stop: StopSignal | None = None,
    problems: ProblemSet | None = None,
    display: Display | None = None,
) -> RunResult:
    """Run to the end on this thread."""
    return asyncio.run(
        run(
            resolve(config, problems, reward_fn=reward_fn),
            on_step=on_step,
            display=display or Silent(),
            stop=stop or StopSignal(),
            response_tokens=response_tokens,
            state=state,
        )
    )


def marked(config: TrainConfig) -> ProblemSet:
    """The problems of a run; held-out ones say so to the reward function."""
    problems = resolve(config).problems
    named = (replace(one, metadata={"held out": True}) for one in problems.held_out)
    return replace(problems, held_out=tuple(named))


def trained_samples(folder: Path) -> list[list[dict[str, Any]]]:
    """What each step was trained on."""
    files = sorted((folder / "trajectories").glob("step-*.jsonl"))
    groups = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[{**group, **one} for group in step for one in group["samples"]] for step in groups]


def metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> dict[int, Any]:
    """The models of a run that saved each of its versions, the first with them."""
    saved = sorted((folder / "checkpoints").glob("step-*"))
    paths = [load_config(folder / "config.yaml", []).actor.path, *saved]
    return {
        version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for version, path in enumerate(paths)
    }


def rescored_difference(models: dict[int, Any], sample: dict[str, Any]) -> tuple[float, float]:
    """Largest |log-prob - behavior log-prob| under each token's version, and under the next."""
    tokens = [t for part in sample["parts"] for t in part.get("tokens", part.get("observation"))]
    inputs = torch.tensor([[*sample["prompt_tokens"], *tokens]])
    begin = len(sample["prompt_tokens"])
    largest = [0.0, 0.0]
    for shift in (0, 1):
        at = begin
        for part in sample["parts"]:
            if "observation" in part:
                at += len(part["observation"])
                continue
            version = min(part["version"] + shift, max(models))
            with torch.no_grad():
                logprobs = models[version](inputs).logits[0].log_softmax(-1)
            for token, behavior in zip(part["tokens"], part["logprobs"], strict=True):
                gap = abs(float(logprobs[at - 1, token]) - behavior)
                largest[shift] = max(largest[shift], gap)
                at += 1
    return largest[0], largest[1]


def long_tail(group: int, sample: int) -> int:
    """Most responses are short, one in four takes many decode steps."""
    return 120 if (group + sample) % 4 == 0 else 8
