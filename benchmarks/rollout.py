"""Interruptible rollout on a real inference server, against waiting for the longest answer.

One server, the same requests (log-normal lengths, cut at the longest), new weights every few
seconds: once running answers are interrupted for them, once nothing more is started until the
longest has ended (the paper's Figure 6b). The two take turns within one run. Before them, decode
steps and prefills are timed on the idle server and fitted; the simulator, with these costs and the
time that the server stood still for an update, then says what the gain should be.

    gain                 tokens/s interrupted over tokens/s waited, less 1
    predicted_gain       the same by the simulator
    first_token_s        from "weights ready" to the first token under them, by transfer and by what
                         is done to running answers; `wait` is the policy that does not interrupt
    recomputed_tokens    of prompts and answers, read again after interruptions, in one repeat

    python -m benchmarks.rollout --json [--quick] [--backend embedded|sglang|vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from areal_lab.engines.backends import BACKENDS
from areal_lab.engines.client import STREAM_INTERVAL, EngineClient
from areal_lab.engines.launch import EngineProcess, launch_engine
from areal_lab.engines.protocol import GenerateRequest, PauseMode
from areal_lab.engines.transfer.records import Transfer
from benchmarks.harness import Arguments, parse, report, spread
from benchmarks.rollout_latency import Ear, Ways, first_token_s
from benchmarks.rollout_load import Load, Measured, Policy, generate_all, long_tailed
from benchmarks.rollout_prediction import Costs, Stopwatch, calibrate, costs_from, predict
from simulator.calibrate_fit import PartFit

SLOTS = 16
VOCABULARY = 512
CONTEXT = 2048
LONGEST = 1024
PROMPT_TOKENS = 32
SIGMA = 1.0
DRAWN = 2000
"""Requests that there are; a run takes as many of them as fill its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    run_s: float
    """That one policy is to take, by the simulator, where nothing interrupts it."""
    updates: int
    """New weights in this time."""
    median_tokens: int
    most_tokens: int
    """Of an answer."""
    rounds: int
    """Of the calibration."""
    timed_tokens: int
    """Of an answer in it."""
    latencies: int
    """Measurements of each transfer and mode."""


FULL = Size(
    run_s=10.0,
    updates=4,
    median_tokens=100,
    most_tokens=1024,
    rounds=2,
    timed_tokens=64,
    latencies=3,
)
QUICK = Size(
    run_s=3.0,
    updates=2,
    median_tokens=24,
    most_tokens=160,
    rounds=1,
    timed_tokens=32,
    latencies=1,
)


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1, add_own=_own_arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollout-") as name:
        report(asyncio.run(measure(arguments, Path(name))), arguments)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=list(BACKENDS), default="sglang")


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two sets of random weights of one small Llama.

    A decode step of it takes hardly longer for many sequences than for one, as on a GPU, where
    weights are read once for all; a model of a hundred million parameters computes on a CPU core,
    and a step takes as long as its sequences are many.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    both = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        both.append(LlamaForCausalLM(config).eval())
    return both[0], both[1]


