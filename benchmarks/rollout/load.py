"""The same requests while new weights keep coming: interrupt what runs for them, or wait for it.

    interrupt   ready --pause--> load --resume, what ran is computed again--> the same answers go on
    wait        ready --start nothing more--> the longest answer ends --> load --> the next start

Both keep `slots` requests running otherwise. Weights are ready every `every_s`, or as soon as the
engine has taken those before, whichever is later. Throughput is counted until the last request is
started: from then on slots are empty for want of requests.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from areal_lab.engines.client.resubmit import recomputed_tokens
from areal_lab.engines.protocol import Generated, GenerateRequest, PauseMode, SamplingParams


class Policy(StrEnum):
    """What new weights do to running answers."""

    INTERRUPT = "interrupt"
    WAIT = "wait"


class Generates(Protocol):
    """What is needed of an engine's client."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Draw one sample per request."""
        ...

    def received_tokens(self, request_id: str) -> int:
        """Tokens of a running sample that have arrived."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is generated, and how often new weights come."""

    requests: tuple[GenerateRequest, ...]
    slots: int
    """Requests that run at a time."""
    every_s: float

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(request.sampling.max_new_tokens for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one policy made of a load."""

    tokens: int
    """Generated until the last request was started."""
    seconds: float
    """Until then."""
    updates: int
    update_s: tuple[float, ...]
    """Of each update, from the moment that weights were ready until the engine went on."""
    load_s: tuple[float, ...]
    """Of each update, what the engine stood still for it."""
    recomputed_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds


def long_tailed(
    count: int,
    *,
    median_tokens: int,
    sigma: float,
    most_tokens: int,
    prompt_tokens: int,
    vocabulary: int,
    seed: int = 7,
) -> tuple[GenerateRequest, ...]:
    """Random prompts and log-normal lengths cut at the longest, always the same ones; they end at
    their length only, and share no prefix."""
    chance = random.Random(seed)

    def length() -> int:
        drawn = chance.lognormvariate(math.log(median_tokens), sigma)
        return max(1, min(most_tokens, round(drawn)))

    return tuple(
        GenerateRequest(
            request_id=str(index),
            prompt_tokens=tuple(chance.randrange(2, vocabulary) for _ in range(prompt_tokens)),
            sampling=SamplingParams(max_new_tokens=length(), ignore_eos=True, seed=index),
        )
        for index in range(count)
    )


@dataclass(slots=True, kw_only=True)
class _State:
    left: deque[GenerateRequest]
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    last_started: asyncio.Event = field(default_factory=asyncio.Event)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: dict[str, GenerateRequest] = field(default_factory=dict)
    ended_tokens: int = 0
    recomputed_tokens: int = 0


async def generate_all(
    engine: Generates,
    load: Load,
    policy: Policy,
    bring: Callable[[float], Awaitable[object]],
    *,
    mode: PauseMode = PauseMode.RETRACT,
) -> Measured:
    """Generate a load under one policy, to the end of every answer.

    Args:
        bring: loads the next weights into the engine, which is paused or idle; told when (on the
            clock of the event loop) they were ready.
        mode: of the pauses.
    """
    clock = asyncio.get_running_loop().time
    state = _State(left=deque(load.requests))
    state.may_start.set()
    state.idle.set()
    update_s: list[float] = []
    load_s: list[float] = []

    async def work() -> None:
        while state.left:
            await state.may_start.wait()
            if state.left:
                await _one(engine, state)

    async def update() -> None:
        ready_s = began_s + load.every_s
        while True:
            await asyncio.sleep(ready_s - clock())
            async with state.updating:
                if policy is Policy.INTERRUPT:
                    stopped_s = clock()
                    await engine.pause(mode)
                else:
                    state.may_start.clear()
                    await state.idle.wait()
                    stopped_s = clock()
                await bring(ready_s)
                if policy is Policy.INTERRUPT:
                    await engine.resume()
                state.may_start.set()
            update_s.append(clock() - ready_s)
            load_s.append(clock() - stopped_s)
            ready_s = max(ready_s + load.every_s, clock())

    began_s = clock()
    updating = asyncio.create_task(update(), name="update")
    workers = [asyncio.create_task(work(), name="work") for _ in range(load.slots)]
    ending = asyncio.create_task(state.last_started.wait())
    try:
        await asyncio.wait({ending, updating, *workers}, return_when=asyncio.FIRST_COMPLETED)
        for one in (updating, *workers):
            if one.done():
                one.result()  # before the last request is started it ends by an error only
        seconds = clock() - began_s
        tokens = state.ended_tokens + sum(map(engine.received_tokens, state.running))
        updates = len(update_s)
        await asyncio.gather(*workers)
        # One that has begun is to end, so that the engine is left as it was found.
        async with state.updating:
            updating.cancel()
    finally:
        for task in (ending, updating, *workers):
            task.cancel()
    return Measured(
        tokens=tokens,
        seconds=seconds,
        updates=updates,
        update_s=tuple(update_s[:updates]),
        load_s=tuple(load_s[:updates]),
        recomputed_tokens=state.recomputed_tokens,
    )


async def _one(engine: Generates, state: _State) -> None:
    request = state.left.popleft()
    state.running[request.request_id] = request
    state.idle.clear()
    if not state.left:
        state.last_started.set()
    (sample,) = await engine.generate([request])
    del state.running[request.request_id]
    state.ended_tokens += sum(len(part.tokens) for part in sample.segments)
    state.recomputed_tokens += recomputed_tokens(sample, len(request.prompt_tokens))
    if not state.running:
        state.idle.set()
