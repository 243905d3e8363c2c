"""Rollout of one group: generate, decode and score its samples.

    prompt --(engine)--> samples --(tokenizer)--> completions --(reward function)--> Episodes
    prompt --(workflow of each sample: turns, tools, reward function)-------------->

Without a workflow, one call to one engine generates all samples of a group. A group is filtered
unless all its samples have a reward. A group whose engine is lost keeps its tokens and continues on
another one (`engines.client.resubmit`).
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from areal_lab.agents.workflow import Episode, Row, Workflow
from areal_lab.config.schema import GenerationConfig
from areal_lab.control.events import EngineId, GroupId, SamplesEnded, StartGroup
from areal_lab.control.routing import LeastLoaded
from areal_lab.data.images import EncodedPrompt, encode_prompt
from areal_lab.data.problems import Problem, PromptSource, sample_seed
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
)
from areal_lab.engines.protocol import Generated, GenerateRequest, SamplingParams, ScoredTokens
from areal_lab.host.processes import ChildDied
from areal_lab.models.vision import VisionFacts, read_placeholder_tokens
from areal_lab.pipeline.fleet import first_error
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.pipeline.rollout.turns import (
    OpenTurn,
    Question,
    SampleEngine,
    TurnRouter,
    Unfinished,
)
from areal_lab.rewards.service import FailureRate, RewardError, RewardOutcome, RewardService
from areal_lab.runlog.records import TurnTimes

TRAIN: Final = "train"
"""Stream of the training groups (`request_id`)."""


class GeneratingEngine(Protocol):
    """Interface of an engine for groups."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Generate one sample per request."""
        ...

    async def token_logprobs(self, tokens: Sequence[int], *, start: int, top: int) -> ScoredTokens:
        """Score given tokens."""
        ...

    def received(self, request_ids: Sequence[str]) -> dict[str, Generated]:
        """Return the tokens received so far of running requests."""
        ...


class EnginePool(Protocol):
    """Interface of the live engines."""

    def engine(self, number: EngineId) -> GeneratingEngine:
        """Return the engine with this number; raises `EngineUnreachable` if it is lost."""
        ...

    async def round_robin(self, turn: int) -> EngineId:
        """Return the number of the next engine in turn."""
        ...

    async def for_rollouts(self) -> Sequence[EngineId]:
        """See `TurnEngines`."""
        ...


@dataclass(slots=True)
class RecomputeCounts:
    """Cost of interruptions and lost engines, in tokens and samples."""

    tokens: int = 0
    """Tokens of prompts and responses whose keys and values were computed again; a prompt shared by
    several samples counts for each."""
    resubmitted_samples: int = 0
    """Samples in generation when their engine was lost."""
    kept_tokens: int = 0
    """Tokens of resubmitted samples that were not generated again."""
    discarded_tokens: int = 0
    """Generated tokens that were not used: their weights are unknown, their workflow raised, or it
    made other requests after a checkpoint."""


