"""An inference server one decode step at a time: the slow twin of `simulator.engine.replica`.

One record per sequence, one version per token, one turn of the loop per step of the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, Protocol

RETRACT_STEPS = 20


class Costs(Protocol):
    def step_s(self, sequences: int, context_tokens: int) -> float: ...

    def seconds(self, new_tokens: int, pairs: int) -> float: ...


class Command(NamedTuple):
    """A command of the owner: submit, pause, resume, drop or fail, with its arguments."""

    time_s: float
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(eq=False)
class Response:
    group: int
    serial: int
    place: int
    prompt: int
    length: int
    versions: list[int] = field(default_factory=list)  # of its tokens
    preempted: bool = False

    @property
    def done(self) -> int:
        return len(self.versions)


class Oracle:
    def __init__(
        self,
        costs: Costs,
        *,
        max_running: int,
        cache_tokens: int,
        prefix_sharing: bool,
        reserve_running_tokens: int,
        reserve_new_tokens: int,
    ) -> None:
        self.costs = costs
        self.max_running = max_running
        self.cache_tokens = cache_tokens
        self.sharing = prefix_sharing
        self.reserve_running = reserve_running_tokens
        self.reserve_new = reserve_new_tokens
        self.time_s = self.asked_s = 0.0
        self.running: list[Response] = []
        self.waiting: list[Response] = []
        self.groups: dict[int, list[Response]] = {}
        self.serial = 0
        self.version = -1
        self.paused = False
        self.stopped: tuple[str, float] | None = None
        self.reading: tuple[str, float] | None = None  # what is read, and how long still
        self.due = False
        self.activity_s: defaultdict[str, float] = defaultdict(float)
        self.generated_tokens = 0
        self.recomputed_tokens = 0
        self.preemptions = 0
        self.ended: dict[int, tuple[float, tuple[tuple[tuple[int, int], ...], ...]]] = {}
        self.results: list[Any] = []  # of drop and fail

    def run(self, commands: Sequence[Command], until_s: float) -> None:
        """Obey the commands, which come in order of time, and go on until `until_s` at least."""
        left = list(commands)
        while left or self.time_s < until_s:
            if left and left[0].time_s <= self.time_s:
                command = left.pop(0)
                self.asked_s = command.time_s  # a step may have ended since
                getattr(self, f"_{command.name}")(*command.arguments)
            else:
                self._go_on(left[0].time_s if left else until_s)

    def _go_on(self, next_s: float) -> None:
        """One thing: a piece of a prefill, a step, or waiting until the next command."""
        if self.paused:
            self._spend("paused", next_s - self.time_s)
        elif self.reading is not None:
            name, rest_s = self.reading
            piece_s = min(rest_s, next_s - self.time_s)
            self._spend(name, piece_s)
            self.reading = (name, rest_s - piece_s)
            if piece_s == rest_s:
                self.reading = None
                self.due = bool(self.waiting)
        elif self.due:
            self._admit()
        elif self.running:
            self._make_room()
            context = sum(one.prompt + one.done for one in self.running)
            step_s = self.costs.step_s(len(self.running), context)
            if next_s - self.time_s <= 1e-6 * step_s:
                # It comes at the end of the step before, but for rounding.
                self._spend("decode", next_s - self.time_s)
            else:
                self._spend("decode", step_s)
                self._step()
        else:
            self._spend("idle", next_s - self.time_s)

    def _spend(self, name: str, seconds: float) -> None:
        self.activity_s[name] += seconds
        self.time_s += seconds

    # --- decode ----------------------------------------------------------------------------------

    def _step(self) -> None:
        for one in self.running:
            one.versions.append(self.version)
            self.generated_tokens += 1
        ended = {one.group for one in self.running if one.done == one.length}
        self.running = [one for one in self.running if one.done < one.length]
        for group in ended:
            members = self.groups[group]
            if all(member.done == member.length for member in members):
                segments = tuple(_segments(member.versions) for member in members)
                self.ended[group] = (self.time_s, segments)
                del self.groups[group]
        if ended and self.waiting:
            self.due = True

    @property
    def cached_tokens(self) -> int:
        if not self.sharing:
            return sum(one.prompt + one.done for one in self.running)
        prompts = {one.group: one.prompt for one in self.running}
        return sum(prompts.values()) + sum(one.done for one in self.running)

    def _make_room(self) -> None:
        if self.cached_tokens + len(self.running) <= self.cache_tokens:
            return
        while True:
            victim = min(
                self.running,
                key=lambda one: (one.done, -one.prompt, -one.serial, -one.place),
            )
            self.running.remove(victim)
            victim.preempted = True
            self.waiting.append(victim)
            self.preemptions += 1
            room = self.cache_tokens - self.cached_tokens
            if len(self.running) == 1 or room >= RETRACT_STEPS * len(self.running):
                return

    # --- admission -------------------------------------------------------------------------------

    def _admit(self) -> None:
        self.due = False
        before = len(self.running)
        tokens = pairs = again = 0
        while self.waiting and len(self.running) < self.max_running:
            one = self.waiting[0]
            cached = self.sharing and any(other.group == one.group for other in self.running)
            new = one.done + (0 if cached else one.prompt)
            reserved = self.reserve_running * before
            reserved += self.reserve_new * (len(self.running) - before + 1)
            if self.running and self.cached_tokens + new + reserved > self.cache_tokens:
                break
            self.running.append(self.waiting.pop(0))
            tokens += new
            for token in range(new):
                pairs += (one.prompt + one.done - new) + token + 1
            if one.preempted:
                again += new
        self.recomputed_tokens += again
        if tokens:
            name = "recompute" if again == tokens else "prefill"
            self.reading = (name, self.costs.seconds(tokens, pairs))

    # --- commands --------------------------------------------------------------------------------

    def _submit(self, group: int, prompt: int, lengths: Sequence[int], version: int) -> None:
        if version > self.version:
            assert not self.groups
            self.version = version
        members = [
            Response(group, self.serial, place, prompt, length)
            for place, length in enumerate(lengths)
        ]
        self.serial += 1
        self.groups[group] = members
        if not self.waiting:
            self.due = True
        self.waiting.extend(members)

    def _pause(self) -> None:
        if self.paused:
            return
        self.paused = True
        self.stopped, self.reading = self.reading, None

    def _resume(self, version: int, recompute: bool) -> None:
        self.paused = False
        self.version = version
        self.reading = None if recompute else self.stopped
        self.stopped = None
        self.due = bool(self.waiting)
        if recompute and self.running:
            tokens = pairs = 0
            prompts: set[int] = set()
            for one in self.running:
                new = one.prompt + one.done
                if self.sharing and one.group in prompts:
                    new = one.done
                prompts.add(one.group)
                tokens += new
                for token in range(new):
                    pairs += (one.prompt + one.done - new) + token + 1
            self.recomputed_tokens += tokens
            self.reading = ("recompute", self.costs.seconds(tokens, pairs))

    def _drop(self, group: int) -> None:
        if group in self.ended and self.ended[group][0] > self.asked_s:
            _, segments = self.ended.pop(group)
            self.results.append(sum(tokens for response in segments for _, tokens in response))
            return
        members = self.groups.pop(group, [])
        self.running = [one for one in self.running if one.group != group]
        self.waiting = [one for one in self.waiting if one.group != group]
        if members and self.waiting:
            self.due = True
        self.results.append(sum(one.done for one in members))

    def _fail(self) -> None:
        unseen = [group for group, (time_s, _) in self.ended.items() if time_s > self.asked_s]
        for group in unseen:
            del self.ended[group]
        self.results.append(sorted([*unseen, *self.groups]))
        self.groups.clear()
        self.running.clear()
        self.waiting.clear()
        self.reading = self.stopped = None
        self.paused = self.due = False


def _segments(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((version, len(list(tokens))) for version, tokens in groupby(versions))
