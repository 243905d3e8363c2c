"""Turns of a sample: each is routed separately, and continues elsewhere if its engine is lost.

    workflow --turn(context)--> router --> engine --> Generated --> workflow
                                  ^           |
                                  '-- lost ---' with the tokens so far

The name of a turn's request is a hash of its prompt. So tokens saved in a checkpoint are reused if
the workflow makes the same request again.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from areal_lab.agents.control_text import control_text
from areal_lab.control.events import EngineId, GroupId
from areal_lab.control.routing import Router
from areal_lab.data.images import EncodedPrompt, PlacedImage
from areal_lab.data.problems import sample_seed
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.resubmit import PartialSamples
from areal_lab.engines.protocol import (
    EngineUnreachable,
    Generated,
    GenerateRequest,
    SamplingParams,
    ScoredTokens,
)
from areal_lab.rewards.service import RewardOutcome, RewardService
from areal_lab.runlog.records import TurnTimes


class Unfinished(Exception):
    """The engine was lost before its requests ended; `samples` has the tokens so far."""

    def __init__(self, samples: PartialSamples, cause: Exception) -> None:
        super().__init__(str(cause))
        self.samples = samples


class TurnEngines(Protocol):
    """Interface of the engines that accept turns."""

    async def for_rollouts(self) -> Sequence[EngineId]:
        """Return their numbers, at least one; waits while all are restarting.

        Raises:
            Exception: no engine is left; the reason of the last loss.
        """
        ...


@dataclass(slots=True)
class TurnRouter:
    """Assignment of turns to engines by the routing policy of the run."""

    router: Router

    async def acquire(self, engines: TurnEngines, key: Hashable) -> EngineId:
        """Return the engine for the next turn of the conversation `key`.

        Raises:
            Exception: no engine is left; the reason of the last loss.
        """
        alive = await engines.for_rollouts()
        for gone in self.router.loads().keys() - set(alive):
            self.router.remove(gone)
        for number in alive:
            if number not in self.router:
                self.router.add(number)
        return self.router.acquire(key)

    def release(self, engine: EngineId) -> None:
        """Note the end of a turn on this engine."""
        if engine in self.router:
            self.router.release(engine)


Generate = Callable[[EngineId, GenerateRequest, PartialSamples], Awaitable[Generated]]
"""Generates a request on an engine from its tokens so far; raises `Unfinished` on a loss."""

ScoreTokens = Callable[[EngineId, Sequence[int], int, int], Awaitable[ScoredTokens]]
"""Scores tokens on an engine, from an index on, with so many of the most likely ones; raises
`EngineUnreachable` on a loss."""


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt of a problem, with which the first turn of a sample starts."""

    text: str
    prompt: EncodedPrompt


