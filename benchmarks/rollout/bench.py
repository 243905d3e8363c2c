"""All measurements of `benchmarks.rollout` on one server.

first tokens, every transfer and mode --> costs of decode steps and prefills --> both policies
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from areal_lab.engines.client.engine_client import STREAM_INTERVAL, EngineClient
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import GenerateRequest, PauseMode
from areal_lab.engines.weights.records import Transfer
from benchmarks.rollout.latency import Ear, Ways, first_token_s
from benchmarks.rollout.load import Load, Measured, Policy, generate_all, long_tailed
from benchmarks.rollout.prediction import Costs, Stopwatch, calibrate, costs_from, predict
from simulator.calibrate.fit import PartFit

SLOTS = 16
VOCABULARY = 512
CONTEXT = 2048
LONGEST = 1024
PROMPT_TOKENS = 32
SIGMA = 1.0
DRAWN = 2000
"""Number of requests available; a run uses as many as fill its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the benchmark."""

    run_s: float
    """Simulated seconds of one run without interruptions."""
    updates: int
    """Weight updates in this time."""
    median_tokens: int
    most_tokens: int
    """Mean length of a response."""
    rounds: int
    """Repeats of the calibration."""
    timed_tokens: int
    """Length of its responses."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Measurements on one server, and predictions for it."""

    latencies: Mapping[Transfer, Mapping[str, Sequence[float]]]
    """Seconds from ready to the first token, by transfer and mode, or `wait`."""
    decode: PartFit
    prefill: PartFit
    load: Load
    runs: Mapping[Policy, Sequence[Measured]]
    """Results of the repeats, by policy."""
    predicted_per_s: Mapping[Policy, float]


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


class Bench:
    """All measurements on one server."""

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

    async def measure(self) -> Results:
        """Run all measurements."""
        async with self._client(STREAM_INTERVAL) as client:
            decode, prefill = await self._calibrate(client)
            costs = costs_from(decode, prefill, str(self._ways.first.path))
            load = self._load(costs)
            runs, waits_s = await self._policies(client, load)
        latencies = await self._latencies()
        latencies[Transfer.FOLDER]["wait"] = waits_s
        return Results(
            latencies=latencies,
            decode=decode,
            prefill=prefill,
            load=load,
            runs=runs,
            predicted_per_s={
                policy: predict(load, policy, costs, median_of(runs[policy], "load_s"))
                for policy in Policy
            },
        )

    async def _latencies(self) -> dict[Transfer, dict[str, list[float]]]:
        """First-token times of each transfer and mode, in turns."""
        found: dict[Transfer, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        async with self._client(1) as client:
            for count in range(self._size.latencies):
                for transfer in map(Transfer, self._backend.transfers):
                    if transfer is Transfer.ADAPTER:
                        continue
                    for mode in self._backend.pause_modes:
                        found[transfer][str(mode)].append(
                            await self._first_token_s(client, transfer, mode, count)
                        )
        return found

    async def adapter_latencies(self) -> dict[str, list[float]]:
        """First-token times of adapters, on a server started with LoRA; they have one mode."""
        mode, transfer = PauseMode.ABORT, Transfer.ADAPTER
        async with self._client(1) as client:
            client.use_adapters(0)
            seconds = [
                await self._first_token_s(client, transfer, mode, count)
                for count in range(self._size.latencies)
            ]
        return {str(mode): seconds}

    async def _first_token_s(
        self, client: EngineClient, transfer: Transfer, mode: PauseMode, count: int
    ) -> float:
        say(f"first token: {transfer}, {mode} ({count + 1})")
        return await first_token_s(
            client,
            self._ear,
            self._long_requests(f"{transfer}-{mode}-{count}"),
            version=self._ways.next,
            bring=partial(self._ways.bring, client, transfer, mode),
            mode=mode,
        )

    def _long_requests(self, name: str) -> list[GenerateRequest]:
        """Requests that fill all slots, each of maximum length."""
        return [
            dataclasses.replace(
                one,
                request_id=f"{name}-{one.request_id}",
                sampling=dataclasses.replace(one.sampling, max_new_tokens=LONGEST),
            )
            for one in self._drawn[:SLOTS]
        ]

    def _load(self, costs: Costs) -> Load:
        """As many requests as fill the time, according to the simulator."""
        all_of_them = Load(requests=self._drawn, slots=SLOTS, every_s=math.inf)
        tokens = self._size.run_s * predict(all_of_them, Policy.INTERRUPT, costs, 0.0)
        count = max(4 * SLOTS, round(tokens / all_of_them.tokens * DRAWN))
        return Load(
            requests=self._drawn[:count],
            slots=SLOTS,
            every_s=self._size.run_s / self._size.updates,
        )

    async def _calibrate(self, client: EngineClient) -> tuple[PartFit, PartFit]:
        say("timing decode steps and prefills")
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
    ) -> tuple[dict[Policy, list[Measured]], list[float]]:
        """Repeat both policies in turns; also returns the first-token times of `WAIT`."""
        runs: dict[Policy, list[Measured]] = {policy: [] for policy in Policy}
        waits_s: list[float] = []

        async def bring(ready_s: float) -> None:
            self._ear.expect(self._ways.next, ready_s)
            await self._ways.bring(client, Transfer.FOLDER, PauseMode.RETRACT)
            self._ear.brought()

        for count in range(self._repeats):
            for policy in Policy:
                heard = len(self._ear.first_s)
                one = await generate_all(client, load, policy, bring)
                say(
                    f"{policy} ({count + 1}): {one.tokens_per_s:,.0f} tokens/s, "
                    f"{one.updates} updates in {one.seconds:.1f} s"
                )
                runs[policy].append(one)
                if policy is Policy.WAIT:
                    waits_s += self._ear.first_s[heard:]
        return runs, waits_s

    @asynccontextmanager
    async def _client(self, interval: int) -> AsyncIterator[EngineClient]:
        client = EngineClient(
            self._server.base_url,
            api=self._api,
            stream_interval=interval,
            key=self._server.client.key,
        )
        try:
            yield client
        finally:
            await client.close()


def median_of(runs: Sequence[Measured], what: str) -> float:
    """Mean over all updates of all repeats; 0 without updates."""
    values = [value for one in runs for value in getattr(one, what)]
    return statistics.median(values) if values else 0.0


def say(what: str) -> None:
    """Print a progress line."""
    print(f"  {what}", file=sys.stderr, flush=True)
