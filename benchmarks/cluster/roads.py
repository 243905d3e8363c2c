"""Measure how a batch gets from the hosts that generate it to the trainer's processes.

    sender (a host that generates) --> this process --> first receiver (a rank) --> other receivers

- `trajectories`: this process has the batch as tuples, and pickles it, as `train` does.
- `arrays`: the sender packs each group into arrays and sends them here; with the step they are
  joined and pickled, as controllers do.

The first receiver hands the batch on to the others by the broadcast of a training step (gloo).
`collect_s` is the time until a batch is here after it was packed, which happens while the trainer
works; `step_s` is the time from the start of a step until every receiver has the batch, which the
trainer waits for. At the end receivers unpack what they train on, except at the size of the paper's
batch, whose tuples take 5 GB in each receiver.
"""

from __future__ import annotations

import asyncio
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from areal_lab.data.arrays import (
    Column,
    Field,
    Jagged,
    concat_rows,
    pack_samples,
    slice_rows,
    unpack_samples,
)
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.host.pipes import KEY_VARIABLE, PipeListener, open_pipe
from areal_lab.host.processes import start_child, watch_parent
from benchmarks.harness import spread

ROADS: Final = ("trajectories", "arrays")
RECEIVERS: Final = (2, 4)
GROUP: Final = 16
"""Samples of a group, which are sent together."""
PROMPT_TOKENS: Final = 200
STEP_S: Final = 213.1
"""Of the paper's 1.5B run on 128 GPUs: the shortest step of its table 1."""
_START_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Size:
    """A batch."""

    name: str
    samples: int
    tokens: int
    """Of a sample, on average."""
    unpacks: bool = True
    """Whether receivers have trajectories at the end."""


SIZES: Final = (
    Size("scaled down", 512, 1_000),
    Size("512 x 8k", 512, 8_000),
    Size("the paper's", 8_192, 9_277, unpacks=False),
)


def packed(samples: int, tokens: int, random: np.random.Generator) -> dict[str, Field]:
    """Samples of about `tokens` tokens on average, as `pack_samples` makes them, made without
    trajectories."""
    drawn = np.minimum(random.lognormal(0, 1, samples), 8)
    generated = np.maximum(1, drawn * tokens / drawn.mean() - PROMPT_TOKENS).astype(np.int64)
    ones = np.ones(samples, np.int64)
    rows = np.zeros((samples, len(Column)), np.int32)
    rows[:, Column.PROMPT_TOKENS] = PROMPT_TOKENS
    rows[:, Column.SPANS] = 1
    lengths = generated + PROMPT_TOKENS
    return {
        "tokens": Jagged(random.integers(0, 150_000, lengths.sum(), np.int32), lengths),
        "logprobs": Jagged(-random.random(generated.sum(), np.float32), generated),
        "spans": Jagged(np.stack([generated, ones], axis=1).astype(np.int32), ones),
        "rows": Jagged(rows, ones),
        "placed": Jagged(np.zeros((0, 4), np.int32), 0 * ones),
        "images": Jagged(np.zeros(0, np.uint8), 0 * ones),
        "reward": Jagged(np.ones(samples), ones),
        "turn_returns": Jagged(np.zeros(0), 0 * ones),
        "rewards": Jagged(np.zeros(0, np.uint8), 0 * ones),
        "group": np.arange(samples),
        "sample": 0 * ones,
    }


def measure(*, quick: bool, repeats: int) -> dict[str, Any]:
    """Figures and rows of this part."""
    sizes, receivers = (SIZES[:1], RECEIVERS[:1]) if quick else (SIZES, RECEIVERS)
    figures = asyncio.run(_measure(sizes, receivers, repeats))
    pack_us, unpack_us = _packing(2_000 if quick else 20_000)
    return figures | {"pack_cpu_us_per_token": pack_us, "unpack_cpu_us_per_token": unpack_us}


