"""One run on fixed data, in one process or as one of several ranks that all call it.

    rows -> items -> network -> (reference log-probs) -> held-out before
         -> steps: batch, metrics, held-out, checkpoint ... -> summary.json

Batch n has the items n B to (n + 1) B - 1 of an endless order, which depends on the seed and the
number of items only: a run that continues has no position to restore.
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
from torch import Tensor

from areal_lab.config.offline import (
    OfflineConfig,
    RewardModelConfig,
    SFTConfig,
)
from areal_lab.config.problem import refusal
from areal_lab.data.problems import EpochOrder
from areal_lab.data.wrapping import Wrapping
from areal_lab.offline.checkpoints import SavedStep, prune, read_saved, restore, save_checkpoint
from areal_lab.offline.examples import Encoder, Item, Learn
from areal_lab.offline.job import Job, Note, Phase, Stepped, Tell
from areal_lab.offline.objectives import DPO, make_objective
from areal_lab.offline.rows import RowSet
from areal_lab.offline.trainee import (
    Network,
    Trainee,
    evaluate,
    load_network,
    make_trainee,
    reference_logprobs,
    train_step,
)
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.parallel.group import waiting_at_most
from areal_lab.training.ranks import ALONE, Ranks

BEFORE: Final = "0"
"""Key of the held-out metrics before training."""
_NONE: Final = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Data:
    """The items of a run."""

    train: list[Item]
    held_out: list[Item]
    wrapping: Wrapping
    digest: str
    dropped: dict[str, int]
    """Rows that were left out, by reason."""


@dataclass(slots=True)
class _Course:
    """Where a run is."""

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


def run(
    job: Job, rows: RowSet, *, tell: Tell, stop: Callable[[], bool], ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Train to the end, or until `stop`; returns the content of summary.json on rank 0.

    Args:
        job: checked.
        rows: of its data set.
        tell: called on rank 0 with what happens.
        stop: asked on rank 0 after each step; the run then saves and ends.
        ranks: the processes that train together.

    Raises:
        ConfigError: a row is too long, or the data is not that of the checkpoint.
        ModelNotFound, UnusableState: a folder has no model, or no usable state.
        NonFiniteStep: a loss or gradient is not finite.
    """
    config, folder = job.config, RunFolder(job.folder)
    said: Tell = tell if ranks.first else lambda _: None
    said(Phase(f"tokenizing {len(rows.train) + len(rows.held_out):,} rows"))
    data = make_data(job, rows)
    for reason, count in data.dropped.items():
        said(Note(f"{count:,} rows left out: {reason}"))
    steps, size = total_steps(config, len(data.train)), config.rows.batch_size
    said(Note(f"{steps:,} steps of {size} rows, of {len(data.train):,}"))
    saved = None if job.checkpoint is None else read_saved(job.checkpoint)
    if saved is not None and saved.data != data.digest:
        raise refusal(
            "dataset",
            f"the rows are not those that {job.folder} was trained on; restore its data, or start "
            "a new run with actor.path set to its model",
        )
    if saved is not None and saved.step >= steps:
        raise refusal(
            "total_train_steps",
            f"{job.folder} has trained {saved.step} of {steps} steps; raise total_train_steps (or "
            f"total_train_epochs) to continue, as total_train_steps={2 * saved.step}",
        )
    said(Phase(f"loading {job.model_path.name}"))
    objective = make_objective(config)
    network = _load(job, ranks, scores=objective.scores)
    reference = _References(_NONE.expand(len(data.train), 0), _NONE.expand(len(data.held_out), 0))
    if isinstance(objective, DPO):
        # Also of steps that are done: their cut into micro-batches would else be another one, and
        # with it the last bit.
        reference = _references(job, data, network, range(steps * size), said)
    trainee = make_trainee(network, objective, config.actor, steps=steps)
    course = _Course()
    if saved is not None and job.checkpoint is not None:
        restore(trainee, job.checkpoint)
        course = _Course(saved.step, saved.trained_tokens, saved.training_s, saved.held_out)
    made = _Run(job, data, trainee, reference, folder, course, steps, said)
    stopped = made.train(stop)
    if not ranks.first:
        return {}
    summary = made.summary("stopped" if stopped else "complete")
    folder.write_json("summary.json", summary)
    return summary


