"""Run a job on fixed data, in one process or in several ranks that all call `run`.

rows -> items -> network -> (reference log-probs) -> held-out before -> steps -> summary.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from areal_lab.config.problem import refusal
from areal_lab.offline.checkpoints import read_saved, restore
from areal_lab.offline.examples import make_data
from areal_lab.offline.job import Emit, Ended, Job, Note, Phase, total_steps
from areal_lab.offline.objectives import DPO, make_objective
from areal_lab.offline.rows import RowSet, load_rows
from areal_lab.offline.trainee import Network, load_network, make_trainee
from areal_lab.offline.training_loop import Progress, TrainingLoop, no_references, references
from areal_lab.pipeline.resume.checkpoints import ignored_in
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.parallel import RankPlace, join, leave
from areal_lab.training.ranks import ALONE, Ranks


def run(
    job: Job, rows: RowSet, *, emit: Emit, stop: Callable[[], bool], ranks: Ranks = ALONE
) -> dict[str, Any]:
    """Train to the end, or until `stop`; returns the content of summary.json on rank 0.

    Args:
        job: the checked job.
        rows: rows of its data set.
        emit: receives the events of the run, on rank 0.
        stop: called on rank 0 after each step; if it returns True, the run saves and ends.
        ranks: the processes that train together.

    Raises:
        ConfigError: a row is too long, or a model does not fit the settings.
        ModelNotFound, UnusableState: a folder has no model, or no usable state.
        NonFiniteStep: a loss or gradient is not finite.
    """
    config, folder = job.config, RunFolder(job.folder)
    show: Emit = emit if ranks.first else lambda _: None
    show(Phase(f"tokenizing {len(rows.train) + len(rows.held_out):,} rows"))
    data = make_data(config, job.model_path, rows)
    for reason, count in data.dropped.items():
        show(Note(f"{count:,} rows left out: {reason}"))
    steps, size = total_steps(config, len(data.train)), config.rows.batch_size
    show(Note(f"{steps:,} steps of {size} rows, of {len(data.train):,}"))
    show(Phase(f"loading {job.model_path.name}"))
    objective = make_objective(config)
    network = _load(job, ranks, scores=objective.scores)
    reference = no_references(data)
    if isinstance(objective, DPO):
        reference = references(job, data, network, steps, show)
    trainee = make_trainee(network, objective, config.actor, steps=steps)
    progress = Progress()
    if job.checkpoint is not None:
        saved = read_saved(job.checkpoint)
        restore(trainee, job.checkpoint)
        progress = Progress(saved.step, saved.trained_tokens, saved.training_s, saved.held_out)
        progress.noted.add(ignored_in(folder.path))  # shown by `find_resumable`
    loop = TrainingLoop(job, data, trainee, reference, folder, progress, steps, show)
    stopped = loop.train(stop)
    if not ranks.first:
        return {}
    return loop.summary("stopped" if stopped else "complete")


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


def run_rank(job: Job, rank: int, *, emit: Emit, stop: Callable[[], bool]) -> None:
    """Train as one of the processes of a job; for arguments see `run`.

    Raises:
        Exception: an error of `run`, or the other processes did not start in time.
    """
    torch.set_num_threads(job.threads)
    actor = job.config.actor
    several = actor.processes > 1
    ranks = ALONE
    if several:
        emit(Phase(f"waiting for the other {actor.processes - 1} process(es)"))
        ranks = _joined(job, rank)
    emit(Phase("reading the data"))
    rows = load_rows(job.config.rows, seed=job.config.seed)
    summary = run(job, rows, emit=emit, stop=stop, ranks=ranks)
    if several:
        leave()
    emit(Ended(summary))
    print(f"rank {rank}: ended", file=sys.stderr)


def _joined(job: Job, rank: int) -> Ranks:
    actor = job.config.actor
    return join(
        RankPlace(
            rank=rank,
            count=actor.processes,
            shards=actor.shard_ranks or actor.processes,
            device=job.device,
            rendezvous=job.rendezvous,
            timeout_s=actor.collective_timeout_s,
        )
    )
