"""Samples of several turns: between two turns a tool answers, and the sample holds no slot.

    submit --> turn 1 --> tool --> turn 2 --> ... --> last turn of the last sample --> advance

An engine around an engine. Each turn is submitted anew, with the prompt and everything generated so
far as its prompt: the cache of a sample that waits is given away, as servers under load do. A
sample's tokens are shared out evenly over its turns.
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
        """Each sample alone."""
        return decoded_alone(self.segments)


class _Sample:
    """One sample on its way through its turns."""

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
        self.turns = turns  # tokens of the turns that are left, the next one last
        self.tools_s = tools_s
        self.segments: list[tuple[Version, int]] = []


class Conversations:
    """Runs the turns of every sample on `engine`; see the module's text.

    Args:
        turns: calls of the model per sample; a sample of fewer tokens has fewer.
        tools_s: for each sample of a group, the time of the tool after each turn but the last; None
            is no time.
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
        self._answers: list[tuple[float, int, _Sample]] = []  # heap: when the tool has answered

    @property
    def activity_s(self) -> Mapping[str, float]:
        """The engine's."""
        return self._engine.activity_s

    @property
    def generated_tokens(self) -> int:
        """The engine's."""
        return self._engine.generated_tokens

    @property
    def recomputed_tokens(self) -> int:
        """The engine's."""
        return self._engine.recomputed_tokens

    @property
    def preemptions(self) -> int:
        """The engine's."""
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
        """Begin the first turn of every sample."""
        self._version = max(self._version, version)
        tools_s = self._tools_s(group) or [[0.0] * (self._turns - 1)] * len(lengths)
        self._ended[group], self._samples[group] = [], len(lengths)
        for place, tokens in enumerate(lengths):
            sample = _Sample(
                group, place, prompt_tokens, _even_turns(tokens, self._turns), tools_s[place]
            )
            self._begin_turn(now_s, sample)

    def next_s(self) -> float:
        """The engine's next change, or the next answer of a tool."""
        answer_s = self._answers[0][0] if self._answers else math.inf
        return min(self._engine.next_s(), answer_s)

    def advance(self, now_s: float, /) -> list[_Ended]:
        """In order of time: turns that end, and tools that answer."""
        groups: list[_Ended] = []
        while (moment_s := self.next_s()) <= now_s:
            while self._answers and self._answers[0][0] <= moment_s:
                _, _, sample = heappop(self._answers)
                if sample.group in self._samples:
                    self._begin_turn(moment_s, sample)
            for done in self._engine.advance(moment_s):
                group = self._turn_ended(moment_s, done.group, done.segments[0])
                if len(self._ended[group]) == self._samples[group]:
                    groups.append(self._collect(group))
        return groups

    def pause(self, now_s: float, /) -> None:
        """Tools go on; their answers wait for the engine."""
        self._engine.pause(now_s)

    def resume(self, now_s: float, version: Version, /) -> None:
        """Go on under `version`."""
        self._version = max(self._version, version)
        self._engine.resume(now_s, version)

    def drop(self, now_s: float, group: GroupId, /) -> int:
        """Give up the group's samples, those that wait for a tool too."""
        lost = [turn for turn, sample in self._running.items() if sample.group == group]
        for turn in lost:
            del self._running[turn]
        del self._samples[group], self._ended[group]
        return sum(self._engine.drop(now_s, turn) for turn in lost)

    def fail(self, now_s: float, /) -> list[GroupId]:
        """Lose every group; tools answer to nobody."""
        self._engine.fail(now_s)
        groups = list(self._samples)
        self._running.clear()
        self._samples.clear()
        self._ended.clear()
        self._answers.clear()
        return groups

    def _begin_turn(self, now_s: float, sample: _Sample) -> None:
        turn, self._next = self._next, self._next + 1
        self._running[turn] = sample
        tokens = sample.turns.pop()
        self._engine.submit(now_s, turn, sample.context_tokens, [tokens], self._version)
        sample.context_tokens += tokens

    def _turn_ended(self, now_s: float, turn: int, segments: Segments) -> GroupId:
        """The sample goes to its tool, or ended; returns its group."""
        sample = self._running.pop(turn)
        for version, tokens in segments:
            if sample.segments and sample.segments[-1][0] == version:
                sample.segments[-1] = (version, sample.segments[-1][1] + tokens)
            else:
                sample.segments.append((version, tokens))
        if sample.turns:
            # Counted from the end, as `turns` is.
            wait_s = sample.tools_s[-len(sample.turns)]
            heappush(self._answers, (now_s + wait_s, turn, sample))
        else:
            self._ended[sample.group].append(sample)
        return sample.group

    def _collect(self, group: GroupId) -> _Ended:
        samples = sorted(self._ended.pop(group), key=lambda sample: sample.place)
        del self._samples[group]
        return _Ended(group, tuple(tuple(sample.segments) for sample in samples))


def _even_turns(tokens: int, turns: int) -> list[int]:
    """So many tokens in at most so many turns of at least one token, the next one last."""
    turns = min(turns, tokens)
    whole, left = divmod(tokens, turns)
    return [whole] * (turns - left) + [whole + 1] * left
