"""One group from its prompt to its rewards: generate, decode, judge.

    prompt --(engine)--> samples --(tokenizer)--> texts --(reward function)--> trajectories

A group whose reward function failed or timed out is filtered; no reward is made up for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from areal_lab.control.events import EngineId, GroupId, StartGroup
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.protocol import Engine, Generated, GenerateRequest, SamplingParams
from areal_lab.rewards.service import RewardOutcome, RewardService


def sample_seed(run_seed: int, stream: str, group: GroupId, sample: int) -> int:
    """Seed of one sample: a 31-bit hash, so that neighboring groups share no draws.

    Args:
        stream: what the sample is for, as in "train"; streams never share seeds on purpose.
    """
    text = f"{run_seed}/{stream}/{group}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """One group after generation and judgement."""

    problem: Problem
    generated: tuple[Generated, ...]
    completions: tuple[str, ...]
    outcomes: tuple[RewardOutcome, ...]
    prompt_tokens: tuple[int, ...]
    started_s: float
    generated_s: float
    judged_s: float
    """Seconds since the epoch."""

    def trajectories(self, group: GroupId) -> tuple[Trajectory, ...]:
        """The samples as trajectories; call it only if every outcome is ok."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What a group needs on its way; shared by training and evaluation."""

    engines: Mapping[EngineId, Engine]
    codec: TextCodec
    rewards: RewardService
    sampling: SamplingParams
    run_seed: int
    running_samples: int
    """Samples that one engine runs at once."""
    answer_tokens: Callable[[GroupId, int], int] | None = None
    """Exact length of sample i of a group, for studies of long tails: answers then end nowhere
    else. None lets the model end its answers."""

    async def group(
        self, problem: Problem, *, engine: EngineId, stream: str, group: GroupId, samples: int
    ) -> RolledOut:
        """Draw `samples` answers to one problem and judge them."""
        started_s = time.time()
        prompt_tokens = self.codec.encode(problem.prompt)
        generated = await self.engines[engine].generate(
            [
                GenerateRequest(
                    request_id=request_id(stream, group, index),
                    prompt_tokens=prompt_tokens,
                    sampling=self._sampling(stream, group, index),
                )
                for index in range(samples)
            ]
        )
        generated_s = time.time()
        completions = tuple(
            self.codec.decode([token for part in sample.segments for token in part.tokens])
            for sample in generated
        )
        outcomes = await self.rewards.score(completions, problem)
        return RolledOut(
            problem=problem,
            generated=tuple(generated),
            completions=completions,
            outcomes=tuple(outcomes),
            prompt_tokens=prompt_tokens,
            started_s=started_s,
            generated_s=generated_s,
            judged_s=time.time(),
        )

    def _sampling(self, stream: str, group: GroupId, sample: int) -> SamplingParams:
        sampling = replace(self.sampling, seed=sample_seed(self.run_seed, stream, group, sample))
        if self.answer_tokens is None:
            return sampling
        tokens = self.answer_tokens(group, sample)
        return replace(sampling, max_new_tokens=tokens, ignore_eos=True, stop_token_ids=())

    async def training_group(
        self, start: StartGroup, source: PromptSource, samples: int
    ) -> RolledOut:
        """The group that the coordinator started: prompt number `start.group` of the source."""
        return await self.group(
            source[start.group],
            engine=start.engine,
            stream="train",
            group=start.group,
            samples=samples,
        )

    async def held_out(
        self,
        problems: Sequence[Problem],
        *,
        samples: int,
        done: Callable[[], None] = lambda: None,
    ) -> list[RolledOut]:
        """Answers to held-out problems, on all engines at once.

        The seeds are the same at every call, so that before and after a run the same draws meet
        different weights. `done` is called after each problem.
        """

        ids = sorted(self.engines)
        # What waits at an engine counts towards its time limit, so no more is sent than it can run.
        at_once = max(1, self.running_samples // samples)
        places = {engine: asyncio.Semaphore(at_once) for engine in ids}

        async def one(index: int, problem: Problem) -> RolledOut:
            engine = ids[index % len(ids)]
            async with places[engine]:
                rolled = await self.group(
                    problem, engine=engine, stream="held-out", group=index, samples=samples
                )
            done()
            return rolled

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, problem)) for i, problem in enumerate(problems)]
        return [task.result() for task in tasks]


def request_id(stream: str, group: GroupId, sample: int) -> str:
    """Name of a sample on the engine, for logs and for aborting it."""
    return f"{stream}-{group}-{sample}"