def make_data(job: Job, rows: RowSet) -> Data:
    """The items of the rows, checked.

    Raises:
        ConfigError: in one line.
    """
    config = job.config
    dataset = config.rows
    learn: Learn = "responses"
    if isinstance(config, SFTConfig):
        learn = config.train_on
    elif isinstance(config, RewardModelConfig):
        learn = "score"
    encoder = Encoder(job.model_path, dataset, learn, chat=rows.has_messages)
    train, held_out = encoder.items(rows.train), encoder.items(rows.held_out)
    dropped = dict(train.dropped + held_out.dropped)
    if rows.in_both:
        dropped["the prompt is also held out"] = rows.in_both
    for items, what in ((train, "train on"), (held_out, "hold out")):
        needed = dataset.batch_size if what == "train on" else 1
        if len(items.items) < needed:
            why = f" (left out: {dict(items.dropped)})" if items.dropped else ""
            raise refusal(
                "dataset",
                f"dataset has {len(items.items)} rows to {what}{why}, but needs at least {needed}",
            )
    return Data(train.items, held_out.items, encoder.wrapping, rows.digest(), dropped)


def total_steps(config: OfflineConfig, rows: int) -> int:
    """Optimizer steps of a run: as set, or so many that each row is trained on in each epoch."""
    if config.total_train_steps:
        return config.total_train_steps
    steps = math.ceil(config.total_train_epochs * rows / config.rows.batch_size)
    return max(1, steps)


def _load(job: Job, ranks: Ranks, *, scores: bool) -> Network:
    config = job.config
    try:
        return load_network(
            job.model_path,
            config.actor,
            ranks,
            scores=scores,
            device=job.device,
            seed=config.seed,
        )
    except ValueError as error:
        raise refusal("actor", str(error)) from error


@dataclass(frozen=True, slots=True)
class _References:
    train: Tensor
    held_out: Tensor


def _references(job: Job, data: Data, network: Network, places: range, said: Tell) -> _References:
    """Log-probs of all responses that the run will use, under the reference.

    Without a model of its own, that is the trained one before its first step: adapters are zero.

    Args:
        network: that will be trained.
        places: in the endless order of items that are trained on.
    """
    config, objective = job.config, make_objective(job.config)
    assert isinstance(objective, DPO), "the only one with a reference"
    if job.reference_path is not None:
        actor = config.actor.model_copy(update={"use_lora": False})
        network = load_network(
            job.reference_path,
            actor,
            network.ranks,
            scores=False,
            device=job.device,
            seed=config.seed,
        )
    size = config.rows.batch_size
    order = EpochOrder(len(data.train), seed=config.seed, stream="rows")
    used = sorted({order[n] for n in places})
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
    return _References(train, scored(data.held_out, len(used)))