@dataclass(slots=True, kw_only=True)
class SampleEngine:
    """Engine interface for the workflow of one sample (`agents.workflow.WorkflowEngine`)."""

    stream: str
    group: GroupId
    sample: int
    run_seed: int
    sampling: SamplingParams
    context_tokens: int
    codec: TextCodec
    rewards: RewardService
    engines: TurnEngines
    router: TurnRouter
    generate: Generate
    score_tokens: ScoreTokens
    so_far: Callable[[str, OpenTurn], PartialSamples]
    """Returns the tokens so far of a request."""
    kept: PartialSamples
    """Turns saved in a checkpoint, by request name."""
    open: dict[str, OpenTurn]
    """Running and ended turns of the group, by request name; this object adds its turns."""
    requested: set[str]
    """Names of all requests; this object adds its requests."""
    turns: list[TurnTimes]
    """Ended turns; this object adds its turns."""
    question: Question | None = None
    """None for samples without a problem."""
    _times: Counter[str] = field(default_factory=Counter)
    """Number of requests with the same prompt, by hash."""
    _running: dict[str, asyncio.Task[tuple[Generated, EngineId]]] = field(default_factory=dict)
    """Running requests, by name."""
    _given_up: bool = False
    _left: dict[str, tuple[Generated, EngineId | None]] = field(default_factory=dict)
    """Tokens and engines of the turns that ran when the sample was given up, by request name."""

    async def turn(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
    ) -> Generated:
        """See `TurnSampler.turn`."""
        prompt = tuple(prompt_tokens)
        sampling = sampling or self.sampling
        room = self.context_tokens - len(prompt)
        if room < 1:
            raise ValueError(
                f"a turn has a prompt of {len(prompt)} tokens, but the context of "
                f"{self.context_tokens} must have room for one more; end the sample earlier"
            )
        name = self._name(prompt)
        if seed is None:
            seed = sample_seed(self.run_seed, self.stream, self.group, self.sample, name)
        request = GenerateRequest(
            request_id=name,
            prompt_tokens=prompt,
            images=self._images_of(prompt),
            sampling=replace(
                sampling,
                max_new_tokens=min(room, sampling.max_new_tokens),
                never=self.sampling.never,
                seed=seed,
            ),
        )
        start_s = time.time()
        generated, engine = await self._unless_given_up(request)
        if engine is None:
            return generated
        self.turns.append(
            TurnTimes(self.sample, engine, start_s, time.time(), len(generated.tokens))
        )
        return generated

    async def token_logprobs(
        self, tokens: Sequence[int], *, start: int = 0, top: int = 0
    ) -> ScoredTokens:
        """Score given tokens on one of the engines (`EngineClient.token_logprobs`)."""
        while True:
            engine = await self.router.acquire(self.engines, (self.group, self.sample))
            try:
                return await self.score_tokens(engine, tokens, start, top)
            except EngineUnreachable:
                await asyncio.sleep(0)  # the next one, or the same once it is back
            finally:
                self.router.release(engine)

    def give_up(self) -> None:
        """See `WorkflowEngine.give_up`."""
        self._given_up = True
        for name, task in self._running.items():
            # Read the tokens before the cancellation: the engine's client forgets the request then.
            # A request that waits for its first engine has no tokens.
            turn = self.open.get(name, OpenTurn(None, {}))
            self._left[name] = self.so_far(name, turn).get(name, _nothing(name)), turn.engine
            task.cancel()

    async def _unless_given_up(self, request: GenerateRequest) -> tuple[Generated, EngineId | None]:
        """Generate; returns the result, or the tokens at give-up, and the last engine."""
        name = request.request_id
        if not self._given_up:
            self._running[name] = asyncio.create_task(self._until_done(request))
            try:
                return await self._running[name]
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if name not in self._left or (task is not None and task.cancelling()):
                    raise
            finally:
                del self._running[name]
        generated, engine = self._left.get(name, (_nothing(name), None))
        self.open[name] = OpenTurn(None, {name: generated})
        return generated, engine

    async def _until_done(self, request: GenerateRequest) -> tuple[Generated, EngineId]:
        """Generate, on further engines if one is lost; returns the result and the last engine."""
        name = request.request_id
        partial = {name: self.kept[name]} if name in self.kept else {}
        while True:
            engine = await self.router.acquire(self.engines, (self.group, self.sample))
            self.open[name] = OpenTurn(engine, partial)
            try:
                generated = await self.generate(engine, request, partial)
            except Unfinished as unfinished:
                # Engines match whole responses only.
                partial = {} if request.sampling.json_schema else dict(unfinished.samples)
                self.open[name] = OpenTurn(None, partial)
            else:
                self.open[name] = OpenTurn(None, {name: generated})
                return generated, engine
            finally:
                self.router.release(engine)

    def _name(self, prompt: tuple[int, ...]) -> str:
        """Return the request's name, from the prompt and the number of earlier requests with it."""
        text = ",".join(map(str, prompt)).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._times[digest] += 1
        name = f"{self.stream}-{self.group}-{self.sample}-{digest}-{self._times[digest]}"
        self.requested.add(name)
        return name

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """See `WorkflowEngine.encode`. The problem's prompt is already encoded."""
        question = self.question
        if begins and question is not None and text == question.text:
            return question.prompt.tokens
        return control_text(self.codec).encode(text, begins=begins)

    def _images_of(self, prompt: tuple[int, ...]) -> tuple[PlacedImage, ...]:
        """Return the images of the problem for a turn that continues its prompt, else none."""
        if self.question is None:
            return ()
        tokens, images = self.question.prompt
        return images if prompt[: len(tokens)] == tokens else ()

    def plain(self, text: str, *, within: str = "") -> str:
        """See `WorkflowEngine.plain`."""
        return str(control_text(self.codec, within).plain(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `WorkflowEngine.decode`."""
        return self.codec.decode(tokens)

    async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
        """See `WorkflowEngine.score`."""
        (outcome,) = await self.rewards.score([completion], data)
        return outcome


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn of a group that is not trained on yet."""

    engine: EngineId | None
    """Engine that runs the turn; None if it ended or waits for an engine."""
    samples: PartialSamples
    """Tokens when that engine started the turn; all tokens of an ended turn."""


def _nothing(name: str) -> Generated:
    """Return the result of a request that was given up before its first token."""
    return Generated(
        request_id=name, segments=(), finish_reason="abort", retractions=0, cached_tokens=0
    )
