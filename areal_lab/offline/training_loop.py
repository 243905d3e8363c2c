"""Training loop of a run: train, measure, write metrics and save, until the end or a stop.

    batch n -> metrics -> held-out rows -> metrics.jsonl -> checkpoint

Batch n has the items n B to (n + 1) B - 1 of an endless order that depends only on the seed and the
number of items, so a run that continues has no position to restore.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from areal_lab.config.offline import RewardModelConfig
from areal_lab.config.problem import refusal
from areal_lab.data.problems import EpochOrder
from areal_lab.offline.checkpoints import SavedStep, prune, save_checkpoint
from areal_lab.offline.examples import Data, Item
from areal_lab.offline.job import Emit, Job, Note, Phase, Stepped
from areal_lab.offline.objectives import DPO, make_objective
from areal_lab.offline.trainee import (
    Network,
    Trainee,
    evaluate,
    load_network,
    reference_logprobs,
    train_step,
)
from areal_lab.pipeline.resume.checkpoints import ignored_in
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.parallel import waiting_at_most

BEFORE: Final = "0"
"""Key of the held-out metrics before training."""


@dataclass(slots=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    trained_tokens: int = 0
    before_s: float = 0.0
    """Seconds of training in earlier processes."""
    held_out: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    began_s: float = field(default_factory=time.monotonic)
    noted: set[str] = field(default_factory=set[str])
    """Notes about the run folder that were shown; none is shown twice."""

    @property
    def training_s(self) -> float:
        """Seconds of training so far."""
        return self.before_s + time.monotonic() - self.began_s

    @property
    def losses(self) -> dict[int, float]:
        """Held-out losses by step, without those before training."""
        return {int(step): found["loss"] for step, found in self.held_out.items() if int(step)}


@dataclass(frozen=True, slots=True)
class References:
    """Reference log-probs of each item's responses; without columns if there is no reference."""

    train: Float[Tensor, "N members"]
    held_out: Float[Tensor, "M members"]


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Training loop of a run, with its data, model and progress."""

    job: Job
    data: Data
    trainee: Trainee
    reference: References
    folder: RunFolder
    progress: Progress
    steps: int
    emit: Emit

    def train(self, stop: Callable[[], bool]) -> bool:
        """Run the remaining steps; returns True if `stop` ended them early."""
        config, progress, ranks = self.job.config, self.progress, self.trainee.network.ranks
        order = EpochOrder(len(self.data.train), seed=config.seed, stream="rows")
        timeout_s = config.actor.collective_timeout_s
        if not progress.step:
            self._measure()
            progress.began_s = time.monotonic()
            self._write({})
        self.emit(Phase("training"))
        stopped = False
        while progress.step < self.steps and not stopped:
            with waiting_at_most(timeout_s) if ranks.count > 1 else nullcontext():
                stopped = self._step(order, stop)
        return stopped and progress.step < self.steps

    def _step(self, order: EpochOrder, stop: Callable[[], bool]) -> bool:
        """Train on one batch, then measure, write and save if due; returns True after a stop."""
        config, progress, ranks = self.job.config, self.progress, self.trainee.network.ranks
        size = config.rows.batch_size
        start_s = time.monotonic()
        chosen = [order[n] for n in range(progress.step * size, (progress.step + 1) * size)]
        metrics = train_step(
            self.trainee,
            [self.data.train[index] for index in chosen],
            self.reference.train[chosen],
        )
        progress.step += 1
        progress.trained_tokens += int(metrics["trained_tokens"])
        metrics["step_s"] = time.monotonic() - start_s
        metrics["tokens_per_s"] = metrics["trained_tokens"] / metrics["step_s"]
        metrics["epoch"] = progress.step * size / len(self.data.train)
        improved = False
        if progress.step == self.steps or _every(config.eval_every_steps, progress.step):
            improved = self._measure()
        stopped = bool(ranks.announce(stop() if ranks.first else None))
        self._write(metrics)
        if (
            progress.step == self.steps
            or stopped
            or _every(config.save_every_steps, progress.step)
            or (config.eval_every_steps and improved)
        ):
            self._save()
        return stopped

    def summary(self, status: str) -> dict[str, Any]:
        """The content of summary.json."""
        config, progress = self.job.config, self.progress
        network, losses = self.trainee.network, self.progress.losses
        parameters = list(network.model.parameters())
        best = min(losses, key=lambda step: (losses[step], step), default=None)
        return {
            "command": self.job.kind,
            "status": status,
            "model": config.actor.path,
            "steps": progress.step,
            "total_steps": self.steps,
            "trained_tokens": progress.trained_tokens,
            "training_s": progress.training_s,
            "rows": {
                "train": len(self.data.train),
                "held_out": len(self.data.held_out),
                "left_out": self.data.dropped,
            },
            "held_out_before": progress.held_out.get(BEFORE),
            "held_out_after": progress.held_out.get(str(progress.step)) if progress.step else None,
            "best_step": best,
            "best_held_out": None if best is None else progress.held_out[str(best)],
            "seed": config.seed,
            "processes": network.ranks.count,
            "device": self.job.device,
            "compute_dtype": str(network.module.dtype).removeprefix("torch."),
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _measure(self) -> bool:
        """Measure on held-out items; returns True on every rank if the loss is the best so far."""
        progress, data = self.progress, self.data
        self.emit(Phase(f"measuring {len(data.held_out):,} held-out rows at step {progress.step}"))
        found = evaluate(
            self.trainee,
            data.held_out,
            self.reference.held_out,
            at_once=self.job.config.rows.batch_size,
        )
        best = min(progress.losses.values(), default=math.inf)
        ranks = self.trainee.network.ranks
        found = ranks.announce(found if ranks.first else None)
        progress.held_out[str(progress.step)] = found
        return progress.step > 0 and found["loss"] < best

    def _write(self, metrics: dict[str, float]) -> None:
        """Append the line of the step to metrics.jsonl."""
        if not self.trainee.network.ranks.first:
            return
        progress = self.progress
        held_out = progress.held_out.get(str(progress.step), {})
        metrics |= {f"held_out_{name}": value for name, value in held_out.items()}
        time_s = progress.training_s if progress.step else 0.0
        self.folder.append_metrics({"step": progress.step, "time_s": time_s, **metrics})
        self.emit(Stepped(progress.step, self.steps, metrics))

    def _note(self, text: str) -> None:
        """Emit a note unless it was shown before."""
        if text not in self.progress.noted:
            self.progress.noted.add(text)
            self.emit(Note(text))

    def _save(self) -> None:
        config, progress = self.job.config, self.progress
        self.emit(Phase(f"saving step {progress.step}"))
        save_checkpoint(
            self.trainee,
            self.folder,
            self.job.model_path,
            SavedStep(
                step=progress.step,
                config=config.model_dump(),
                data=self.data.digest,
                rows=len(self.data.train),
                training_s=progress.training_s,
                trained_tokens=progress.trained_tokens,
                held_out=progress.held_out,
            ),
            resumable=config.checkpoint.resumable,
            wrapping=self.data.wrapping if isinstance(config, RewardModelConfig) else None,
        )
        if self.trainee.network.ranks.first:
            if ignored := ignored_in(self.folder.path):
                self._note(ignored)
            prune(
                self.folder,
                progress.losses,
                keep=config.checkpoint.keep,
                note=self._note,
            )
        if progress.step < self.steps:
            self.emit(Phase("training"))


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0


_SHOW_S: Final = 1.0
"""Minimum seconds between two progress lines."""


def no_references(data: Data) -> References:
    """Return empty references, for a run without a reference model."""
    return References(torch.empty(len(data.train), 0), torch.empty(len(data.held_out), 0))


def references(job: Job, data: Data, network: Network, steps: int, emit: Emit) -> References:
    """Compute reference log-probs of all responses that the run will use.

    Without `ref.path`, the reference is the trained model before its first step, when adapters have
    no effect. A continued run computes all of them again with the same micro-batches, because other
    micro-batches would change the last bits.

    Args:
        job: run with a pair loss that takes a reference.
        data: data of the run.
        network: model that will be trained.
        steps: steps of the whole run; rows that no step trains on are left out.
        emit: receives the progress.

    Raises:
        ConfigError: the reference has another vocabulary.
    """
    config, objective = job.config, make_objective(job.config)
    assert isinstance(objective, DPO), "only DPO has a reference"
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

    def scored(items: Sequence[Item], before: int) -> Tensor:
        shown_s = -math.inf

        def show_progress(count: int) -> None:
            nonlocal shown_s
            if time.monotonic() - shown_s > _SHOW_S:
                shown_s = time.monotonic()
                emit(Phase(f"reference log-probs of {before + count:,} of {total:,} pairs"))

        return reference_logprobs(network, objective, items, at_once=size, done=show_progress)

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
