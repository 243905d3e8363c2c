"""One group from its prompt to its rewards: generate, decode, score.

    prompt --(engine)--> samples --(tokenizer)--> completions --(reward function)--> trajectories

A group whose reward function failed or timed out is filtered; no reward is invented for it. A group
whose engine is lost keeps its tokens and continues on another one (`engines.client.resubmit`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from areal_lab.config.schema import GenerationConfig
from areal_lab.control.events import EngineId, GroupId, StartGroup
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.data.seeds import sample_seed
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.client.engine_client import EngineUnreachable
from areal_lab.engines.client.resubmit import (
    NO_SAMPLES,
    PartialSamples,
    merged_samples,
    recomputed_tokens,
    remaining_requests,
    token_count,
)
from areal_lab.engines.protocol import Generated, GenerateRequest, SamplingParams
from areal_lab.rewards.service import RewardOutcome, RewardService


class GeneratingEngine(Protocol):
    """The part of an engine that a group needs."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request."""
        ...


class EnginePool(Protocol):
    """The engines that are alive."""

    def engine(self, number: EngineId) -> GeneratingEngine:
        """The engine with this number; raises `EngineUnreachable` if it is lost."""
        ...

    async def round_robin(self, turn: int) -> EngineId:
        """The number of the next engine, in turn."""
        ...


class Unfinished(Exception):
    """The engine was lost before the group ended; carries the samples so far."""

    def __init__(self, samples: PartialSamples, cause: Exception) -> None:
        super().__init__(str(cause))
        self.samples = samples


