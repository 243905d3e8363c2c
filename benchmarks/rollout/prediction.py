"""Predict a load and a policy with the simulator, with costs measured on the same server.

    requests of one length, all at once --seconds--> points --fit_decode, fit_prefill--> Costs
    Load, Policy, Costs --simulator.engine.replica--> tokens per second

The engine is `simulator.engine.replica`, as in every simulation; costs are fitted as `areal-lab
calibrate` fits them. The only other input is the pause of the engine for an update.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from areal_lab.engines.protocol import GenerateRequest, SamplingParams
from benchmarks.rollout.load import Generates, Load, Policy
from simulator.calibrate.engine import fit_decode, fit_prefill
from simulator.calibrate.fit import EnginePoint, PartFit
from simulator.catalogue.gpu import CPU_CORE
from simulator.catalogue.models import find_model
from simulator.config.schema import SimulationConfig
from simulator.costs.decode import decode_cost
from simulator.costs.measured_engine import measured_decode, measured_prefill
from simulator.costs.prefill import causal_pairs
from simulator.engine.decode_batch import StepCost
from simulator.engine.replica import PrefillSeconds, Replica

SHORT, LONG = 16, 320
"""Prompt tokens of requests whose decode steps are timed."""
READ_TOKENS = (32, 64, 128, 192, 256, 512)
"""Prompt tokens of requests whose prefill is timed."""
LEAST_STEP_S = 1e-6
"""Minimum seconds of a decode step; on a busy machine the fit may find 0."""
CACHE_TOKENS = 10**9
"""The real engine has memory for all running requests."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the engine."""

    decode: StepCost
    prefill: PrefillSeconds


class Stopwatch:
    """Times the decode steps of requests that run together, from outside.

    Each message of the engine is a moment; between the first at which all run and the last at
    which all still do, every one of them got a token a step.
    """

    def __init__(self, engine: Generates, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._names: list[str] = []
        self._target = 0
        self._first: tuple[float, float] | None = None
        self._last = (0.0, 0.0)

    def start(self, names: Iterable[str], tokens: int) -> None:
        """Watch these requests, with `tokens` tokens each."""
        self._names, self._target, self._first = list(names), tokens, None

    def message(self) -> None:
        """The engine has sent a message; count the earlier ones."""
        if not self._names:
            return
        counts = [self._engine.received_tokens(name) for name in self._names]
        if min(counts) == 0 or max(counts) >= self._target:
            return
        self._last = (self._clock(), sum(counts) / len(counts))
        if self._first is None:
            self._first = self._last

    def stop(self) -> tuple[float, float]:
        """Seconds, and the steps in them.

        Raises:
            RuntimeError: if they never ran together.
        """
        self._names = []
        if self._first is None or self._last[1] <= self._first[1]:
            raise RuntimeError("the requests did not run together; repeat on a quieter machine")
        return self._last[0] - self._first[0], self._last[1] - self._first[1]


async def calibrate(
    engine: Generates, watch: Stopwatch, *, slots: int, rounds: int, tokens: int, vocabulary: int
) -> tuple[PartFit, PartFit]:
    """Time an idle engine at several batch sizes up to `slots`, and prompts of several lengths.

    Args:
        rounds: of each; a quarter of the points is held out of the fit.
        tokens: tokens of each response whose decode steps are timed.
    """
    clock = asyncio.get_running_loop().time
    chance = random.Random(11)
    decoded: list[EnginePoint] = []
    read: list[EnginePoint] = []
    sizes = sorted({1, slots // 4, slots // 2, slots} - {0})

    def requests(count: int, prompt: int, response: int) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                request_id=f"calibrate-{chance.getrandbits(48):x}",
                prompt_tokens=tuple(chance.randrange(2, vocabulary) for _ in range(prompt)),
                sampling=SamplingParams(max_new_tokens=response, ignore_eos=True, seed=index),
            )
            for index in range(count)
        ]

    await engine.generate(requests(slots, SHORT, 8))  # warm-up
    for _ in range(rounds):
        for size in sizes:
            for prompt in (SHORT, LONG):
                batch = requests(size, prompt, tokens)
                watch.start([one.request_id for one in batch], tokens)
                await engine.generate(batch)
                seconds, steps = watch.stop()
                context = steps * size * (prompt + tokens / 2)
                decoded.append(
                    EnginePoint(
                        seconds=seconds,
                        steps=steps,
                        sequences=steps * size,
                        context_tokens=context,
                        place=len(decoded) + 1,
                    )
                )
        for prompt in READ_TOKENS:
            for size in (1, 4):
                begun_s = clock()
                await engine.generate(requests(size, prompt, 1))
                read.append(
                    EnginePoint(
                        seconds=clock() - begun_s,
                        steps=1,
                        sequences=size,
                        context_tokens=size * prompt,
                        prompt_tokens=size * prompt,
                        prompt_pairs=size * causal_pairs(prompt),
                        place=len(read) + 1,
                    )
                )
    decode = fit_decode(decoded, "batches that were timed")
    prefill = fit_prefill(read, decode)
    assert prefill is not None, "enough were timed"
    return decode, prefill


def costs_from(decode: PartFit, prefill: PartFit, model: str) -> Costs:
    """The fitted costs, as input of the simulator.

    Args:
        model: name or folder of the model that was served.
    """
    step_s = max(decode.settings["rollout.decode_step_s"], LEAST_STEP_S)
    settings = {**decode.settings, **prefill.settings, "rollout.decode_step_s": step_s}
    config = SimulationConfig().with_settings(settings)
    reads = measured_prefill(config)
    assert reads is not None
    steps = decode_cost(find_model(model), CPU_CORE, 1, measured=measured_decode(config))
    return Costs(steps, reads)


def predict(load: Load, policy: Policy, costs: Costs, load_s: float) -> float:
    """Tokens per second until the last request is started.

    Args:
        load: more requests than slots.
        load_s: that the engine stands still for an update.
    """
    engine = Replica(
        decode=costs.decode,
        prefill=costs.prefill,
        max_running=load.slots,
        cache_tokens=CACHE_TOKENS,
        prefix_sharing=False,
    )
    left = deque(enumerate(load.requests))
    now_s, ready_s, version, running = 0.0, load.every_s, 0, 0
    waiting = False
    while True:
        while left and running < load.slots and not waiting:
            number, request = left.popleft()
            length = request.sampling.max_new_tokens
            engine.submit(now_s, number, len(request.prompt_tokens), [length], version)
            running += 1
        if not left:
            return engine.generated_tokens / now_s
        if waiting and not running:
            now_s += load_s
            engine.pause(now_s - load_s)
            version += 1
            engine.resume(now_s, version)
            waiting, ready_s = False, max(ready_s + load.every_s, now_s)
            continue
        now_s = min(engine.next_s(), math.inf if waiting else ready_s)
        running -= len(engine.advance(now_s))
        if now_s >= ready_s and not waiting:
            if policy is Policy.WAIT:
                waiting = True
                continue
            engine.pause(now_s)
            now_s += load_s
            version += 1
            running -= len(engine.advance(now_s))
            engine.resume(now_s, version)
            ready_s = max(ready_s + load.every_s, now_s)
