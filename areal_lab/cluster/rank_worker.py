"""A trainer's process that reads its batches from the hosts that generated them.

As `training.process.worker`, with the token of the run in its environment.
"""

from __future__ import annotations

import os
import sys
from functools import cache

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.cluster.shards.client import HttpStore
from areal_lab.cluster.shards.connections import Agent, Connections
from areal_lab.cluster.shards.errors import DataPlaneError
from areal_lab.cluster.shards.fetched import FetchedBatch
from areal_lab.cluster.shards.metadata import DistributedBatch, unpacked_batch
from areal_lab.data.arrays.samples import unpack_samples
from areal_lab.data.trajectory import Trajectory
from areal_lab.training.process.worker import main
from areal_lab.training.protocol import BatchMissing


def read_batch(batch: object) -> tuple[Trajectory, ...]:
    """The trajectories of a batch, fetched from where they are.

    Raises:
        BatchMissing: a host that has some of them is lost.
    """
    assert isinstance(batch, bytes), "controllers send packed metadata"
    metadata = unpacked_batch(batch)
    first = metadata.shards[0]
    store = HttpStore(Agent(first.node_addr, first.incarnation), _connections())
    fetched = FetchedBatch(DistributedBatch(metadata), store)
    try:
        fetched.fetch()
        return tuple(unpack_samples(fetched))
    except DataPlaneError as error:
        raise BatchMissing(str(error)) from error


@cache
def _connections() -> Connections:
    return Connections(os.environ.get(TOKEN_VARIABLE, ""))


if __name__ == "__main__":
    sys.exit(main(read_batch))
