"""One rank of a run: joins the others, loads the rows, trains, tells the end."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from areal_lab.offline.job import Ended, Job, Phase, Tell
from areal_lab.offline.rows import load_rows
from areal_lab.offline.run import run
from areal_lab.training.parallel.group import RankPlace, join, leave
from areal_lab.training.ranks import ALONE, Ranks


def run_rank(job: Job, rank: int, *, tell: Tell, stop: Callable[[], bool]) -> None:
    """Train as one of the processes of a job.

    Raises:
        Exception: as `run`, or if the others are not there in time.
    """
    torch.set_num_threads(job.threads)
    actor = job.config.actor
    several = actor.processes > 1
    ranks = ALONE
    if several:
        tell(Phase(f"waiting for the other {actor.processes - 1} process(es)"))
        ranks = _joined(job, rank)
    tell(Phase("reading the data"))
    rows = load_rows(job.config.rows, seed=job.config.seed)
    summary = run(job, rows, tell=tell, stop=stop, ranks=ranks)
    if several:
        leave()
    tell(Ended(summary))
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