async def _measure(sizes: Sequence[Size], receivers: Sequence[int], repeats: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    spreads: dict[str, Any] = {}
    for count in receivers:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            listener = PipeListener("127.0.0.1")
            stack.push_async_callback(listener.close)
            sender, *ranks = [
                await _peer(rank, count, folder, listener, stack) for rank in range(-1, count)
            ]
            for size in sizes:
                sender.send((size.samples, size.tokens))
                await asyncio.to_thread(sender.recv)
                for road in ROADS if size.unpacks else ROADS[1:]:
                    found = [
                        await asyncio.to_thread(_once, road, size, sender, ranks)
                        for _ in range(repeats + 1)  # the first one warms up
                    ][1:]
                    name = f"{size.name} {count} {road}"
                    spreads[name] = spread([one["step_s"] for one in found])
                    row: dict[str, Any] = {"batch": size.name, "receivers": count, "road": road}
                    row |= {key: statistics.median(one[key] for one in found) for key in found[0]}
                    rows.append(row | {"cpu_share": row["process_cpu_s"] / STEP_S})
    return {"rows": rows, "spread": spreads, "inputs": {}}


def _once(
    road: str, size: Size, sender: Connection, ranks: Sequence[Connection]
) -> dict[str, float]:
    """Bytes through this process, and seconds."""
    through, groups = 0, []
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    sender.send("send")
    for _ in range(size.samples // GROUP):
        data = sender.recv_bytes()
        through += len(data)
        groups.append(pickle.loads(data))
    collect_s = time.perf_counter() - begun_s
    body: object = None
    if road == "trajectories":  # they came as JSON: see `receiving`
        body = tuple(unpack_samples(concat_rows(groups)))
        through, collect_s, cpu_s = 0, 0.0, time.process_time()
    begun_s = time.perf_counter()
    data = pickle.dumps((road, body or concat_rows(groups), size.unpacks))
    for rank, one in enumerate(ranks):
        sent = data if rank == 0 else pickle.dumps(None)
        through += len(sent)
        one.send_bytes(sent)
    for one in ranks:
        one.recv()
    return {
        "mb_through": through / 1e6,
        "collect_s": collect_s,
        "step_s": time.perf_counter() - begun_s,
        "process_cpu_s": time.process_time() - cpu_s,
        "process_rss_gb": psutil.Process().memory_info().rss / 1e9,
    }


def _packing(tokens: int) -> tuple[float, float]:
    """CPU microseconds a token to pack trajectories and to unpack them."""
    segment = Segment(tuple(range(tokens)), (-0.5,) * tokens, 1)
    trajectories = [
        Trajectory(
            group=number,
            sample=0,
            prompt_tokens=tuple(range(PROMPT_TOKENS)),
            parts=(segment,),
            finish_reason="stop",
            reward=1.0,
        )
        for number in range(32)
    ]
    packs, unpacks = [], []
    for _ in range(3):
        at_s = [time.process_time()]
        fields = pack_samples(trajectories)
        at_s.append(time.process_time())
        unpack_samples(fields)
        at_s.append(time.process_time())
        packs.append(at_s[1] - at_s[0])
        unpacks.append(at_s[2] - at_s[1])
    total = len(trajectories) * (tokens + PROMPT_TOKENS)
    return 1e6 * min(packs) / total, 1e6 * min(unpacks) / total


async def _peer(
    rank: int, count: int, folder: Path, listener: PipeListener, stack: AsyncExitStack
) -> Connection:
    """The process of a rank, or of the sender (-1)."""
    where, connection = listener.expect()
    name = f"rank {rank}" if rank >= 0 else "sender"
    child = await start_child(
        name,
        "benchmarks.cluster.roads",
        [where, str(rank), str(count), str(folder / "meet")],
        log_path=folder / f"{name}.log",
        environment={KEY_VARIABLE: listener.key.hex()},
    )
    stack.push_async_callback(child.stop)
    return await asyncio.wait_for(connection, _START_S)


def _send(pipe: Connection) -> None:
    """Send the groups of a batch as often as asked to."""
    groups: list[dict[str, Field]] = []
    while True:
        asked = pipe.recv()
        if asked == "send":
            for one in groups:
                pipe.send_bytes(pickle.dumps(one, pickle.HIGHEST_PROTOCOL))
            continue
        samples, tokens = asked
        fields = packed(samples, tokens, np.random.default_rng(0))
        groups = [slice_rows(fields, first, first + GROUP) for first in range(0, samples, GROUP)]
        pipe.send(None)


def _receive(pipe: Connection, rank: int, count: int, rendezvous: str) -> None:
    """Get batches as a rank of the trainer does."""
    from areal_lab.training.parallel import RankPlace, join

    ranks = join(
        RankPlace(
            rank=rank,
            count=count,
            shards=count,
            device="cpu",
            rendezvous=rendezvous,
            timeout_s=600.0,
        )
    )
    while True:
        road, batch, unpacks = ranks.announce(pipe.recv())
        if road == "arrays" and unpacks:
            batch = unpack_samples(batch)
        pipe.send(len(batch))
        del batch


def main() -> None:
    """The process of a peer."""
    where, rank, count, rendezvous = sys.argv[1:]
    watch_parent()
    if rank == "-1":
        _send(open_pipe(where))
    else:
        _receive(open_pipe(where), int(rank), int(count), rendezvous)


if __name__ == "__main__":
    main()
