"""The steps of a run: train, measure, write, save, until the end or a stop.

    batch n -> metrics -> held-out rows -> metrics.jsonl -> checkpoint

Batch n has the items n B to (n + 1) B - 1 of an endless order, which depends on the seed and the
number of items only: a run that continues has no position to restore.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from areal_lab.config.offline import RewardModelConfig
from areal_lab.data.problems import EpochOrder
from areal_lab.offline.checkpoints import SavedStep, prune, save_checkpoint
from areal_lab.offline.dataset import Data
from areal_lab.offline.job import Job, Phase, Stepped, Tell
from areal_lab.offline.references import References
from areal_lab.offline.trainee import Trainee, evaluate, train_step
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.parallel.group import waiting_at_most

BEFORE: Final = "0"
"""Key of the held-out metrics before training."""


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    step: int = 0
    trained_tokens: int = 0
    before_s: float = 0.0
    """Seconds of training before this process."""
    held_out: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    began_s: float = field(default_factory=time.monotonic)

    @property
    def training_s(self) -> float:
        """Seconds since training began."""
        return self.before_s + time.monotonic() - self.began_s

    @property
    def losses(self) -> dict[int, float]:
        """Held-out losses of trained steps."""
        return {int(step): found["loss"] for step, found in self.held_out.items() if int(step)}


@dataclass(frozen=True, slots=True)
class Course:
    """A run that trains, and its parts."""

    job: Job
    data: Data
    trainee: Trainee
    reference: References
    folder: RunFolder
    progress: Progress
    steps: int
    said: Tell

    def train(self, stop: Callable[[], bool]) -> bool:
        """Do the steps that are left; returns whether `stop` ended them."""
        config, progress, ranks = self.job.config, self.progress, self.trainee.network.ranks
        order = EpochOrder(len(self.data.train), seed=config.seed, stream="rows")
        timeout_s = config.actor.collective_timeout_s
        if not progress.step:
            self._measure()
            progress.began_s = time.monotonic()
            self._write({})
        self.said(Phase("training"))
        stopped = False
        while progress.step < self.steps and not stopped:
            with waiting_at_most(timeout_s) if ranks.count > 1 else nullcontext():
                stopped = self._step(order, stop)
        return stopped and progress.step < self.steps

    def _step(self, order: EpochOrder, stop: Callable[[], bool]) -> bool:
        """One step, with what follows it; returns whether the run is to stop."""
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
        """Measure on held-out items; returns on every rank whether it is the best one so far."""
        progress, data = self.progress, self.data
        self.said(Phase(f"measuring {len(data.held_out):,} held-out rows at step {progress.step}"))
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
        """The line of a step in metrics.jsonl."""
        if not self.trainee.network.ranks.first:
            return
        progress = self.progress
        held_out = progress.held_out.get(str(progress.step), {})
        metrics |= {f"held_out_{name}": value for name, value in held_out.items()}
        time_s = progress.training_s if progress.step else 0.0
        self.folder.append_metrics({"step": progress.step, "time_s": time_s, **metrics})
        self.said(Stepped(progress.step, self.steps, metrics))

    def _save(self) -> None:
        config, progress = self.job.config, self.progress
        self.said(Phase(f"saving step {progress.step}"))
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
            prune(self.folder, progress.losses, keep=config.checkpoint.keep)
        if progress.step < self.steps:
            self.said(Phase("training"))


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0
