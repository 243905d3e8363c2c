"""One group from its prompt to its rewards: generate, decode, score.

    prompt --(engine)--> samples --(tokenizer)--> completions --(reward function)--> Episodes
    prompt --(workflow of each sample: turns, tools, reward function)-------------->

Without a workflow the samples of a group are requests of one call to one engine. A group without a
reward for all its samples is filtered; no reward is invented for it. A group whose engine is lost
keeps its tokens and continues on another one (`engines.client.resubmit`).
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from areal_lab.agents.workflow import Episode, Row, Workflow
from areal_lab.config.schema import GenerationConfig, TrainConfig
from areal_lab.control.events import EngineId, GroupId, StartGroup
from areal_lab.control.routing import LeastLoaded
from areal_lab.data.images import EncodedPrompt, encode_prompt
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.data.seeds import sample_seed
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Observation, Segment
from areal_lab.engines.client.engine_client import EngineError, EngineUnreachable
from areal_lab.engines.client.resubmit import (
    NO_SAMPLES,
    PartialSamples,
    merged_samples,
    recomputed_tokens,
    remaining_requests,
    samples_so_far,
    token_count,
)
from areal_lab.engines.protocol import Generated, GenerateRequest, SamplingParams
from areal_lab.host.processes import ChildDied
from areal_lab.models.folder import read_model_facts
from areal_lab.models.vision import VisionFacts, read_placeholder_tokens
from areal_lab.pipeline.fleet import first_error
from areal_lab.pipeline.rollout.scored import SampledTurn, ScoredGroup
from areal_lab.pipeline.rollout.turns import (
    OpenTurn,
    Question,
    SampleEngine,
    TurnRouter,
    Unfinished,
)
from areal_lab.preflight.limits import usable_context
from areal_lab.rewards.failure_rate import FailureRate, RewardError
from areal_lab.rewards.service import RewardOutcome, RewardService


class GeneratingEngine(Protocol):
    """The part of an engine that a group needs."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request."""
        ...

    def received(self, request_ids: Sequence[str]) -> dict[str, Generated]:
        """What arrived of running requests."""
        ...


class EnginePool(Protocol):
    """The engines that are alive."""

    def engine(self, number: EngineId) -> GeneratingEngine:
        """The engine with this number; raises `EngineUnreachable` if it is lost."""
        ...

    async def round_robin(self, turn: int) -> EngineId:
        """The number of the next engine, in turn."""
        ...

    async def for_rollouts(self) -> Sequence[EngineId]:
        """See `TurnEngines`."""
        ...


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
    """Tokens generated and used for nothing: the weights behind them are unknown, the workflow that
    asked for them raised, or asks for others after a checkpoint."""


def sampling_params(generation: GenerationConfig, codec: TextCodec, model: Path) -> SamplingParams:
    """How responses are sampled, by the settings; each sample gets its own seed later.

    Args:
        generation: the settings.
        codec: the model's tokenizer.
        model: its folder.
    """
    stops = codec.stops(generation.stop)
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=stops.token_ids,
        stop=stops.strings,
        never=read_placeholder_tokens(model),
    )


