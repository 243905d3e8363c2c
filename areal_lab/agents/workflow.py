"""Workflows: the steps of a sample between its prompt and its reward.

    run(engine, data):   turn --> tool --> turn --> ... --> score --> Episode

One workflow object serves all samples of a run, so `run` keeps the state of a sample in local
variables. Samples of a group run concurrently, on the pipeline's event loop: long computations
belong into another process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from areal_lab.control.events import GroupId
from areal_lab.data.trajectory import CUT_OFF, Observation, SampleEnd, Segment, Turn
from areal_lab.engines.protocol import Generated, SamplingParams, ScoredTokens
from areal_lab.rewards.service import RewardOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tokens that are trained on together; see `data.trajectory`."""

    prompt_tokens: tuple[int, ...]
    parts: tuple[Segment | Observation, ...]
    turn_returns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Result of one sample."""

    rows: tuple[Row, ...]
    """Each sampled token is a segment of exactly one row."""
    outcome: RewardOutcome
    """Reward; a sample without one is not trained on."""
    end: SampleEnd
    turns: tuple[Turn, ...] = ()
    """Empty for a single turn."""
    tools: tuple[str, ...] = ()
    """Names of the tools that an agent or an environment offered to the model."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Measurements of an environment of another library, and its named rewards, by their names."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Generated segments of all rows."""
        return tuple(part for row in self.rows for part in row.parts if isinstance(part, Segment))

    @property
    def truncated(self) -> bool:
        """True if it was cut off: at the maximum length, number of turns or context."""
        return self.end in CUT_OFF

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(segment.tokens) for segment in self.segments)


class TurnSampler(Protocol):
    """Sample the turns of one rollout.

    A call waits while engines are paused, and continues on another engine with the tokens so far if
    its engine is lost: it fails only when the run ends.
    """

    @property
    def sampling(self) -> SamplingParams:
        """Sampling options of the run; `max_new_tokens` limits one turn."""
        ...

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a prompt and its response together."""
        ...

    async def turn(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        seed: int | None = None,
    ) -> Generated:
        """Sample the response to a prompt; concurrent calls are branches of the rollout.

        Args:
            prompt_tokens: the whole conversation so far.
            sampling: replaces the run's options; its seed is ignored.
            seed: seed of the turn; by default each turn has a different one.

        Raises:
            ValueError: the prompt leaves no room for a token.
        """
        ...

    async def token_logprobs(
        self, tokens: Sequence[int], *, start: int = 0, top: int = 0
    ) -> ScoredTokens:
        """Score given tokens with the current weights, at temperature 1.

        Args:
            tokens: the sequence, at least one token.
            start: index of the first token to score.
            top: most likely tokens to report at each place.

        Raises:
            CannotScore: the engines cannot.
        """
        ...


class WorkflowEngine(TurnSampler, Protocol):
    """Interface that a workflow uses to sample: turns, the tokenizer, and the run's rewards."""

    @property
    def stream(self) -> str:
        """`train`, or `held-out` for problems that are not trained on."""
        ...

    @property
    def group(self) -> GroupId:
        """Group of the sample, in its stream: samples of a group are compared."""
        ...

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """Encode a text.

        Args:
            text: spelled control tokens become those tokens, except in the result of `plain`.
            begins: whether it begins a sequence, as a prompt does.
        """
        ...

    def plain(self, text: str, *, within: str = "") -> str:
        """Mark a text so that `encode` reads control tokens that it spells as ordinary text.

        Args:
            text: untrusted text, such as a tool's result.
            within: text with control tokens around it. Control tokens are the special tokens of the
                vocabulary, and other added tokens that occur in `within`.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        ...

    def give_up(self) -> None:
        """End the sample's turns: running ones return the tokens so far and stop on their
        engines, later ones return no token; both with the finish reason `abort`.
        """
        ...

    async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
        """Score a completion with the run's reward function.

        Raises:
            RewardError: it failed too often.
        """
        ...


class Workflow(Protocol):
    """One sample of one problem."""

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """Generate and score one sample.

        An exception is a separate outcome: the group is not trained on, and the run ends if
        exceptions are too frequent (`reward.max_error_rate`).

        Args:
            engine: engine of this sample.
            data: `prompt`, `answer` and the problem's other fields.
        """
        ...


@runtime_checkable
class Opens(Protocol):
    """A workflow with something that runs next to its samples, such as a server."""

    async def open(self, model: Path) -> None:
        """Start it; called once, before the first sample.

        Args:
            model: folder with the tokenizer of the model that is sampled.
        """
        ...

    async def close(self) -> None:
        """Stop it."""
        ...


@runtime_checkable
class ReadsModel(Protocol):
    """A workflow that requires something of the model or this machine."""

    def check_model(self, model: Path) -> None:
        """Reject a model that `open` could not serve; called before any process starts.

        Args:
            model: folder with the tokenizer of the model that is sampled.

        Raises:
            ValueError: in one line.
        """
        ...


@runtime_checkable
class Attended(Protocol):
    """A workflow whose samples wait for something outside of the run, once it is open."""

    def address(self) -> Mapping[str, str]:
        """Address for outside programs, for `gateway.json` in the run folder; no keys."""
        ...

    def notices(self) -> tuple[str, ...]:
        """Lines for the user at the start of the run."""
        ...

    def waiting_for(self) -> str:
        """Reason why samples wait now; empty if none does."""
        ...


@asynccontextmanager
async def opened(workflow: Workflow | None, model: Path) -> AsyncIterator[Workflow | None]:
    """Open the workflow until the end of the block."""
    beside: object = workflow  # which says nothing of `Opens`
    try:
        if isinstance(beside, Opens):
            await beside.open(model)
        yield workflow
    finally:
        if isinstance(beside, Opens):
            await beside.close()


def ended(engine: TurnSampler, context: Sequence[int], generated: Generated) -> SampleEnd:
    """Finish reason of a turn: `length` only if the context had room for more.

    `context` includes the tokens of the turn.
    """
    if generated.finish_reason == "length" and room(engine, context) < 1:
        return "context"
    return generated.finish_reason


def room(engine: TurnSampler, context: Sequence[int]) -> int:
    """Tokens that a turn may have after these; 0 or less if there is no room."""
    return min(engine.sampling.max_new_tokens, engine.context_tokens - len(context))
