"""The turns of a sample: each is routed on its own, and continues elsewhere if its engine is lost.

    workflow --turn(context)--> router --> engine --> Generated --> workflow
                                  ^           |
                                  '-- lost ---' with the tokens so far

A turn's request is named by what it continues, so that tokens that a checkpoint kept are used again
exactly if the workflow asks the same question: then they are not generated twice.
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
from areal_lab.data.seeds import sample_seed
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.resubmit import PartialSamples
from areal_lab.engines.protocol import Generated, GenerateRequest, SamplingParams
from areal_lab.pipeline.rollout.scored import SampledTurn
from areal_lab.rewards.service import RewardOutcome, RewardService


class Unfinished(Exception):
    """The engine was lost before its requests ended; carries the samples so far."""

    def __init__(self, samples: PartialSamples, cause: Exception) -> None:
        super().__init__(str(cause))
        self.samples = samples


class TurnEngines(Protocol):
    """The engines that take turns now."""

    async def for_rollouts(self) -> Sequence[EngineId]:
        """Their numbers, at least one; waits if all are restarting.

        Raises:
            Exception: why the last engine was lost, if none is left.
        """
        ...


@dataclass(slots=True)
class TurnRouter:
    """Which engine takes the next turn, by the policy of the run."""

    router: Router

    async def acquire(self, engines: TurnEngines, key: Hashable) -> EngineId:
        """An engine for a turn of the conversation `key`.

        Raises:
            Exception: why the last engine was lost, if none is left.
        """
        alive = await engines.for_rollouts()
        for gone in self.router.loads().keys() - set(alive):
            self.router.remove(gone)
        for number in alive:
            if number not in self.router:
                self.router.add(number)
        return self.router.acquire(key)

    def release(self, engine: EngineId) -> None:
        """A turn on this engine ended."""
        if engine in self.router:
            self.router.release(engine)


Generate = Callable[[EngineId, GenerateRequest, PartialSamples], Awaitable[Generated]]
"""Generates a request on an engine, with what there is of it; raises `Unfinished` if it is lost."""


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt of a problem, which the first turn of a sample begins with."""

    text: str
    prompt: EncodedPrompt


@dataclass(slots=True, kw_only=True)
class SampleEngine:
    """What the workflow of one sample is given (`agents.workflow.WorkflowEngine`)."""

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
    so_far: Callable[[str, OpenTurn], PartialSamples]
    """What there is of a request."""
    kept: PartialSamples
    """Turns that a checkpoint kept, by the names of their requests."""
    open: dict[str, OpenTurn]
    """Gets the turns of the group, ended or not; by the names of their requests."""
    asked: set[str]
    """Gets the names of all requests."""
    turns: list[SampledTurn]
    """Gets the turns that ended."""
    question: Question | None = None
    """None of samples without a problem."""
    _times: Counter[str] = field(default_factory=Counter)
    """How often each question was asked."""
    _running: dict[str, asyncio.Task[tuple[Generated, EngineId]]] = field(default_factory=dict)
    """By the names of their requests."""
    _given_up: bool = False
    _left: dict[str, tuple[Generated, EngineId | None]] = field(default_factory=dict)
    """What there was of the turns that ran when the sample was given up, and their engines."""

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        """See `TurnSampler.turn`."""
        prompt = tuple(prompt_tokens)
        sampling = sampling or self.sampling
        room = self.context_tokens - len(prompt)
        if room < 1:
            raise ValueError(
                f"a turn has a prompt of {len(prompt)} tokens, but the context of "
                f"{self.context_tokens} has to have room for one more; end the sample before"
            )
        name = self._name(prompt)
        request = GenerateRequest(
            request_id=name,
            prompt_tokens=prompt,
            images=self._images_of(prompt),
            sampling=replace(
                sampling,
                max_new_tokens=min(room, sampling.max_new_tokens),
                never=self.sampling.never,
                seed=sample_seed(self.run_seed, self.stream, self.group, self.sample, name),
            ),
        )
        start_s = time.time()
        generated, engine = await self._unless_given_up(request)
        tokens = sum(len(part.tokens) for part in generated.segments)
        if engine is None:
            return generated
        self.turns.append(
            SampledTurn(
                sample=self.sample, engine=engine, start_s=start_s, end_s=time.time(), tokens=tokens
            )
        )
        return generated

    def give_up(self) -> None:
        """See `WorkflowEngine.give_up`."""
        self._given_up = True
        for name, task in self._running.items():
            # Now, since the engine's client forgets a request that is canceled. One that waits for
            # its first engine has nothing yet.
            turn = self.open.get(name, OpenTurn(None, {}))
            self._left[name] = self.so_far(name, turn).get(name, _nothing(name)), turn.engine
            task.cancel()

    async def _unless_given_up(self, request: GenerateRequest) -> tuple[Generated, EngineId | None]:
        """Generate, or return what there was when the sample was given up, and the last engine."""
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
        """Generate on as many engines as it takes; returns the last one."""
        name = request.request_id
        partial = {name: self.kept[name]} if name in self.kept else {}
        while True:
            engine = await self.router.acquire(self.engines, (self.group, self.sample))
            self.open[name] = OpenTurn(engine, partial)
            try:
                generated = await self.generate(engine, request, partial)
            except Unfinished as unfinished:
                partial = dict(unfinished.samples)
                self.open[name] = OpenTurn(None, partial)
            else:
                self.open[name] = OpenTurn(None, {name: generated})
                return generated, engine
            finally:
                self.router.release(engine)

    def _name(self, prompt: tuple[int, ...]) -> str:
        """The request's name: the same for the same question, asked as often as before."""
        text = ",".join(map(str, prompt)).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        self._times[digest] += 1
        name = f"{self.stream}-{self.group}-{self.sample}-{digest}-{self._times[digest]}"
        self.asked.add(name)
        return name

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """See `WorkflowEngine.encode`. The problem's prompt gets placeholders of its images."""
        question = self.question
        if begins and question is not None and question.prompt.images and text == question.text:
            return question.prompt.tokens
        return control_text(self.codec).encode(text, begins=begins)

    def _images_of(self, prompt: tuple[int, ...]) -> tuple[PlacedImage, ...]:
        """The images of a turn: those of the problem, if it continues the problem's prompt."""
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
    """Where it runs; None if it ended, or waits for an engine."""
    samples: PartialSamples
    """What there was of it when it came to that engine, or all of it."""


def _nothing(name: str) -> Generated:
    """A request that was given up before its first token."""
    return Generated(
        request_id=name, segments=(), finish_reason="abort", retractions=0, cached_tokens=0
    )
