"""Many weight updates in a row, as a run makes them, and what each process has by then.

train -> export -> pause -> bring -> resume -> remove the folder before      N times
                                        |
                                        +--> every N/20: memory, descriptors, threads
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import psutil

from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.pipeline.servers.server import prepare_push_from
from areal_lab.training.process.client import TrainerProcess
from areal_lab.training.protocol import TrainBatchRequest

SAMPLES = 20
TRAIN_EVERY = 10
WARM_UP = 0.3
"""Share of the updates after which nothing is to grow any more: caches and pools are filled."""
SLACK = 6
"""Descriptors or threads that come and go: connections that are kept alive, pools."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of a process, with its descendants unless it is this one, whose children are the others."""

    resident_kib: float
    descriptors: int
    threads: int

    @staticmethod
    def of(pid: int) -> Footprint:
        """What it has now."""
        root = psutil.Process(pid)
        family = [root] if pid == os.getpid() else [root, *root.children(recursive=True)]
        return Footprint(
            resident_kib=sum(one.memory_info().rss for one in family) / 1024,
            descriptors=sum(one.num_fds() for one in family),
            threads=sum(one.num_threads() for one in family),
        )


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process, from the end of the warm-up on."""

    process: str
    kib_per_update: float
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.process}: {self.kib_per_update:+.2f} KiB for each update, "
            f"{self.descriptors:+d} descriptors, {self.threads:+d} threads"
        )


async def update_often(
    trainer: TrainerProcess,
    client: EngineClient,
    processes: dict[str, int],
    batch: TrainBatchRequest,
    *,
    since: int,
    updates: int,
    mode: PauseMode = PauseMode.RETRACT,
) -> list[Growth]:
    """Train and update; returns what grew.

    Args:
        processes: ids by name.
        batch: trained on again and again.
        since: version that trainer and engine have.
    """
    prepare_push = prepare_push_from(trainer)
    seen: dict[str, list[Footprint]] = {name: [] for name in processes}
    at: list[int] = []
    first = trainer.ready.exported
    before = (first if isinstance(first, WeightsFolder) else trainer.ready.weights).path
    version = since
    shared = len(list(SHARED_MEMORY.iterdir()))
    for count in range(updates):
        if count % TRAIN_EVERY == 0:
            await trainer.train(replace(batch, version=version))
            version += 1
        weights = (await trainer.export()).weights
        await client.pause(mode)
        await prepare_push(weights, [client], mode)(client)
        await client.resume()
        if isinstance(weights, WeightsFolder):
            if before != weights.path:
                shutil.rmtree(before)
                before = weights.path
            folders = [one for one in before.parent.iterdir() if one.is_dir()]
            assert folders == [before], folders
        if count % max(1, updates // SAMPLES) == 0 or count + 1 == updates:
            at.append(count)
            for name, pid in processes.items():
                seen[name].append(Footprint.of(pid))
    assert await client.version() == version == since + -(-updates // TRAIN_EVERY)
    assert len(list(SHARED_MEMORY.iterdir())) - shared < updates / 10, "others come and go, too"
    return [_growth(name, at, prints) for name, prints in seen.items()]


def assert_flat(growths: Sequence[Growth], *, kib_per_update: float) -> None:
    """None grew by more, and nothing was left open."""
    for growth in growths:
        print(growth, file=sys.stderr)
    for growth in growths:
        assert growth.kib_per_update < kib_per_update, growth
        assert growth.descriptors <= SLACK, growth
        assert growth.threads <= SLACK, growth


def _growth(name: str, at: Sequence[int], prints: Sequence[Footprint]) -> Growth:
    first = next(i for i, count in enumerate(at) if count >= WARM_UP * at[-1])
    kept = prints[first:]
    slope, _ = np.polyfit(at[first:], [one.resident_kib for one in kept], 1)
    return Growth(
        process=name,
        kib_per_update=float(slope),
        descriptors=kept[-1].descriptors - kept[0].descriptors,
        threads=kept[-1].threads - kept[0].threads,
    )