def sampling_params(generation: GenerationConfig, codec: TextCodec, model: Path) -> SamplingParams:
    """Return the sampling parameters of the settings; each sample gets a separate seed later.

    Args:
        generation: settings of `gconfig`.
        codec: tokenizer of the model.
        model: folder of the model.
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
class RewardUnit:
    """Unit of the rewards of a run: samples, or turns of samples.

    Advantages compare either the samples or the turns of a batch, so all samples of a run must have
    rewards of the same unit.
    """

    first: str = ""
    """Name of the first sample, which sets the unit."""
    of_turns: bool = False
    """True if samples have returns of their turns."""

    def add(self, episode: Episode, name: str) -> None:
        """Check the unit of a sample; samples that cannot be trained on pass.

        Args:
            episode: the sample.
            name: name of the sample, for errors.

        Raises:
            RewardError: the unit differs from that of the first sample.
        """
        if episode.outcome.status != "ok" or not episode.rows:
            return
        of_turns = [bool(row.turn_returns) for row in episode.rows]
        if len(set(of_turns)) > 1:
            raise RewardError(
                f"sample {name} has turn_returns in {sum(of_turns)} of its {len(of_turns)} rows, "
                "but must have them in all rows or in none"
            )
        if not self.first:
            self.first, self.of_turns = name, of_turns[0]
        elif self.of_turns != of_turns[0]:
            kinds = ("one reward", "returns of its turns")
            raise RewardError(
                f"sample {name} has {kinds[of_turns[0]]}, but sample {self.first} has "
                f"{kinds[self.of_turns]}, and a batch compares either samples or turns; an agent "
                "must always return a number, or always {id of a reply: number}, and sessions from "
                "outside must all set the same kind of reward"
            )


@dataclass(slots=True)
class EndedSamples:
    """Ends of the samples of running training groups, each sent once (`rollout.slots=samples`).

    A sample has ended when the loss of its engine would cost none of its tokens: a sample that runs
    again has kept its slot.
    """

    send: Callable[[SamplesEnded], None]
    """Receives the event for the coordinator."""
    _known: dict[GroupId, set[int]] = field(default_factory=dict)

    def begin(self, group: GroupId) -> None:
        """Follow a group that starts."""
        self._known[group] = set()

    def end(self, group: GroupId) -> None:
        """Forget a group that ended or was dropped."""
        del self._known[group]

    def add(self, group: GroupId, samples: Iterable[int]) -> None:
        """Send the end of those samples that were not known to have ended; ignores groups that do
        not run.
        """
        known = self._known.get(group)
        if known is None or not (new := set(samples) - known):
            return
        known |= new
        self.send(SamplesEnded(group, len(new)))

    def add_request(self, name: str) -> None:
        """Add the sample of a request (`request_id`); ignores turns and held-out samples."""
        match name.split("-"):
            case ["train", group, sample]:  # `TRAIN`, which would match anything here
                self.add(int(group), [int(sample)])
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Generates and scores groups, for training and evaluation."""

    engines: EnginePool
    codec: TextCodec
    rewards: RewardService
    sampling: SamplingParams
    run_seed: int
    running_samples: int
    """Maximum samples that one engine runs concurrently."""
    response_tokens: Callable[[GroupId, int], int] | None = None
    """Exact length of a sample, by group and number, for studies of long tails; end tokens are then
    ignored. None lets the model end its responses."""
    interruptions_recompute: bool = True
    """True if interrupted samples are recomputed under the new weights (not with `in_place`)."""
    workflow: Workflow | None = None
    """Workflow of each sample; None samples one response to the prompt."""
    context_tokens: int = sys.maxsize
    """Maximum tokens of a prompt and its response together, for workflows."""
    router: TurnRouter = field(default_factory=lambda: TurnRouter(LeastLoaded()))
    """Router of the turns of workflows."""
    vision: VisionFacts | None = None
    """Vision settings of the model; None if its prompts have no images."""
    failures: FailureRate = field(default_factory=FailureRate)
    """Failure rate of workflows."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of workflow samples by reward status."""
    reward_unit: RewardUnit = field(default_factory=RewardUnit)
    """Unit of the rewards of training samples."""
    recomputed: RecomputeCounts = field(default_factory=RecomputeCounts)
    ended: EndedSamples | None = None
    """Receiver of the ends of training samples; None if their slots belong to their group."""
    open: dict[str, dict[str, OpenTurn]] = field(default_factory=dict)
    """Turns of the running groups, by `group_name` and request."""

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
            problem: the problem.
            engine: number of the engine; a workflow routes each turn instead.
            stream: `train`, `held-out` or another prefix of seeds and request names.
            group: number of the group.
            samples: number of samples.
            partial: samples so far from a lost engine or from a checkpoint.

        Raises:
            Unfinished: the engine was lost; a workflow continues its turns on other engines.
            RewardError: the reward function or the workflow failed too often.
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
            left = {request.request_id for request in remaining_requests(requests, partial)}
            whole = [n for n, request in enumerate(requests) if request.request_id not in left]
            self._ended(stream, group, whole)
            samples_by_id = await self._generate(engine, requests, partial)
            self._ended(stream, group, range(samples))
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

    def _ended(self, stream: str, group: GroupId, samples: Iterable[int]) -> None:
        if self.ended is not None and stream == TRAIN:
            self.ended.add(group, samples)

    def _prompt(self, problem: Problem) -> EncodedPrompt:
        return encode_prompt(
            self.codec, self.vision, problem.prompt, problem.images, begins=not problem.rendered
        )

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
        """Run the workflows of all samples concurrently."""
        started_s, name = time.time(), group_name(stream, group)
        prompt = self._prompt(problem)
        turns: list[TurnTimes] = []
        self.open[name] = opened = {
            request: OpenTurn(None, {request: sample}) for request, sample in kept.items()
        }
        requested: set[str] = set()
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
                                requested=requested,
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
        # Saved responses are unused if the workflow makes other requests after the checkpoint.
        self.recomputed.discarded_tokens += sum(
            len(sample.tokens) for request, sample in kept.items() if request not in requested
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
        requested: set[str] | None = None,
        turns: list[TurnTimes] | None = None,
    ) -> SampleEngine:
        """Return the engine interface for the workflow of one sample; see `SampleEngine`."""
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
            score_tokens=self._score_tokens,
            so_far=self._turn_so_far,
            kept=kept,
            open={} if opened is None else opened,
            requested=set() if requested is None else requested,
            turns=[] if turns is None else turns,
        )

    async def _episode(self, workflow: Workflow, problem: Problem, engine: SampleEngine) -> Episode:
        """Run the workflow of one sample; an error of the workflow becomes its outcome."""
        try:
            episode = await workflow.run(engine, problem.as_example())
        except (RewardError, EngineError, ChildDied):
            raise  # errors of the run, not of this sample
        except Exception:
            engine.give_up()
            failed = RewardOutcome("error", math.nan, detail=traceback.format_exc())
            self.outcomes[failed.status] += 1
            # These tokens are in no row.
            self.recomputed.discarded_tokens += sum(
                turn.tokens for turn in engine.turns if turn.sample == engine.sample
            )
            self.failures.add(failed.detail)
            self._ended(engine.stream, engine.group, [engine.sample])
            return Episode(rows=(), outcome=failed, end="abort")
        self._ended(engine.stream, engine.group, [engine.sample])
        outcome = episode.outcome
        self.outcomes[outcome.status] += 1
        fine = outcome.status in ("ok", "abandoned")
        self.failures.add("" if fine else outcome.detail or outcome.status)
        if engine.stream == "train":
            self.reward_unit.add(episode, f"{engine.sample} of group {engine.group}")
        return episode

    def _text(self, parts: Sequence[Segment | Observation]) -> str:
        return self.codec.decode([token for part in parts for token in part.tokens])

    async def _score_tokens(
        self, engine: EngineId, tokens: Sequence[int], start: int, top: int
    ) -> ScoredTokens:
        return await self.engines.engine(engine).token_logprobs(tokens, start=start, top=top)

    async def _generate_one(
        self, engine: EngineId, request: GenerateRequest, partial: PartialSamples
    ) -> Generated:
        samples = await self._generate(engine, [request], partial)
        return samples[request.request_id]

    def samples_so_far(self, stream: str, group: GroupId) -> PartialSamples:
        """Return the tokens so far of a running group by request name, including ended turns."""
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
        """Return the names of the requests of a group that engines are running."""
        opened = self.open.get(group_name(stream, group), {})
        return [name for name, turn in opened.items() if turn.engine is not None]

    async def _generate(
        self, engine: EngineId, requests: Sequence[GenerateRequest], partial: PartialSamples
    ) -> PartialSamples:
        """Generate the missing tokens of `partial`; returns all samples, complete."""
        left = remaining_requests(requests, partial)
        continued = [request for request in left if request.request_id in partial]
        try:
            rest = await self.engines.engine(engine).generate(left) if left else []
        except EngineUnreachable as error:
            samples = merged_samples(requests, partial, error.partial)
            self.recomputed.resubmitted_samples += len(remaining_requests(requests, samples))
            self.recomputed.discarded_tokens += error.discarded_tokens
            raise Unfinished(samples, error) from error
        self.recomputed.kept_tokens += sum(len(partial[r.request_id].tokens) for r in continued)
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
        """Generate and score the group that the coordinator started, from its prompt."""
        return await self.group(
            source[start.group],
            engine=start.engine,
            stream=TRAIN,
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
        """Generate and score responses to held-out problems, on all engines concurrently.

        Seeds are the same at every call, so measurements before and after a run differ only in the
        weights.

        Args:
            problems: the problems.
            samples: responses per problem.
            done: called with the index and the group of each problem when it ends.
        """

        # Time in an engine's queue counts towards the timeout: send no more than it can run.
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


def group_name(stream: str, group: GroupId) -> str:
    """Return the name of a group, which is the prefix of the names of its requests."""
    return f"{stream}-{group}"


def request_id(stream: str, group: GroupId, sample: int) -> str:
    """Return the name of a sample on the engine, for logs and for aborting it."""
    return f"{group_name(stream, group)}-{sample}"


def _of_request(partial: PartialSamples, name: str) -> PartialSamples:
    return {name: partial[name]} if name in partial else {}
