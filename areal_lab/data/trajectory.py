"""Trajectories: rows of tokens to train on, composed of segments that one version generated.

    prompt | segment v3 | segment v4 | observation | segment v4
           '------- turn 0 ---------'              '- turn 1 -'
           '--------------------- response ------------------'

A sample is one trajectory, or several if its conversation has branches (sub-agents, a rewritten
history): these are rows of one sample. Lengths are in tokens. Records are checked once, on
creation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal, TypeAlias

from areal_lab.control.events import PROMPT_VERSION, GroupId, Version
from areal_lab.data.images import PlacedImage, check_places

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why the engine ended a response."""

SampleEnd: TypeAlias = Literal["stop", "length", "abort", "context", "turns"]
"""Why a sample ended: the reason of its last response, no room in the context for another turn,
or the maximum number of turns."""

CUT_OFF: Final = frozenset({"length", "context", "turns"})
"""Ends that the policy did not choose."""
_AND: Final = ", "


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens that one version of the policy generated."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log pi_behav of each token, as the engine reported it."""
    version: Version
    """The version that the engine reported for these tokens; never guessed by a client."""

    def __post_init__(self) -> None:
        given: tuple[Any, Any] = self.tokens, self.logprobs
        if not all(isinstance(one, tuple) for one in given):  # lists and arrays of a program
            object.__setattr__(self, "tokens", tuple(map(int, self.tokens)))
            object.__setattr__(self, "logprobs", tuple(map(float, self.logprobs)))
        if len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"a segment has {len(self.tokens)} tokens but {len(self.logprobs)} log-probs"
            )
        if not self.tokens:
            raise ValueError("a segment has no tokens, but must have at least one; omit it")
        if self.version < 0:
            raise ValueError(f"version is {self.version}, but must be >= 0 for generated tokens")
        if not all(math.isfinite(value) and value <= 1e-4 for value in self.logprobs):
            worst = next(v for v in self.logprobs if not (math.isfinite(v) and v <= 1e-4))
            raise ValueError(f"a log-prob is {worst}, but must be finite and <= 0")


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens in the response that are not trained on: of the environment (a tool's output), or
    of the policy where another row trains on them.
    """

    tokens: tuple[int, ...]


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
    """Why its prompt does not continue the turn before it (`agents.turns.Fork`), or empty."""

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
class Trajectory:
    """One sample of one prompt, or one row of it, with its reward."""

    group: GroupId
    sample: int
    """Index of the sample inside its group."""
    row: int = 0
    """Index of the row inside its sample."""
    prompt_tokens: tuple[int, ...]
    parts: tuple[Segment | Observation, ...]
    finish_reason: SampleEnd
    reward: float | None
    """Reward of the sample, the same in all its rows. None without one: it cannot be trained on."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named components, if the reward function returned some; `reward` is trained on."""
    turn_returns: tuple[float | None, ...] = ()
    """Return of each turn of this row, where turns are compared and not samples: trained on instead
    of `reward`. None if no reward reaches the turn."""
    images: tuple[PlacedImage, ...] = ()
    """Images of the prompt; samples of a group share the same objects."""

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            raise ValueError(f"trajectory {self.group}/{self.sample} has an empty prompt")
        check_places(len(self.prompt_tokens), self.images, f"trajectory {self.group}/{self.sample}")
        if not any(isinstance(part, Segment) for part in self.parts):
            raise ValueError(f"trajectory {self.group}/{self.sample} has no generated token")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(
                f"trajectory {self.group}/{self.sample} has reward {self.reward}, "
                "but rewards must be finite"
            )
        if self.turn_returns and len(self.turn_returns) != (turns := len(self.turns)):
            raise ValueError(
                f"trajectory {self.group}/{self.sample} has {len(self.turn_returns)} turn_returns, "
                f"but {turns} turns"
            )
        if not all(one is None or math.isfinite(one) for one in self.turn_returns):
            raise ValueError(
                f"trajectory {self.group}/{self.sample} has turn_returns {self.turn_returns}, but "
                "all must be finite"
            )

    @property
    def turns(self) -> tuple[tuple[Segment, ...], ...]:
        """Segments of each turn, which is the text between two observations."""
        grouped = groupby(self.parts, key=lambda part: isinstance(part, Segment))
        return tuple(
            tuple(part for part in parts if isinstance(part, Segment))
            for generated, parts in grouped
            if generated
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The generated segments, in order."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @property
    def response_tokens(self) -> tuple[int, ...]:
        """Generated and observed tokens, in order."""
        return tuple(token for part in self.parts for token in part.tokens)

    @property
    def response_mask(self) -> tuple[bool, ...]:
        """True for sampled response tokens."""
        return tuple(isinstance(part, Segment) for part in self.parts for _ in part.tokens)

    @property
    def behavior_logprobs(self) -> tuple[float, ...]:
        """log pi_behav of the response tokens; 0 on observations."""
        return tuple(
            value
            for part in self.parts
            for value in (part.logprobs if isinstance(part, Segment) else (0.0,) * len(part.tokens))
        )

    @property
    def versions(self) -> tuple[Version, ...]:
        """Version of each response token; `PROMPT_VERSION` on observations."""
        return tuple(
            part.version if isinstance(part, Segment) else PROMPT_VERSION
            for part in self.parts
            for _ in part.tokens
        )

    @property
    def generated_tokens(self) -> int:
        """Number of sampled tokens, which are trained on."""
        return sum(len(segment.tokens) for segment in self.segments)

    @property
    def truncated(self) -> bool:
        """True if it was cut off: at the maximum length, number of turns or context."""
        return self.finish_reason in CUT_OFF

    @property
    def head_version(self) -> Version:
        """Version of the first generated token."""
        return self.segments[0].version

    @property
    def tail_version(self) -> Version:
        """Version of the last generated token."""
        return self.segments[-1].version
