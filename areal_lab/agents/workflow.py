"""Workflows: what a sample does between its prompt and its reward.

    run(engine, data):   turn --> tool --> turn --> ... --> score --> Episode

A workflow is one object for all samples of a run; `run` keeps what belongs to a sample in its own
variables. Samples of a group run concurrently, on the pipeline's event loop: what computes for long
belongs into another process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from areal_lab.agents.sampler import TurnSampler
from areal_lab.control.events import GroupId
from areal_lab.data.trajectory import CUT_OFF, Observation, SampleEnd, Segment
from areal_lab.engines.protocol import Generated
from areal_lab.rewards.service import RewardOutcome

_AND: Final = ", "


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model, for logs and readers."""

    tokens: int
    """That the model chose."""
    tool: str = ""
    """Called in this turn; empty if none was. Several are separated by a comma and a space."""
    outcome: str = ""
    """Of the call: `ok`, or what went wrong; of several one each, or one for all."""
    reward: float | None = None
    """Of this turn alone, if it has one."""
    fork: str = ""
    """Why its prompt does not continue the turn before it (`turns.Fork`); empty if it does."""

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """Tool and outcome of each call; of one that could not be read the tool is `?`."""
        if not self.tool:
            return (("?", self.outcome),) if self.outcome else ()
        tools = self.tool.split(_AND)
        outcomes = self.outcome.split(_AND)
        if len(outcomes) != len(tools):
            outcomes = [self.outcome] * len(tools)
        return tuple(zip(tools, outcomes, strict=True))

    @classmethod
    def of_calls(cls, tokens: int, calls: Sequence[tuple[str, str]]) -> Turn:
        """A turn with calls, by tool and outcome."""
        tools, outcomes = zip(*calls, strict=True)
        return cls(tokens=tokens, tool=_AND.join(tools), outcome=_AND.join(outcomes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tokens that are trained on together; see `data.trajectory`."""

    prompt_tokens: tuple[int, ...]
    parts: tuple[Segment | Observation, ...]
    turn_returns: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What became of one sample."""

    rows: tuple[Row, ...]
    """Each sampled token is a segment of exactly one row."""
    outcome: RewardOutcome
    """Its reward; without one it is not trained on."""
    end: SampleEnd
    turns: tuple[Turn, ...] = ()
    """Empty with one turn, which has nothing to tell."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The generated segments of all rows."""
        return tuple(part for row in self.rows for part in row.parts if isinstance(part, Segment))

    @property
    def truncated(self) -> bool:
        """Whether it was cut off: at the maximum length, number of turns or context."""
        return self.end in CUT_OFF

    @property
    def tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(segment.tokens) for segment in self.segments)


class WorkflowEngine(TurnSampler, Protocol):
    """What a workflow is given: turns, the tokenizer, and the run's rewards."""

    @property
    def stream(self) -> str:
        """`train`, or `held-out` for problems that are not trained on."""
        ...

    @property
    def group(self) -> GroupId:
        """Of the sample, in its stream: samples of a group are compared."""
        ...

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """Tokens of a text.

        Args:
            text: to encode. What spells a control token is that token, except in what `plain`
                returned.
            begins: whether it begins a sequence, as a prompt does.
        """
        ...

    def plain(self, text: str, *, within: str = "") -> str:
        """A text, marked so that `encode` reads control tokens that it spells as ordinary text.

        Args:
            text: of others, such as a tool's result.
            within: the text with marks that it is put into. Control tokens are the special tokens
                of the vocabulary, and what else was added to it and stands in here.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, without special tokens."""
        ...

    def give_up(self) -> None:
        """End the sample's turns: those that run return the tokens so far at once and stop on their
        engines, later ones return no token; both with the finish reason `abort`."""
        ...

    async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
        """The reward of a completion, by the run's reward function.

        Raises:
            RewardError: if it failed too often.
        """
        ...


class Workflow(Protocol):
    """One sample of one problem."""

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """Generate and score one sample.

        An exception is an outcome of its own: the group is not trained on, and the run ends if it
        happens too often (`reward.max_error_rate`).

        Args:
            engine: of this sample.
            data: `prompt`, `answer` and the problem's other fields.
        """
        ...


@runtime_checkable
class Opens(Protocol):
    """A workflow that has something running beside its samples, such as a server."""

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
    """A workflow that not every model suits, or that needs something of this machine."""

    def check_model(self, model: Path) -> None:
        """Refuse what `open` could not serve; called before any process starts.

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
        """Where they are attended to, for `gateway.json` in the run folder; no keys."""
        ...

    def notices(self) -> tuple[str, ...]:
        """Lines for the user, when the run begins."""
        ...

    def waiting_for(self) -> str:
        """What samples wait for now; empty if none does."""
        ...


@asynccontextmanager
async def opened(workflow: Workflow | None, model: Path) -> AsyncIterator[Workflow | None]:
    """The workflow, open until the end of the block."""
    beside: object = workflow  # which says nothing of `Opens`
    try:
        if isinstance(beside, Opens):
            await beside.open(model)
        yield workflow
    finally:
        if isinstance(beside, Opens):
            await beside.close()


def ended(engine: TurnSampler, context: Sequence[int], generated: Generated) -> SampleEnd:
    """Why a turn ended: at its length only if the context had room for that.

    Args:
        engine: of the sample.
        context: with the tokens of the turn.
        generated: the turn.
    """
    if generated.finish_reason == "length" and room(engine, context) < 1:
        return "context"
    return generated.finish_reason


def room(engine: TurnSampler, context: Sequence[int]) -> int:
    """Tokens that a turn may have after these; 0 or less if there is no room."""
    return min(engine.sampling.max_new_tokens, engine.context_tokens - len(context))