@dataclass(slots=True)
class WhatIsCompared:
    """Whether the workflow of a run gives one reward a sample, or returns of turns.

    Advantages of a batch compare samples or turns, so all samples of a run must give the same.
    """

    first: str = ""
    """The sample that decided."""
    of_turns: bool = False

    def add(self, episode: Episode, name: str) -> None:
        """Check a sample that can be trained on.

        Args:
            episode: the sample.
            name: of the sample.

        Raises:
            RewardError: it is not as the first one.
        """
        if episode.outcome.status != "ok" or not episode.rows:
            return
        of_turns = [bool(row.turn_returns) for row in episode.rows]
        if len(set(of_turns)) > 1:
            raise RewardError(
                f"sample {name} has turn_returns in {sum(of_turns)} of its {len(of_turns)} rows, "
                "but must have them in all or in none"
            )
        if not self.first:
            self.first, self.of_turns = name, of_turns[0]
        elif self.of_turns != of_turns[0]:
            kinds = ("one reward", "returns of its turns")
            raise RewardError(
                f"sample {name} has {kinds[of_turns[0]]}, but sample {self.first} has "
                f"{kinds[self.of_turns]}, and a batch compares either samples or turns; an agent "
                "must return a number each time, or {id of a reply: number} each time, and "
                "sessions from outside must be rewarded alike"
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
    workflow: Workflow | None = None
    """What each sample does; None samples one response to the prompt."""
    context_tokens: int = sys.maxsize
    """Most tokens of a prompt and its response together, for workflows."""
    router: TurnRouter = field(default_factory=lambda: TurnRouter(LeastLoaded()))
    """Of the turns of workflows."""
    vision: VisionFacts | None = None
    """Of the model; None if its prompts have no images."""
    failures: FailureRate = field(default_factory=FailureRate)
    """Of workflows."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Samples of workflows by what became of them."""
    compared: WhatIsCompared = field(default_factory=WhatIsCompared)
    """Of the samples to train on."""
    recomputed: RecomputeCounts = field(default_factory=RecomputeCounts)
    open: dict[str, dict[str, OpenTurn]] = field(default_factory=dict)
    """Turns of the groups that run, by `group_name`."""

    @property
    def counts(self) -> dict[str, int] | None:
        """Samples of the workflow by status, such as `ok` and `error`; None without one."""
        if self.workflow is None:
            return None
        return dict.fromkeys(("ok", "timeout", "error"), 0) | self.outcomes

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
        """Generate `samples` samples of one problem and score them.

        Args:
            partial: samples so far from an engine that was lost, or from a checkpoint.

        Raises:
            Unfinished: if the engine is lost first; not with a workflow, whose turns continue on
                other engines.
            RewardError: the reward function, or the workflow, failed too often.
        """
        if self.workflow is not None:
            return await self._episodes(
                self.workflow, problem, stream=stream, group=group, samples=samples, kept=partial
            )
        started_s = time.time()
        prompt = self._prompt(problem)
        requests = [
            GenerateRequest(
                request_id=request_id(stream, group, index),
                prompt_tokens=prompt.tokens,
                images=prompt.images,
                sampling=self._sampling(stream, group, index),
            )
            for index in range(samples)
        ]
        name = group_name(stream, group)
        self.open[name] = {
            request.request_id: OpenTurn(engine, _of_request(partial, request.request_id))
            for request in requests
        }
        try:
            samples_by_id = await self._generate(engine, requests, partial)
            generated_s = time.time()
            self.open[name] = {
                request: OpenTurn(None, {request: sample})
                for request, sample in samples_by_id.items()
            }
            generated = [samples_by_id[request.request_id] for request in requests]
            completions = [self._text(sample.segments) for sample in generated]
            outcomes = await self.rewards.score(completions, problem)
        finally:
            del self.open[name]
        return ScoredGroup(
            problem=problem,
            samples=tuple(
                Episode(
                    rows=(Row(prompt_tokens=prompt.tokens, parts=sample.segments),),
                    outcome=outcome,
                    end=sample.finish_reason,
                )
                for sample, outcome in zip(generated, outcomes, strict=True)
            ),
            completions=tuple((text,) for text in completions),
            prompt_tokens=prompt.tokens,
            started_s=started_s,
            generated_s=generated_s,
            scored_s=time.time(),
            images=prompt.images,
        )

    def _prompt(self, problem: Problem) -> EncodedPrompt:
        return encode_prompt(self.codec, self.vision, problem.prompt, problem.images)

    async def _episodes(
        self,
        workflow: Workflow,
        problem: Problem,
        *,
        stream: str,
        group: GroupId,
        samples: int,
        kept: PartialSamples,
    ) -> ScoredGroup:
        """Run the workflow of each sample, all at once."""
        started_s, name = time.time(), group_name(stream, group)
        prompt = self._prompt(problem)
        turns: list[SampledTurn] = []
        self.open[name] = opened = {
            request: OpenTurn(None, {request: sample}) for request, sample in kept.items()
        }
        asked: set[str] = set()
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [
                    running.create_task(
                        self._episode(
                            workflow,
                            problem,
                            self.sample_engine(
                                stream=stream,
                                group=group,
                                sample=index,
                                question=Question(problem.prompt, prompt),
                                kept=kept,
                                opened=opened,
                                asked=asked,
                                turns=turns,
                            ),
                        )
                    )
                    for index in range(samples)
                ]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            del self.open[name]
        episodes = tuple(task.result() for task in tasks)
        # A workflow that asks other questions than before the checkpoint does not use the answers.
        self.recomputed.discarded_tokens += sum(
            token_count(sample) for request, sample in kept.items() if request not in asked
        )
        scored_s = time.time()
        return ScoredGroup(
            problem=problem,
            samples=episodes,
            completions=tuple(
                tuple(self._text(row.parts) for row in episode.rows) for episode in episodes
            ),
            prompt_tokens=prompt.tokens,
            started_s=started_s,
            generated_s=max((turn.end_s for turn in turns), default=started_s),
            scored_s=scored_s,
            turns=tuple(turns),
            images=prompt.images,
        )

    def sample_engine(
        self,
        *,
        stream: str,
        group: GroupId,
        sample: int,
        question: Question | None = None,
        kept: PartialSamples = NO_SAMPLES,
        opened: dict[str, OpenTurn] | None = None,
        asked: set[str] | None = None,
        turns: list[SampledTurn] | None = None,
    ) -> SampleEngine:
        """What the workflow of one sample is given; see `SampleEngine`."""
        return SampleEngine(
            stream=stream,
            group=group,
            sample=sample,
            question=question,
            run_seed=self.run_seed,
            sampling=self.sampling,
            context_tokens=self.context_tokens,
            codec=self.codec,
            rewards=self.rewards,
            engines=self.engines,
            router=self.router,
            generate=self._generate_one,
            so_far=self._turn_so_far,
            kept=kept,
            open={} if opened is None else opened,
            asked=set() if asked is None else asked,
            turns=[] if turns is None else turns,
        )

    async def _episode(self, workflow: Workflow, problem: Problem, engine: SampleEngine) -> Episode:
        """One sample; what its workflow raises is an outcome."""
        try:
            episode = await workflow.run(engine, problem.as_example())
        except (RewardError, EngineError, ChildDied):
            raise  # of the run, and not of this sample
        except Exception:
            engine.give_up()
            failed = RewardOutcome("error", math.nan, detail=traceback.format_exc())
            self.outcomes[failed.status] += 1
            # They are in no row.
            self.recomputed.discarded_tokens += sum(
                turn.tokens for turn in engine.turns if turn.sample == engine.sample
            )
            self.failures.add(failed.detail)
            return Episode(rows=(), outcome=failed, end="abort")
        outcome = episode.outcome
        self.outcomes[outcome.status] += 1
        fine = outcome.status in ("ok", "abandoned")
        self.failures.add("" if fine else outcome.detail or outcome.status)
        if engine.stream == "train":
            self.compared.add(episode, f"{engine.sample} of group {engine.group}")
        return episode

    def _text(self, parts: Sequence[Segment | Observation]) -> str:
        return self.codec.decode([token for part in parts for token in part.tokens])

    async def _generate_one(
        self, engine: EngineId, request: GenerateRequest, partial: PartialSamples
    ) -> Generated:
        samples = await self._generate(engine, [request], partial)
        return samples[request.request_id]

    def samples_so_far(self, stream: str, group: GroupId) -> PartialSamples:
        """What there is of a running group, by the names of its requests; turns that ended too."""
        found: dict[str, Generated] = {}
        for name, turn in self.open.get(group_name(stream, group), {}).items():
            found |= self._turn_so_far(name, turn)
        return found

    def _turn_so_far(self, name: str, turn: OpenTurn) -> dict[str, Generated]:
        received: PartialSamples = {}
        if turn.engine is not None:
            with suppress(EngineUnreachable):
                received = self.engines.engine(turn.engine).received([name])
        return samples_so_far(turn.samples, received)

    def running_requests(self, stream: str, group: GroupId) -> list[str]:
        """The names of the requests of a group that engines have now."""
        opened = self.open.get(group_name(stream, group), {})
        return [name for name, turn in opened.items() if turn.engine is not None]

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


def context_tokens(config: TrainConfig, model: Path) -> int:
    """Most tokens of a sample of several turns, its prompt included."""
    if config.gconfig.max_tokens:
        return config.gconfig.max_tokens
    found = read_model_facts(model).context_tokens
    return sys.maxsize if found is None else usable_context(config, found)


def group_name(stream: str, group: GroupId) -> str:
    """Name of a group: what the names of its requests begin with."""
    return f"{stream}-{group}"


def request_id(stream: str, group: GroupId, sample: int) -> str:
    """Name of a sample on the engine, for logs and for aborting it."""
    return f"{group_name(stream, group)}-{sample}"


def _of_request(partial: PartialSamples, name: str) -> PartialSamples:
    return {name: partial[name]} if name in partial else {}
