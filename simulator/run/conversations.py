"""Multi-turn samples: between two turns a tool runs, and the sample holds no slot of the engine.

    submit --> turn 1 --> tool --> turn 2 --> ... --> last turn of the last sample --> advance

An engine that wraps another one. Each turn is a new submission whose prompt is the original prompt
plus everything generated so far: a sample that waits for a tool loses its cache, as on servers
under load. A sample's tokens are divided evenly among its turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from areal_lab.control.events import GroupId, Version
from areal_lab.runlog.records import Segments
from simulator.engine.versions import Decoded, decoded_alone
from simulator.run.system import Engine


class _Ended(NamedTuple):
    group: GroupId
    segments: tuple[Segments, ...]

    @property
    def decoded(self) -> list[Decoded]:
        """Each sample on its own."""
        return decoded_alone(self.segments)


class _Sample:
    """One sample and its remaining turns."""

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
        turns: model calls per sample; a sample of fewer tokens has fewer turns.
        tools_s: for each sample of a group, the tool's time after each turn but the last; None
            means no time.
    """

    def __init__(
        self,
        engine: Engine,
        turns: int,
        tools_s: Callable[[GroupId], list[list[float]] | None],
    ) -> None:
        self._engine = engine
        self._turns = turns
        self._tools_s = tools_s
        self._version: Version = 0
        self._next = 0
        self._running: dict[int, _Sample] = {}
        self._ended: dict[GroupId, list[_Sample]] = {}
        self._samples: dict[GroupId, int] = {}
        self._tools: list[tuple[float, int, _Sample]] = []  # heap, by the time the tool is done

    @property
    def activity_s(self) -> Mapping[str, float]:
        """Of the wrapped engine."""
        return self._engine.activity_s

    @property
    def generated_tokens(self) -> int:
        """Of the wrapped engine."""
        return self._engine.generated_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Of the wrapped engine."""
        return self._engine.recomputed_tokens

    @property
    def preemptions(self) -> int:
        """Of the wrapped engine."""
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
        self._ended[group], self._samples[group] = [], len(lengths)
        for place, tokens in enumerate(lengths):
            sample = _Sample(
                group, place, prompt_tokens, _even_turns(tokens, self._turns), tools_s[place]
            )
            self._begin_turn(now_s, sample)

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
                if sample.group in self._samples:
                    self._begin_turn(moment_s, sample)
            for done in self._engine.advance(moment_s):
                group = self._turn_ended(moment_s, done.group, done.segments[0])
                if len(self._ended[group]) == self._samples[group]:
                    groups.append(self._collect(group))
        return groups

    def pause(self, now_s: float, /) -> None:
        """Pause the engine; tools continue, and their samples wait for the engine."""
        self._engine.pause(now_s)

    def resume(self, now_s: float, version: Version, /) -> None:
        """Continue under `version`."""
        self._version = max(self._version, version)
        self._engine.resume(now_s, version)

    def drop(self, now_s: float, group: GroupId, /) -> int:
        """Drop the group's samples, including those that wait for a tool."""
        lost = [turn for turn, sample in self._running.items() if sample.group == group]
        for turn in lost:
            del self._running[turn]
        del self._samples[group], self._ended[group]
        return sum(self._engine.drop(now_s, turn) for turn in lost)

    def fail(self, now_s: float, /) -> list[GroupId]:
        """Lose every group; results of running tools are discarded."""
        self._engine.fail(now_s)
        groups = list(self._samples)
        self._running.clear()
        self._samples.clear()
        self._ended.clear()
        self._tools.clear()
        return groups

    def _begin_turn(self, now_s: float, sample: _Sample) -> None:
        turn, self._next = self._next, self._next + 1
        self._running[turn] = sample
        tokens = sample.turns.pop()
        self._engine.submit(now_s, turn, sample.context_tokens, [tokens], self._version)
        sample.context_tokens += tokens

    def _turn_ended(self, now_s: float, turn: int, segments: Segments) -> GroupId:
        """Send the sample to its tool, or collect it after its last turn; returns its group."""
        sample = self._running.pop(turn)
        for version, tokens in segments:
            if sample.segments and sample.segments[-1][0] == version:
                sample.segments[-1] = (version, sample.segments[-1][1] + tokens)
            else:
                sample.segments.append((version, tokens))
        if sample.turns:
            # Counted from the end, as `turns` is.
            wait_s = sample.tools_s[-len(sample.turns)]
            heappush(self._tools, (now_s + wait_s, turn, sample))
        else:
            self._ended[sample.group].append(sample)
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
