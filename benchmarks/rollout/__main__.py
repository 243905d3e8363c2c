"""Interruptible rollout on a real inference server, against waiting for the longest response.

One server, the same requests (log-normal lengths, cut at the longest), new weights every few
seconds: one policy interrupts running responses, the other starts nothing more until the longest
has finished (the paper's Figure 6b). The two take turns within one run. Before them, decode
steps and prefills are timed on the idle server and fitted; the simulator, with these costs and the
measured pauses of the server for updates, then predicts the gain.

    gain                 tokens/s interrupted over tokens/s waited, less 1
    predicted_gain       the same by the simulator
    first_token_s        from "weights ready" to the first token under them, by transfer and pause
                         mode; `wait` is the policy that does not interrupt
    recomputed_tokens    tokens of prompts and responses recomputed after interruptions, per repeat

    python -m benchmarks.rollout --json [--quick] [--backend embedded|sglang|vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areal_lab.engines.launch.backends import BACKENDS, ServerOptions
from areal_lab.engines.launch.environments import environment
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import Transfer
from benchmarks.harness import Arguments, parse, report, spread
from benchmarks.rollout.bench import (
    FULL,
    QUICK,
    SLOTS,
    Bench,
    Results,
    median_of,
    models,
    say,
)
from benchmarks.rollout.latency import Ways
from benchmarks.rollout.load import Measured, Policy


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1, add_own=_own_arguments)
    backend = arguments.own.backend
    if not (found := environment(backend)).condition.usable:
        sys.exit(f"{backend} is {found.condition}; run: areal-lab engine install {backend}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollout-") as name:
        figures = asyncio.run(measure(arguments, backend, Path(name)))
    report(figures, arguments)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=list(BACKENDS), default="sglang")


async def measure(arguments: Arguments, backend: str, folder: Path) -> dict[str, Any]:
    """Start a server, measure everything on it, stop it; returns the figures."""
    ways = Ways(models(), folder / "weights")
    size = QUICK if arguments.quick else FULL
    try:
        async with _server(backend, ways.first, folder) as server:
            results = await Bench(server, ways, size, arguments.repeats).measure()
        if Transfer.ADAPTER in BACKENDS[backend].transfers:
            # A separate server: the others are measured without LoRA.
            ways.begin_again()
            async with _server(backend, ways.first_for_adapters, folder) as server:
                found = await Bench(server, ways, size, arguments.repeats).adapter_latencies()
            results = replace(results, latencies={**results.latencies, Transfer.ADAPTER: found})
    finally:
        ways.close()
    return {
        **figures_of(results),
        "backend": backend,
        "engine_version": server.version,
        "slots": SLOTS,
    }


@asynccontextmanager
async def _server(
    backend: str, weights: WeightsFolder, folder: Path
) -> AsyncIterator[EngineProcess]:
    """Start a server with these weights, with a progress line."""
    say(f"waiting for the {backend} server" + (" for adapters" if weights.adapter else ""))
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    server = await launch_engine(
        backend,
        ServerOptions(
            model=weights.path,
            version=str(weights.version),
            lora=weights.adapter,
            max_running_requests=SLOTS,
        ),
        log_path=folder / "engine.log",
    )
    try:
        say(f"{backend} {server.version} is ready after {clock() - begun_s:.0f} s")
        yield server
    finally:
        await server.stop()


def figures_of(results: Results) -> dict[str, Any]:
    """The figures of the report, with medians over repeats."""
    runs, load, predicted = results.runs, results.load, results.predicted_per_s
    gains = [
        interrupted.tokens_per_s / waited.tokens_per_s - 1
        for interrupted, waited in zip(runs[Policy.INTERRUPT], runs[Policy.WAIT], strict=True)
    ]
    lengths = [request.sampling.max_new_tokens for request in load.requests]
    return {
        "gain": statistics.median(gains),
        "predicted_gain": predicted[Policy.INTERRUPT] / predicted[Policy.WAIT] - 1,
        "first_token_s": _nested(results.latencies, statistics.median),
        "recomputed_tokens": statistics.median(
            one.recomputed_tokens for one in runs[Policy.INTERRUPT]
        ),
        "rows": [_row(policy, runs[policy], predicted[policy]) for policy in Policy],
        "decode_error": results.decode.held_out_error,
        "prefill_error": results.prefill.held_out_error,
        "costs": {**results.decode.settings, **results.prefill.settings},
        "requests": len(lengths),
        "tokens": sum(lengths),
        "mean_tokens": statistics.fmean(lengths),
        "longest_tokens": max(lengths),
        "every_s": load.every_s,
        "spread": {"gain": spread(gains), "first_token_s": _nested(results.latencies, spread)},
    }


def _row(policy: Policy, runs: Sequence[Measured], predicted_per_s: float) -> dict[str, Any]:
    return {
        "policy": str(policy),
        "tokens_per_s": statistics.median(one.tokens_per_s for one in runs),
        "slowest": min(one.tokens_per_s for one in runs),
        "fastest": max(one.tokens_per_s for one in runs),
        "predicted_per_s": predicted_per_s,
        "updates": statistics.median(one.updates for one in runs),
        "update_s": median_of(runs, "update_s"),
        "stands_still_s": median_of(runs, "load_s"),
    }


def _nested(
    latencies: Mapping[Transfer, Mapping[str, Sequence[float]]],
    summary: Callable[[Sequence[float]], Any],
) -> dict[str, dict[str, Any]]:
    return {
        str(transfer): {mode: summary(values) for mode, values in modes.items() if values}
        for transfer, modes in latencies.items()
    }


if __name__ == "__main__":
    main()