_TELL_S: Final = 1.0
"""Shortest time between two lines about one phase."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The parts of a run that trains."""

    job: Job
    data: Data
    trainee: Trainee
    reference: _References
    folder: RunFolder
    course: _Course
    steps: int
    said: Tell

    def train(self, stop: Callable[[], bool]) -> bool:
        """Do the steps that are left; returns whether `stop` ended them."""
        config, course, ranks = self.job.config, self.course, self.trainee.network.ranks
        order = EpochOrder(len(self.data.train), seed=config.seed, stream="rows")
        timeout_s = config.actor.collective_timeout_s
        if not course.step:
            self._measure()
            course.began_s = time.monotonic()
            self._write({})
        self.said(Phase("training"))
        stopped = False
        while course.step < self.steps and not stopped:
            with waiting_at_most(timeout_s) if ranks.count > 1 else nullcontext():
                stopped = self._step(order, stop)
        return stopped and course.step < self.steps

    def _step(self, order: EpochOrder, stop: Callable[[], bool]) -> bool:
        """One step, with what follows it; returns whether the run is to stop."""
        config, course, ranks = self.job.config, self.course, self.trainee.network.ranks
        size = config.rows.batch_size
        start_s = time.monotonic()
        chosen = [order[n] for n in range(course.step * size, (course.step + 1) * size)]
        metrics = train_step(
            self.trainee,
            [self.data.train[index] for index in chosen],
            self.reference.train[chosen],
        )
        course.step += 1
        course.trained_tokens += int(metrics["trained_tokens"])
        metrics["step_s"] = time.monotonic() - start_s
        metrics["tokens_per_s"] = metrics["trained_tokens"] / metrics["step_s"]
        metrics["epoch"] = course.step * size / len(self.data.train)
        improved = False
        if course.step == self.steps or _every(config.eval_every_steps, course.step):
            improved = self._measure()
        stopped = bool(ranks.announce(stop() if ranks.first else None))
        self._write(metrics)
        if (
            course.step == self.steps
            or stopped
            or _every(config.save_every_steps, course.step)
            or (config.eval_every_steps and improved)
        ):
            self._save()
        return stopped

    def summary(self, status: str) -> dict[str, Any]:
        """The content of summary.json."""
        config, course = self.job.config, self.course
        network, losses = self.trainee.network, self.course.losses
        parameters = list(network.model.parameters())
        best = min(losses, key=lambda step: (losses[step], step), default=None)
        return {
            "command": self.job.kind,
            "status": status,
            "model": config.actor.path,
            "steps": course.step,
            "total_steps": self.steps,
            "trained_tokens": course.trained_tokens,
            "training_s": course.training_s,
            "rows": {
                "train": len(self.data.train),
                "held_out": len(self.data.held_out),
                "left_out": self.data.dropped,
            },
            "held_out_before": course.held_out.get(BEFORE),
            "held_out_after": course.held_out.get(str(course.step)) if course.step else None,
            "best_step": best,
            "best_held_out": None if best is None else course.held_out[str(best)],
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
        course, data = self.course, self.data
        self.said(Phase(f"measuring {len(data.held_out):,} held-out rows at step {course.step}"))
        found = evaluate(
            self.trainee,
            data.held_out,
            self.reference.held_out,
            at_once=self.job.config.rows.batch_size,
        )
        best = min(course.losses.values(), default=math.inf)
        ranks = self.trainee.network.ranks
        found = ranks.announce(found if ranks.first else None)
        course.held_out[str(course.step)] = found
        return course.step > 0 and found["loss"] < best

    def _write(self, metrics: dict[str, float]) -> None:
        """The line of a step in metrics.jsonl."""
        if not self.trainee.network.ranks.first:
            return
        course = self.course
        held_out = course.held_out.get(str(course.step), {})
        metrics |= {f"held_out_{name}": value for name, value in held_out.items()}
        time_s = course.training_s if course.step else 0.0
        self.folder.append_metrics({"step": course.step, "time_s": time_s, **metrics})
        self.said(Stepped(course.step, self.steps, metrics))

    def _save(self) -> None:
        config, course = self.job.config, self.course
        self.said(Phase(f"saving step {course.step}"))
        save_checkpoint(
            self.trainee,
            self.folder,
            self.job.model_path,
            SavedStep(
                step=course.step,
                config=config.model_dump(),
                data=self.data.digest,
                training_s=course.training_s,
                trained_tokens=course.trained_tokens,
                held_out=course.held_out,
            ),
            resumable=config.checkpoint.resumable,
            wrapping=self.data.wrapping if isinstance(config, RewardModelConfig) else None,
        )
        if self.trainee.network.ranks.first:
            prune(self.folder, course.losses, keep=config.checkpoint.keep)
        self.said(Phase("training"))


def _every(steps: int, step: int) -> bool:
    return steps > 0 and step % steps == 0
