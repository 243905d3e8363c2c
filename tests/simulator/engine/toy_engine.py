"""An engine on which every token takes the same time, so that results can be computed by hand.

A sequence of n tokens takes `n * token_s` seconds in a slot. Slots are assigned first come, first
served; a pause stops everything at once, even in the middle of a token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from areal_lab.runlog.records import Segments
from simulator.engine.clock import RecordSpan
from simulator.engine.sequences import Decoded, decoded_alone
from simulator.run.system import MakeEngine


class GroupDone(NamedTuple):
    group: int
    time_s: float
    segments: tuple[Segments, ...]

    @property
    def decoded(self) -> list[Decoded]:
        return decoded_alone(self.segments)


@dataclass(eq=False)
class Running:
    group: int
    place: int
    tokens: int
    version: int
    begun_s: float = math.nan  # of the stretch that runs
    done: float = 0.0  # tokens, parts of one included
    told: int = 0  # whole tokens that are in `segments`
    segments: list[tuple[int, int]] = field(default_factory=list)


class ToyEngine:
    def __init__(
        self, token_s: float, slots: int | None = None, record: RecordSpan | None = None
    ) -> None:
        self.token_s = token_s
        self.slots = math.inf if slots is None else slots
        self.record = record
        self.version = 0
        self.paused = False
        self.running: list[Running] = []
        self.waiting: deque[Running] = deque()
        self.ended: dict[int, list[Running]] = {}
        self.members: dict[int, int] = {}
        self.activity_s = {"decode": 0.0, "paused": 0.0, "idle": 0.0}
        self.since_s = 0.0
        self.generated_tokens = self.recomputed_tokens = self.preemptions = 0
        self.by_sample = False
        self.reported: dict[int, int] = {}  # samples that ended, by group

    def submit(
        self, now_s: float, group: int, _prompt: int, lengths: Sequence[int], version: int, /
    ) -> None:
        self._pass(now_s)
        assert group not in self.members
        assert version >= self.version
        self.version = version
        self.members[group], self.ended[group] = len(lengths), []
        for place, tokens in enumerate(lengths):
            self.waiting.append(Running(group, place, tokens, version))
        self._admit(now_s)

    def next_s(self) -> float:
        if self.paused or not self.running:
            return math.inf
        return min(self._end_s(sequence) for sequence in self.running)

    def advance(self, now_s: float, /) -> list[GroupDone]:
        done: list[GroupDone] = []
        while (moment_s := self.next_s()) <= now_s:
            self._pass(moment_s)
            for sequence in [s for s in self.running if self._end_s(s) <= moment_s]:
                self.running.remove(sequence)
                sequence.done = sequence.tokens
                self._tell_tokens(sequence)
                self.ended[sequence.group].append(sequence)
                if self.by_sample:
                    self.reported[sequence.group] = self.reported.get(sequence.group, 0) + 1
                if len(self.ended[sequence.group]) == self.members[sequence.group]:
                    done.append(self._collect(sequence.group, moment_s))
            self._admit(moment_s)
        return done

    def report_samples(self) -> None:
        self.by_sample = True

    def ended_samples(self, _now_s: float, /) -> list[tuple[int, int]]:
        ended = list(self.reported.items())
        self.reported.clear()
        return ended

    def pause(self, now_s: float, /) -> None:
        assert not self.paused
        self._pass(now_s)
        for sequence in self.running:
            sequence.done += (now_s - sequence.begun_s) / self.token_s
            self._tell_tokens(sequence)
        self.paused = True

    def resume(self, now_s: float, version: int, /) -> None:
        assert self.paused
        self._pass(now_s)
        self.paused, self.version = False, version
        for sequence in self.running:
            sequence.begun_s, sequence.version = now_s, version
        self._admit(now_s)

    def drop(self, now_s: float, group: int, /) -> int:
        self._pass(now_s)
        mine = [s for s in self.running if s.group == group] + self.ended[group]
        self.running = [s for s in self.running if s.group != group]
        self.waiting = deque(s for s in self.waiting if s.group != group)
        del self.members[group], self.ended[group]
        self.reported.pop(group, None)
        self._admit(now_s)
        return sum(s.told for s in mine)

    def fail(self, now_s: float, /) -> list[int]:
        self._pass(now_s)
        groups = list(self.members)
        self.running.clear()
        self.waiting.clear()
        self.members.clear()
        self.ended.clear()
        self.reported.clear()
        self.paused = False
        return groups

    def _end_s(self, sequence: Running) -> float:
        return sequence.begun_s + (sequence.tokens - sequence.done) * self.token_s

    def _admit(self, now_s: float) -> None:
        while self.waiting and not self.paused and len(self.running) < self.slots:
            sequence = self.waiting.popleft()
            sequence.begun_s, sequence.version = now_s, self.version
            self.running.append(sequence)

    def _tell_tokens(self, sequence: Running) -> None:
        new = math.floor(sequence.done + 1e-9) - sequence.told
        if new:
            sequence.told += new
            self.generated_tokens += new
            parts = sequence.segments
            if parts and parts[-1][0] == sequence.version:  # paused, but not for weights
                new += parts.pop()[1]
            parts.append((sequence.version, new))

    def _collect(self, group: int, now_s: float) -> GroupDone:
        del self.members[group]
        sequences = sorted(self.ended.pop(group), key=lambda s: s.place)
        return GroupDone(group, now_s, tuple(tuple(s.segments) for s in sequences))

    def _pass(self, now_s: float) -> None:
        assert now_s >= self.since_s
        name = "paused" if self.paused else "decode" if self.running else "idle"
        if now_s > self.since_s:
            self.activity_s[name] += now_s - self.since_s
            if self.record is not None:
                self.record(name, self.since_s, now_s)
        self.since_s = now_s


def toy_engines(token_s: float, slots: int | None = None) -> MakeEngine:
    return lambda _number, _seed, record: ToyEngine(token_s, slots, record)
