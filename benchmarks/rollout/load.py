"""Run the same requests while new weights keep coming, and interrupt them or wait for them.

    interrupt   ready --pause--> load --resume, recompute--> the same responses continue
    wait        ready --start nothing more--> the longest response ends --> load --> start the next

Otherwise both keep `slots` requests running. Weights are ready every `every_s`, or when the engine
has taken the previous ones, whichever is later. Throughput is counted until the last request is
started, since slots are empty afterwards.
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
    """How new weights affect running responses."""

    INTERRUPT = "interrupt"
    WAIT = "wait"


class Generates(Protocol):
    """The part of an engine client used here."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request."""
        ...

    def received_tokens(self, request_id: str) -> int:
        """Tokens of a running sample that have arrived."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding."""
        ...

    async def resume(self) -> None:
        """Continue."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, and the interval of weight updates."""

    requests: tuple[GenerateRequest, ...]
    slots: int
    """Requests that run at the same time."""
    every_s: float

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(request.sampling.max_new_tokens for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of one policy on a load."""

    tokens: int
    """Tokens generated until the last request was started."""
    seconds: float
    """Seconds until then."""
    updates: int
    update_s: tuple[float, ...]
    """Seconds of each update, from when the weights were ready until the engine continued."""
    load_s: tuple[float, ...]
    """Seconds that the engine paused, per update."""
    recomputed_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
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
    """Random prompts and log-normal lengths cut at the longest, always the same; they end only
    at their length and share no prefix."""
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
    """Generate a load under one policy, to the end of every response.

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
                one.result()  # before the last request is started, it can only end with an error
        seconds = clock() - began_s
        tokens = state.ended_tokens + sum(map(engine.received_tokens, state.running))
        updates = len(update_s)
        await asyncio.gather(*workers)
        # Finish a running update, so that the engine is left as before.
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
