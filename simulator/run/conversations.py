"""Multi-turn samples: between two turns a tool runs, and the sample holds no slot of the engine.

    submit --> turn 1 --> tool --> turn 2 --> ... --> last turn of the last sample --> advance

An engine that wraps another one. Each turn is a new submission whose prompt is the original prompt
plus everything generated, and written by tools, so far. A sample's tokens are divided evenly among
its turns.

Without a prefix cache every turn reads its whole prompt. With one, contexts of samples at their
tools stay in the engine's cache as long as nothing else needs the room, or until it loads new
weights. The prompt of a group stays there as well, for its other samples.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol, cast

from areal_lab.control.events import GroupId, Version
from areal_lab.runlog.records import Segments
from simulator.engine.sequences import Decoded, decoded_alone
from simulator.run.system import Engine


class _Ended(NamedTuple):
    group: GroupId
    segments: tuple[Segments, ...]

    @property
    def decoded(self) -> list[Decoded]:
        """Each sample on its own."""
        return decoded_alone(self.segments)


class CachingEngine(Engine, Protocol):
    """An engine with a prefix cache."""

    def keep(self, key: Hashable, tokens: int, /) -> None:
        """Leave the context of a sequence that has ended in the cache until the room is needed."""
        ...

    def begin_with(self, group: GroupId, key: Hashable, /, *, shared: bool = False) -> None:
        """The prompt of a group that was just submitted begins with that context; a shared one is
        first read by the first of them."""
        ...


class _Sample:
    __slots__ = ("context_tokens", "group", "place", "segments", "tools_s", "turns")

    def __init__(
        self,
        group: GroupId,
        place: int,
        context_tokens: int,
        turns: list[int],
        tools_s: Sequence[float],
    ) -> None:
        self.group = group
        self.place = place
        self.context_tokens = context_tokens
        self.turns = turns  # tokens of the remaining turns, the next one last
        self.tools_s = tools_s
        self.segments: list[tuple[Version, int]] = []


class Conversations:
    """Runs the turns of every sample on `engine`; see the module docstring.

    Args:
        turns: model calls per sample, at most; a sample of fewer tokens has fewer turns.
        tools_s: for each sample of a group, the tool's time after each turn but the last; None
            means no time.
        counts: turns of each sample of a group; None gives every one `turns`.
        tool_tokens: added to the context by each tool.
        most_samples: that may have begun and not ended at once; 0 means no limit.
        prefix_cache: whether a turn may find its context in the engine's cache, which must be a
            `CachingEngine`.
    """

    def __init__(
        self,
        engine: Engine,
        turns: int,
        tools_s: Callable[[GroupId], list[list[float]] | None],
        *,
        counts: Callable[[GroupId], Sequence[int] | None] = lambda _: None,
        tool_tokens: int = 0,
        most_samples: int = 0,
        prefix_cache: bool = False,
    ) -> None:
        self._engine = engine
        self._turns = turns
        self._tools_s = tools_s
        self._counts = counts
        self._tool_tokens = tool_tokens
        self._most = most_samples or math.inf
        self._cache = cast("CachingEngine", engine) if prefix_cache else None
        self._version: Version = 0
        self._next = 0
        self._running: dict[int, _Sample] = {}
        self._begun = 0
        self._waiting: deque[_Sample] = deque()
        self._ended: dict[GroupId, list[_Sample]] = {}
        self._samples: dict[GroupId, int] = {}
        self._tools: list[tuple[float, int, _Sample]] = []  # heap, by the time the tool is done
        self._reported: dict[GroupId, int] | None = None  # samples since `ended_samples`

    @property
    def activity_s(self) -> Mapping[str, float]:
        """Seconds by activity of the wrapped engine."""
        return self._engine.activity_s

    @property
    def generated_tokens(self) -> int:
        """Generated tokens of the wrapped engine."""
        return self._engine.generated_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Recomputed tokens of the wrapped engine."""
        return self._engine.recomputed_tokens

    @property
    def preemptions(self) -> int:
        """Preemptions of the wrapped engine."""
        return self._engine.preemptions

    def submit(
        self,
        now_s: float,
        group: GroupId,
        prompt_tokens: int,
        lengths: Sequence[int],
        version: Version,
        /,
    ) -> None:
        """Start the first turn of every sample."""
        self._version = max(self._version, version)
        tools_s = self._tools_s(group) or [[0.0] * (self._turns - 1)] * len(lengths)
        counts = self._counts(group)
        if counts is None:
            counts = [self._turns] * len(lengths)
        self._ended[group], self._samples[group] = [], len(lengths)
        self._waiting.extend(
            _Sample(group, place, prompt_tokens, _even_turns(tokens, turns), tools_s[place])
            for place, (tokens, turns) in enumerate(zip(lengths, counts, strict=True))
        )
        self._begin(now_s)

    def next_s(self) -> float:
        """The engine's next change, or the next tool that is done."""
        tool_s = self._tools[0][0] if self._tools else math.inf
        return min(self._engine.next_s(), tool_s)

    def advance(self, now_s: float, /) -> list[_Ended]:
        """Handle ends of turns and of tools, in order of time."""
        groups: list[_Ended] = []
        while (moment_s := self.next_s()) <= now_s:
            while self._tools and self._tools[0][0] <= moment_s:
                _, _, sample = heappop(self._tools)
                self._begin_turn(moment_s, sample)
            for done in self._engine.advance(moment_s):
                group = self._turn_ended(moment_s, done.group, done.segments[0])
                if len(self._ended[group]) == self._samples[group]:
                    groups.append(self._collect(group))
                self._begin(moment_s)
        return groups

    def report_samples(self) -> None:
        """See `SampleEngine`."""
        self._reported = {}

    def ended_samples(self, _now_s: float, /) -> list[tuple[GroupId, int]]:
        """See `SampleEngine`."""
        ended = list((self._reported or {}).items())
        if self._reported:
            self._reported.clear()
        return ended

    def pause(self, now_s: float, /) -> None:
        """Pause the engine; tools continue, and their samples wait for the engine."""
        self._engine.pause(now_s)

    def resume(self, now_s: float, version: Version, /) -> None:
        """Continue under `version`."""
        self._version = max(self._version, version)
        self._engine.resume(now_s, version)

    def drop(self, now_s: float, group: GroupId, /) -> int:
        """Drop the group's samples, including those that wait for a tool; returns the tokens of all
        their turns."""
        lost = [turn for turn, sample in self._running.items() if sample.group == group]
        begun_samples = [self._running.pop(turn) for turn in lost]
        begun_samples += [sample for *_, sample in self._tools if sample.group == group]
        begun_samples += self._ended[group]
        tokens = sum(n for sample in begun_samples for _, n in sample.segments)
        # What their tools return is not for another attempt of the group.
        self._tools = [one for one in self._tools if one[-1].group != group]
        heapify(self._tools)
        waiting = deque(sample for sample in self._waiting if sample.group != group)
        begun = self._samples[group] - (len(self._waiting) - len(waiting))
        self._begun -= begun - len(self._ended[group])
        self._waiting = waiting
        del self._samples[group], self._ended[group]
        if self._reported:
            self._reported.pop(group, None)
        tokens += sum(self._engine.drop(now_s, turn) for turn in lost)
        self._begin(now_s)
        return tokens

    def fail(self, now_s: float, /) -> list[GroupId]:
        """Lose every group; results of running tools are discarded."""
        self._engine.fail(now_s)
        groups = list(self._samples)
        self._running.clear()
        self._samples.clear()
        self._ended.clear()
        self._tools.clear()
        self._waiting.clear()
        self._begun = 0
        if self._reported:
            self._reported.clear()
        return groups

    def _begin(self, now_s: float) -> None:
        while self._waiting and self._begun < self._most:
            self._begun += 1
            self._begin_turn(now_s, self._waiting.popleft())

    def _begin_turn(self, now_s: float, sample: _Sample) -> None:
        turn, self._next = self._next, self._next + 1
        self._running[turn] = sample
        tokens, context = sample.turns.pop(), sample.context_tokens
        self._engine.submit(now_s, turn, context, [tokens], self._version)
        if self._cache is not None:
            first = not sample.segments
            self._cache.begin_with(turn, sample.group if first else sample, shared=first)
        sample.context_tokens += tokens

    def _turn_ended(self, now_s: float, turn: int, segments: Segments) -> GroupId:
        """Send the sample to its tool, or collect it after its last turn; returns its group."""
        sample = self._running.pop(turn)
        for version, tokens in segments:
            if sample.segments and sample.segments[-1][0] == version:
                sample.segments[-1] = (version, sample.segments[-1][1] + tokens)
            else:
                sample.segments.append((version, tokens))
        if self._cache is not None:
            # Those that have ended as well: only age tells them apart.
            self._cache.keep(sample, sample.context_tokens)
        if sample.turns:
            # Counted from the end, as `turns` is.
            wait_s = sample.tools_s[-len(sample.turns)]
            heappush(self._tools, (now_s + wait_s, turn, sample))
            sample.context_tokens += self._tool_tokens
        else:
            self._begun -= 1
            self._ended[sample.group].append(sample)
            if self._reported is not None:
                self._reported[sample.group] = self._reported.get(sample.group, 0) + 1
        return sample.group

    def _collect(self, group: GroupId) -> _Ended:
        samples = sorted(self._ended.pop(group), key=lambda sample: sample.place)
        del self._samples[group]
        return _Ended(group, tuple(tuple(sample.segments) for sample in samples))


def _even_turns(tokens: int, turns: int) -> list[int]:
    """Divide `tokens` among at most `turns` turns of at least one token, the next one last."""
    turns = min(turns, tokens)
    whole, left = divmod(tokens, turns)
    return [whole] * (turns - left) + [whole + 1] * left
