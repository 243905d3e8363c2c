"""One run on fixed data, in one process or as one of several ranks that all call it.

rows -> items -> network -> (reference log-probs) -> held-out before -> steps -> summary.json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from areal_lab.config.problem import refusal
from areal_lab.offline.checkpoints import read_saved, restore
from areal_lab.offline.course import Course, Progress
from areal_lab.offline.dataset import make_data
from areal_lab.offline.job import Job, Note, Phase, Tell, total_steps
from areal_lab.offline.objectives import DPO, make_objective
from areal_lab.offline.references import no_references, references
from areal_lab.offline.rows import RowSet
from areal_lab.offline.trainee import Network, load_network, make_trainee
from areal_lab.runlog.folder import RunFolder
from areal_lab.training.ranks import ALONE, Ranks


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
        ConfigError: a row is too long, or a model does not fit the settings.
        ModelNotFound, UnusableState: a folder has no model, or no usable state.
        NonFiniteStep: a loss or gradient is not finite.
    """
    config, folder = job.config, RunFolder(job.folder)
    said: Tell = tell if ranks.first else lambda _: None
    said(Phase(f"tokenizing {len(rows.train) + len(rows.held_out):,} rows"))
    data = make_data(config, job.model_path, rows)
    for reason, count in data.dropped.items():
        said(Note(f"{count:,} rows left out: {reason}"))
    steps, size = total_steps(config, len(data.train)), config.rows.batch_size
    said(Note(f"{steps:,} steps of {size} rows, of {len(data.train):,}"))
    said(Phase(f"loading {job.model_path.name}"))
    objective = make_objective(config)
    network = _load(job, ranks, scores=objective.scores)
    reference = no_references(data)
    if isinstance(objective, DPO):
        reference = references(job, data, network, steps, said)
    trainee = make_trainee(network, objective, config.actor, steps=steps)
    progress = Progress()
    if job.checkpoint is not None:
        saved = read_saved(job.checkpoint)
        restore(trainee, job.checkpoint)
        progress = Progress(saved.step, saved.trained_tokens, saved.training_s, saved.held_out)
    course = Course(job, data, trainee, reference, folder, progress, steps, said)
    stopped = course.train(stop)
    if not ranks.first:
        return {}
    summary = course.summary("stopped" if stopped else "complete")
    folder.write_json("summary.json", summary)
    return summary


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