@dataclass(slots=True)
class RecomputeCounts:
    """What interruptions and lost engines cost, in tokens and samples."""

    tokens: int = 0
    """Tokens of prompts and responses whose keys and values were computed again; a prompt that
    several samples share is counted for each."""
    resubmitted_samples: int = 0
    """Samples that had not ended when their engine was lost."""
    kept_tokens: int = 0
    """Tokens of these samples that were kept and not generated again."""
    discarded_tokens: int = 0
    """Tokens generated a second time because the weights behind the first ones are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """One group, generated and scored."""

    problem: Problem
    generated: tuple[Generated, ...]
    completions: tuple[str, ...]
    outcomes: tuple[RewardOutcome, ...]
    prompt_tokens: tuple[int, ...]
    started_s: float
    generated_s: float
    scored_s: float
    """Seconds since the epoch."""

    def trajectories(self, group: GroupId) -> tuple[Trajectory, ...]:
        """The samples as trajectories; requires that every outcome is ok."""
        return tuple(
            Trajectory(
                group=group,
                sample=index,
                prompt_tokens=self.prompt_tokens,
                parts=sample.segments,
                finish_reason=sample.finish_reason,
                reward=outcome.reward,
                rewards=outcome.rewards,
            )
            for index, (sample, outcome) in enumerate(
                zip(self.generated, self.outcomes, strict=True)
            )
        )

    @property
    def failure(self) -> str | None:
        """Why the group cannot be trained on, or None."""
        for sample, outcome in zip(self.generated, self.outcomes, strict=True):
            if not sample.segments:
                return "no token was generated"
            if outcome.status != "ok":
                return f"reward {outcome.status}"
        return None


def sampling_params(generation: GenerationConfig, codec: TextCodec) -> SamplingParams:
    """How responses are sampled, by the settings; each sample gets its own seed later."""
    stops = codec.stops(generation.stop)
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=stops.token_ids,
        stop=stops.strings,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Generates and scores groups, for training and evaluation."""

    engines: EnginePool
    codec: TextCodec
    rewards: RewardService
    sampling: SamplingParams
    run_seed: int
    running_samples: int
    """Samples that one engine runs concurrently."""
    response_tokens: Callable[[GroupId, int], int] | None = None
    """Exact length of sample i of a group, for studies of long tails; end tokens are then ignored.
    None lets the model end its responses."""
    interruptions_recompute: bool = True
    """Whether an interrupted sample is recomputed under the new weights (not with `in_place`)."""
    recomputed: RecomputeCounts = field(default_factory=RecomputeCounts)

    async def group(
        self,
        problem: Problem,
        *,
        engine: EngineId,
        stream: str,
        group: GroupId,
        samples: int,
        partial: PartialSamples = NO_SAMPLES,
    ) -> ScoredGroup:
        """Generate `samples` responses to one problem and score them.

        Args:
            partial: samples so far from an engine that was lost.

        Raises:
            Unfinished: if the engine is lost first.
        """
        started_s = time.time()
        prompt_tokens = self.codec.encode(problem.prompt)
        requests = [
            GenerateRequest(
                request_id=request_id(stream, group, index),
                prompt_tokens=prompt_tokens,
                sampling=self._sampling(stream, group, index),
            )
            for index in range(samples)
        ]
        samples_by_id = await self._generate(engine, requests, partial)
        generated = [samples_by_id[request.request_id] for request in requests]
        generated_s = time.time()
        completions = tuple(
            self.codec.decode([token for part in sample.segments for token in part.tokens])
            for sample in generated
        )
        outcomes = await self.rewards.score(completions, problem)
        return ScoredGroup(
            problem=problem,
            generated=tuple(generated),
            completions=completions,
            outcomes=tuple(outcomes),
            prompt_tokens=prompt_tokens,
            started_s=started_s,
            generated_s=generated_s,
            scored_s=time.time(),
        )

    async def _generate(
        self, engine: EngineId, requests: Sequence[GenerateRequest], partial: PartialSamples
    ) -> PartialSamples:
        """All samples, complete: `partial` and what was missing of it."""
        left = remaining_requests(requests, partial)
        continued = [request for request in left if request.request_id in partial]
        try:
            rest = await self.engines.engine(engine).generate(left) if left else []
        except EngineUnreachable as error:
            samples = merged_samples(requests, partial, error.partial)
            self.recomputed.resubmitted_samples += len(remaining_requests(requests, samples))
            self.recomputed.discarded_tokens += error.discarded_tokens
            raise Unfinished(samples, error) from error
        self.recomputed.kept_tokens += sum(token_count(partial[r.request_id]) for r in continued)
        self.recomputed.tokens += sum(len(request.prompt_tokens) for request in continued)
        if self.interruptions_recompute:
            self.recomputed.tokens += sum(
                recomputed_tokens(sample, len(request.prompt_tokens))
                for request, sample in zip(left, rest, strict=True)
            )
        return merged_samples(requests, partial, {sample.request_id: sample for sample in rest})

    def _sampling(self, stream: str, group: GroupId, sample: int) -> SamplingParams:
        sampling = replace(self.sampling, seed=sample_seed(self.run_seed, stream, group, sample))
        if self.response_tokens is None:
            return sampling
        tokens = self.response_tokens(group, sample)
        return replace(sampling, max_new_tokens=tokens, ignore_eos=True, stop_token_ids=(), stop=())

    async def training_group(
        self,
        start: StartGroup,
        source: PromptSource,
        samples: int,
        partial: PartialSamples = NO_SAMPLES,
    ) -> ScoredGroup:
        """The group that the coordinator started: prompt number `start.group` of the source."""
        return await self.group(
            source[start.group],
            engine=start.engine,
            stream="train",
            group=start.group,
            samples=samples,
            partial=partial,
        )

    async def held_out(
        self,
        problems: Sequence[Problem],
        *,
        samples: int,
        done: Callable[[int, ScoredGroup], None] = lambda *_: None,
    ) -> list[ScoredGroup]:
        """Responses to held-out problems, on all engines at once.

        The seeds are the same at every call, so measurements before and after a run differ in the
        weights only. `done` is called with the index and group of each problem when it ends.
        """

        # Time in an engine's queue counts towards its timeout: send no more than it can run.
        concurrent = max(1, self.running_samples // samples)
        slots: dict[EngineId, asyncio.Semaphore] = {}

        async def one(index: int, problem: Problem) -> ScoredGroup:
            partial: PartialSamples = NO_SAMPLES
            while True:
                engine = await self.engines.round_robin(index)
                try:
                    async with slots.setdefault(engine, asyncio.Semaphore(concurrent)):
                        scored = await self.group(
                            problem,
                            engine=engine,
                            stream="held-out",
                            group=index,
                            samples=samples,
                            partial=partial,
                        )
                except Unfinished as unfinished:
                    partial = unfinished.samples
                else:
                    done(index, scored)
                    return scored

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, problem)) for i, problem in enumerate(problems)]
        return [task.result() for task in tasks]


def request_id(stream: str, group: GroupId, sample: int) -> str:
    """Name of a sample on the engine, for logs and for aborting it."""
    return f"{stream}-{group}-{sample}"