async def measure(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Start a server, measure everything on it, stop it; returns the figures."""
    backend = arguments.own.backend
    size = QUICK if arguments.quick else FULL
    ways = Ways(models(), folder / "weights")
    _say(f"waiting for the {backend} server")
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    server = await launch_engine(
        backend,
        index=0,
        weights=ways.first,
        port=0,
        threads=1,
        dtype="float32",
        max_running_requests=SLOTS,
        context_length=None,
        log_path=folder / "engine.log",
    )
    try:
        _say(f"{backend} {server.version} is ready after {clock() - begun_s:.0f} s")
        return await _Bench(server, ways, size, arguments.repeats).figures()
    finally:
        ways.close()
        await server.stop()


class _Bench:
    """One server, and everything that is measured on it."""

    def __init__(self, server: EngineProcess, ways: Ways, size: Size, repeats: int) -> None:
        self._server = server
        self._ways = ways
        self._size = size
        self._repeats = repeats
        self._backend = BACKENDS[server.backend]
        self._ear = Ear()
        self._api = self._ear.dialect(server.client.api)
        self._drawn = long_tailed(
            DRAWN,
            median_tokens=size.median_tokens,
            sigma=SIGMA,
            most_tokens=size.most_tokens,
            prompt_tokens=PROMPT_TOKENS,
            vocabulary=VOCABULARY,
        )

    async def figures(self) -> dict[str, Any]:
        """Measure; everything that the report has."""
        latencies = await self._latencies()
        async with self._client(STREAM_INTERVAL) as client:
            decode, prefill = await self._calibrate(client)
            costs = costs_from(decode, prefill, str(self._ways.first.path))
            load = self._load(costs)
            runs, waits_s = await self._policies(client, load)
        latencies[Transfer.FOLDER]["wait"] = waits_s
        of = {policy: [one for kind, one in runs if kind is policy] for policy in Policy}
        gains = [
            a.tokens_per_s / b.tokens_per_s - 1
            for a, b in zip(of[Policy.INTERRUPT], of[Policy.WAIT], strict=True)
        ]
        predicted = {
            policy: predict(load, policy, costs, _median_of(of[policy], "load_s"))
            for policy in Policy
        }
        lengths = [request.sampling.max_new_tokens for request in load.requests]
        return {
            "gain": statistics.median(gains),
            "predicted_gain": predicted[Policy.INTERRUPT] / predicted[Policy.WAIT] - 1,
            "first_token_s": _nested(latencies, statistics.median),
            "recomputed_tokens": statistics.median(
                one.recomputed_tokens for one in of[Policy.INTERRUPT]
            ),
            "rows": [_row(policy, of[policy], predicted[policy]) for policy in Policy],
            "decode_error": decode.held_out_error,
            "prefill_error": prefill.held_out_error,
            "costs": {**decode.settings, **prefill.settings},
            "backend": self._backend.name,
            "engine_version": self._server.version,
            "slots": SLOTS,
            "requests": len(lengths),
            "tokens": sum(lengths),
            "mean_tokens": statistics.fmean(lengths),
            "longest_tokens": max(lengths),
            "every_s": load.every_s,
            "spread": {"gain": spread(gains), "first_token_s": _nested(latencies, spread)},
        }

    async def _latencies(self) -> dict[Transfer, dict[str, list[float]]]:
        """Of each transfer and mode, in turns."""
        found: dict[Transfer, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        async with self._client(1) as client:
            for count in range(self._size.latencies):
                for transfer in map(Transfer, self._backend.transfers):
                    for mode in self._backend.pause_modes:
                        _say(f"first token: {transfer}, {mode} ({count + 1})")
                        found[transfer][str(mode)].append(
                            await first_token_s(
                                client,
                                self._ear,
                                self._long_requests(f"{transfer}-{mode}-{count}"),
                                version=self._ways.next,
                                bring=partial(self._ways.bring, client, transfer, mode),
                                mode=mode,
                            )
                        )
        return found

    def _long_requests(self, name: str) -> list[GenerateRequest]:
        """As many as run at a time, each as long as it may be."""
        return [
            dataclasses.replace(
                one,
                request_id=f"{name}-{one.request_id}",
                sampling=dataclasses.replace(one.sampling, max_new_tokens=LONGEST),
            )
            for one in self._drawn[:SLOTS]
        ]

    def _load(self, costs: Costs) -> Load:
        """As many requests as fill the time, by what the simulator says of the engine."""
        all_of_them = Load(requests=self._drawn, slots=SLOTS, every_s=math.inf)
        tokens = self._size.run_s * predict(all_of_them, Policy.INTERRUPT, costs, 0.0)
        count = max(4 * SLOTS, round(tokens / all_of_them.tokens * DRAWN))
        return Load(
            requests=self._drawn[:count],
            slots=SLOTS,
            every_s=self._size.run_s / self._size.updates,
        )

    async def _calibrate(self, client: EngineClient) -> tuple[PartFit, PartFit]:
        _say("timing decode steps and prefills")
        watch = Stopwatch(client, asyncio.get_running_loop().time)
        self._ear.told = watch.message
        try:
            return await calibrate(
                client,
                watch,
                slots=SLOTS,
                rounds=self._size.rounds,
                tokens=self._size.timed_tokens,
                vocabulary=VOCABULARY,
            )
        finally:
            self._ear.told = lambda: None

    async def _policies(
        self, client: EngineClient, load: Load
    ) -> tuple[list[tuple[Policy, Measured]], list[float]]:
        """Both in turns, as often as asked for; and how long the first tokens waited for `WAIT`."""
        runs: list[tuple[Policy, Measured]] = []
        waits_s: list[float] = []

        async def bring(ready_s: float) -> None:
            self._ear.expect(self._ways.next, ready_s)
            await self._ways.bring(client, Transfer.FOLDER, PauseMode.RETRACT)
            self._ear.brought()

        for count in range(self._repeats):
            for policy in Policy:
                heard = len(self._ear.first_s)
                one = await generate_all(client, load, policy, bring)
                _say(
                    f"{policy} ({count + 1}): {one.tokens_per_s:,.0f} tokens/s, "
                    f"{one.updates} updates in {one.seconds:.1f} s"
                )
                runs.append((policy, one))
                if policy is Policy.WAIT:
                    waits_s += self._ear.first_s[heard:]
        return runs, waits_s

    @asynccontextmanager
    async def _client(self, interval: int) -> AsyncIterator[EngineClient]:
        client = EngineClient(self._server.base_url, api=self._api, stream_interval=interval)
        try:
            yield client
        finally:
            await client.close()


def _row(policy: Policy, runs: Sequence[Measured], predicted_per_s: float) -> dict[str, Any]:
    return {
        "policy": str(policy),
        "tokens_per_s": statistics.median(one.tokens_per_s for one in runs),
        "slowest": min(one.tokens_per_s for one in runs),
        "fastest": max(one.tokens_per_s for one in runs),
        "predicted_per_s": predicted_per_s,
        "updates": statistics.median(one.updates for one in runs),
        "update_s": _median_of(runs, "update_s"),
        "stands_still_s": _median_of(runs, "load_s"),
    }


def _median_of(runs: Sequence[Measured], what: str) -> float:
    """Of all updates of all repeats; 0 if there were none."""
    values = [value for one in runs for value in getattr(one, what)]
    return statistics.median(values) if values else 0.0


def _nested(
    latencies: Mapping[Transfer, Mapping[str, Sequence[float]]],
    summary: Callable[[Sequence[float]], Any],
) -> dict[str, dict[str, Any]]:
    return {
        str(transfer): {mode: summary(values) for mode, values in modes.items() if values}
        for transfer, modes in latencies.items()
    }


def _say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
