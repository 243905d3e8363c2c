"""Measure controllers on three emulated hosts: start by part, bytes, growth over many steps."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.controllers.host_pool import HostPool, host_pool
from areal_lab.controllers.rollout import AsyncRolloutController
from areal_lab.controllers.train import AsyncTrainController
from areal_lab.data.sources import load_problems
from benchmarks.harness import spread
from benchmarks.tiny_model import write_tiny_model

HOSTS: Final = 3
LENGTHS: Final = (128, 1024, 2048)
"""Longest responses, of which most are cut off there."""
STEPS: Final = 200
"""Of the part that looks for growth."""
_SAMPLES: Final = 16
_WORDS: Final = tuple(f"w{number}" for number in range(4_000))
"""Enough tokens that a response seldom ends by itself."""


def measure(*, quick: bool, repeats: int) -> dict[str, Any]:
    """All cases; see `__main__`."""
    return asyncio.run(_measure(quick, repeats))


async def _measure(quick: bool, repeats: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    starts: list[dict[str, float]] = []
    shares: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", words=_WORDS, context_tokens=4096)
        for length in LENGTHS[:1] if quick else LENGTHS:
            runs = [
                await _run(folder, length, steps=3 if quick else 10)
                for _ in range(1 if quick else min(repeats, 2))
            ]
            starts += [run.pop("start") for run in runs]
            shares[f"bytes share {length}"] = [run["share"] for run in runs]
            rows.append({"part": "bytes", "max_new_tokens": length, **runs[-1]})
        grown = await _run(folder, 16, steps=20 if quick else STEPS)
        grown.pop("start")
        rows.append({"part": "growth", "max_new_tokens": 16, **grown})
    for part in starts[0]:
        seconds = [start[part] for start in starts]
        rows.append({"part": f"start: {part}", "seconds": sorted(seconds)[len(seconds) // 2]})
    return {
        "rows": rows,
        "spread": {name: spread(values) for name, values in shares.items()},
        "controller_bytes_share": min(row["share"] for row in rows if row["part"] == "bytes"),
        "inputs": {
            "message_s": grown["cpu_s"] / (2 * grown["groups"]),
        },
    }


async def _run(folder: Path, length: int, *, steps: int) -> dict[str, Any]:
    """One loop; what passed through this process, and what is left after it."""
    config = load_config(
        None,
        [
            f"actor.path={folder / 'model'}",
            f"cluster.n_nodes={HOSTS}",
            "cluster.shared_files=never",
            "rollout.engines=2",
            "rollout.threads=1",
            "actor.threads=1",
            "actor.dtype=float32",
            "rollout.dtype=float32",
            "dataset.batch_size=2",
            f"gconfig.n_samples={_SAMPLES}",
            f"gconfig.max_new_tokens={length}",
            "rollout.max_running_requests=32",
            f"total_train_steps={steps}",
            "evaluation.max_problems=0",
        ],
    )
    began_s = time.monotonic()
    start: dict[str, float] = {}
    problems = load_problems(config.dataset, seed=1).train
    async with host_pool(config, folder=folder) as pool:
        start["hosts"] = time.monotonic() - began_s
        trainer, rollouts = await asyncio.gather(
            _timed("trainer", start, AsyncTrainController.start(pool, config)),
            _timed("engines", start, AsyncRolloutController.start(pool, config, problems)),
        )
        try:
            return await _steps(pool, config, rollouts, trainer, start)
        finally:
            await rollouts.close()
            await trainer.close()


async def _timed(name: str, into: dict[str, float], work: Any) -> Any:
    began_s = time.monotonic()
    found = await work
    into[name] = time.monotonic() - began_s
    return found


async def _steps(
    pool: HostPool,
    config: TrainConfig,
    rollouts: AsyncRolloutController,
    trainer: AsyncTrainController,
    start: dict[str, float],
) -> dict[str, Any]:
    began_s, early, cpu_s = time.monotonic(), dict[str, int](), time.process_time()
    steps = config.total_train_steps
    for step in range(steps):
        batch = await rollouts.prepare_batch()
        if step == 0:
            start["first batch"] = time.monotonic() - began_s
        await trainer.train(batch)
        await rollouts.update_weights(await trainer.export())
        await rollouts.free(batch)
        if step == steps // 4:
            early = _held(pool)
    tensors = rollouts.counts["tensor_bytes"]
    here = rollouts.traffic
    through = (
        here.sent_bytes
        + here.received_bytes
        + trainer.traffic.sent_bytes
        + trainer.traffic.received_bytes
    )
    late = _held(pool)
    return {
        "start": start,
        "steps": steps,
        "tensor_bytes": tensors,
        "through_controller_bytes": through,
        "share": through / tensors,
        "controller_rss_growth_mb": (late["rss"] - early["rss"]) / 1e6,
        "agents_rss_growth_mb": (late["agents"] - early["agents"]) / 1e6,
        "shards_held_early": early["shards"],
        "shards_held_late": late["shards"],
        "groups": rollouts.counts["groups"],
        "received_bytes": here.received_bytes,
        "cpu_s": time.process_time() - cpu_s,
        "seconds": time.monotonic() - began_s,
    }


def _held(pool: HostPool) -> dict[str, int]:
    agents = [
        child
        for child in psutil.Process().children()
        if "areal_lab.cluster.agent.run" in child.cmdline()
    ]
    return {
        "rss": psutil.Process().memory_info().rss,
        "agents": sum(agent.memory_info().rss for agent in agents),
        "shards": len(pool.shards),
    }
