"""The event loop with compiled engines: the same run, equal to the last bit, in a fraction of the time.

    EventLoop       one event at a time       the rule, and all kinds of runs
    CompiledLoop    engines in `kernel`,      runs of `serves`: one turn, no rewards that take time,
                    starts in `lane`          no failures, requests, scaling or log

The coordinator, the trainer, the ledger and the statistics are those of `EventLoop`. What the
coordinator need not decide (`Coordinator.quiet`) happens in `run_lane`; it is told afterwards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, cast

import numpy as np
import simpy
from numpy.typing import NDArray

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator
from simulator.costs.decode import DecodeCost
from simulator.costs.measured_engine import MeasuredPrefill
from simulator.costs.prefill import PrefillCost
from simulator.engine import kernel
from simulator.engine.replica import ACTIVITIES, Replica
from simulator.engine.sequences import Tally
from simulator.run import lane as lanes
from simulator.run.event_loop import EventLoop
from simulator.run.flights import Batch, Flight, Slot
from simulator.run.responses import Draws
from simulator.run.system import Engine, System

_WORKS: Final = cast(dict[ev.GroupId, Flight], {-1: None})
"""`Slot.flights` of an engine with groups, which the kernel has."""
_MANY: Final = 1 << 60
_VERSIONS: Final = 4
"""Versions by which the tokens of a group are counted, at first."""
_TIMERS: Final = 1024
_NOTES: Final = 4096
"""Ends, starts and changes of engines of one lane."""


class _Clocked(simpy.Environment):
    """Time that also the kernel moves."""

    def move(self, now_s: float) -> None:
        """Set the time, which no event passes."""
        self._now = now_s


class _Engine:
    """One of the engines in arrays, as the event loop uses a `Replica`."""

    def __init__(self, engines: _Engines, number: ev.EngineId) -> None:
        self._engines = engines
        self._number = number

    @property
    def activity_s(self) -> dict[str, float]:
        """Seconds by activity."""
        a, e = self._engines.arrays, self._number
        kernel.look(a, e)
        row = a.seconds[e]
        seconds = dict(zip(ACTIVITIES, row[kernel.ACTIVE :].tolist(), strict=True))
        state = ACTIVITIES[a.number[e, kernel.STATE]]
        seconds[state] += max(0.0, float(row[kernel.NOW] - row[kernel.SINCE]))
        return seconds

    @property
    def generated_tokens(self) -> int:
        """Since the start."""
        return int(kernel.generated_tokens(self._engines.arrays, self._number))

    @property
    def recomputed_tokens(self) -> int:
        """Tokens prefilled again."""
        return int(self._engines.arrays.number[self._number, kernel.RECOMPUTED])

    @property
    def preemptions(self) -> int:
        """Sequences sent back to the queue."""
        return int(self._engines.arrays.number[self._number, kernel.PREEMPTIONS])

    def next_s(self) -> float:
        """When `advance` has something to do next."""
        return float(kernel.next_s(self._engines.arrays, self._number))

    def advance(self, now_s: float) -> list[int]:
        """Do everything until `now_s`; returns the rows of groups that ended."""
        a, rows = self._engines.arrays, []
        kernel.advance(a, self._number, now_s)
        while (row := int(kernel.take_done(a, self._number, now_s))) >= 0:
            rows.append(row)
        return rows

    def pause(self, now_s: float) -> None:
        """Stop, and keep unfinished groups."""
        kernel.pause(self._engines.arrays, self._number, now_s)

    def resume(self, now_s: float, version: ev.Version) -> None:
        """Continue under the weights of `version`."""
        self._engines.expect(version)
        kernel.resume(self._engines.arrays, self._number, now_s, version)

    def drop(self, now_s: float, row: int) -> int:
        """Drop a group; returns the tokens lost."""
        return int(kernel.drop(self._engines.arrays, self._number, now_s, row))


class _Engines:
    """The arrays of all engines, which grow as needed."""

    def __init__(self, replicas: Sequence[Replica], samples: int) -> None:
        first, engines = replicas[0].settings, len(replicas)
        running = first.max_running
        costs = dict.fromkeys((one.settings.decode, one.settings.prefill) for one in replicas)
        places = {both: place for place, both in enumerate(costs)}
        cost, gpu_s, base_s, rise_s, pass_s = map(
            np.array, zip(*[_costs(*both, running) for both in costs], strict=True)
        )
        size = np.zeros(kernel.SIZES, np.int64)
        size[kernel.RUNNING], size[kernel.CACHE] = running, first.cache_tokens
        size[kernel.SHARING], size[kernel.BITS] = first.prefix_sharing, running.bit_length()
        size[kernel.RESERVE_RUNNING] = first.reserve_running_tokens
        size[kernel.RESERVE_NEW] = first.reserve_new_tokens
        size[kernel.FREE_GROUP] = size[kernel.FREE_ITEM] = -1
        number = np.zeros((engines, kernel.NUMBERS), np.int64)
        number[:, [kernel.QUEUE, kernel.QUEUE_END, kernel.DONE, kernel.DONE_END]] = -1
        number[:, kernel.FREE_SLOTS] = running
        number[:, kernel.COST] = [places[one.settings[:2]] for one in replicas]
        seconds = np.zeros((engines, kernel.SECONDS))
        seconds[:, kernel.JOINED_AT] = -math.inf
        epoch = np.zeros((engines, 64, 2), np.int64)
        epoch[:, 0, 0] = -1
        slot = np.zeros((engines, running, kernel.SLOTS), np.int64)
        slot[:, :, kernel.START] = kernel.FREE
        self.arrays = kernel.Engines(
            seconds=seconds,
            number=number,
            ends=np.zeros((engines, 2 * running), np.int64),
            lasts=np.zeros((engines, 2 * running), np.int64),
            slot=slot,
            free=np.tile(np.arange(running - 1, -1, -1), (engines, 1)),
            ended=np.zeros((engines, running), np.int64),
            epoch=epoch,
            cost=cost,
            gpu_s=gpu_s,
            base_s=base_s,
            rise_s=rise_s,
            pass_s=pass_s,
            group=np.zeros((0, kernel.GROUP), np.int64),
            done_s=np.zeros(0),
            member=np.zeros((0, samples, kernel.MEMBER), np.int64),
            by_version=np.zeros((0, _VERSIONS, 3), np.int64),
            item=np.zeros((0, kernel.ITEM), np.int64),
            size=size,
        )
        self._version = 0

    def reserve(self, groups: int) -> None:
        """Make room for so many more groups, and what queues may need."""
        a = self.arrays
        if (missing := groups - a.size[kernel.FREE_GROUPS]) > 0:
            had, more = len(a.group), max(int(missing), len(a.group))
            a = a._replace(**{name: _longer(a, name, more) for name in _OF_GROUPS})
            _link(a.group, had, kernel.NEXT, a.size, kernel.FREE_GROUP)
            a.size[kernel.FREE_GROUPS] += more
        if (missing := groups + a.size[kernel.RUNNING] - a.size[kernel.FREE_ITEMS]) > 0:
            had, more = len(a.item), max(int(missing), len(a.item))
            a = a._replace(item=_longer(a, "item", more))
            _link(a.item, had, kernel.I_NEXT, a.size, kernel.FREE_ITEM)
            a.size[kernel.FREE_ITEMS] += more
        self.arrays = a

    def expect(self, version: ev.Version) -> None:
        """Make room for the tokens of a version."""
        if version == self._version:
            return
        self._version, a = version, self.arrays
        if version + 3 > a.epoch.shape[1]:
            self.arrays = a = a._replace(epoch=np.concatenate([a.epoch, a.epoch], axis=1))
        running = a.group[a.group[:, kernel.LEFT] > 0, kernel.BASE]
        width = version - int(running.min(initial=version)) + 1
        if width > a.by_version.shape[1]:
            wider = np.zeros((len(a.group), 2 * width, 3), np.int64)
            wider[:, : a.by_version.shape[1]] = a.by_version
            self.arrays = a._replace(by_version=wider)


_OF_GROUPS: Final = ("group", "done_s", "member", "by_version")


def _longer(a: kernel.Engines, name: str, more: int) -> NDArray[Any]:
    array = getattr(a, name)
    return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])


def _link(rows: NDArray[np.int64], first: int, column: int, size: Any, head: int) -> None:
    """Put the rows from `first` on into the list of free ones."""
    rows[first:, column] = np.arange(first + 1, len(rows) + 1)
    rows[-1, column] = size[head]
    size[head] = first


def _costs(decode: DecodeCost, prefill: PrefillCost | MeasuredPrefill, running: int) -> Any:
    """Rows of `cost`, `gpu_s`, `base_s`, `rise_s` and `pass_s`."""
    waits = decode.overlap or decode.floor_s > decode.engine_s
    added_s = 0.0 if decode.overlap else decode.engine_s
    added_sequence_s = 0.0 if decode.overlap else decode.engine_sequence_s
    gpu_s, base_s, rise_s, rising = [0.0], [0.0], [0.0], running
    for sequences in range(1, running + 1):
        gpu_s.append(decode.base_s(sequences))
        base_s.append(gpu_s[-1] + (added_s + added_sequence_s * sequences))
        rise_s.append(base_s[-1] - base_s[-2])
        if rise_s[-1] < 0:
            rising = min(rising, sequences - 1)
    cost = [
        *(decode.context_token_s, decode.engine_s, decode.engine_sequence_s, decode.floor_s),
        *(float(decode.overlap), decode.floor_s if waits else 0.0),
        *(decode.engine_sequence_s if waits else 0.0, float(rising)),
    ]
    if isinstance(prefill, MeasuredPrefill):
        cost += [prefill.pair_s, 1.0, 1.0, prefill.pass_s, prefill.token_s, prefill.slowdown]
        return cost, gpu_s, base_s, rise_s, [0.0]
    cost += [prefill.pair_s, float(prefill.chunk_tokens), 0.0, 0.0, 0.0, prefill.slowdown]
    passes_s = _passes(dataclasses.replace(prefill, slowdown=1.0))
    return cost, gpu_s, base_s, rise_s, passes_s * prefill.slowdown


@cache
def _passes(prefill: PrefillCost) -> NDArray[np.float64]:
    """Seconds of a pass by its number of tokens."""
    return np.array([0.0, *map(prefill.pass_s, range(1, prefill.chunk_tokens + 1))])


def serves(system: System) -> bool:
    """Return whether `CompiledLoop` can simulate a system."""
    if Coordinator.starts_stay(system.limits):
        return False
    others = (system.scaling, system.controller, system.reward, system.failures)
    if any(one is not None for one in others) or system.requests:
        return False
    if system.workload.most_turns > 1:
        return False
    engine = system.make_engine(0, 0, None)
    if type(engine) is not Replica:
        return False
    decode, prefill, *_ = engine.settings
    if not isinstance(decode, DecodeCost) or not isinstance(prefill, PrefillCost | MeasuredPrefill):
        return False
    # Windows and states have costs of their own.
    alike = isinstance(prefill, MeasuredPrefill) or (
        prefill.model.window is None and prefill.model.linear is None
    )
    return alike


class CompiledLoop(EventLoop):
    """A run whose engines and starts are compiled; `serves` tells for which systems."""

    def __init__(self, system: System, seed: int) -> None:
        super().__init__(system, seed)
        assert isinstance(self.coordinator, Coordinator)
        assert isinstance(self.responses, Draws)
        self.coordinator.leave_starts()
        samples, engines = system.workload.samples_per_prompt, len(self.slots)
        replicas = [cast(Replica, slot.engine) for slot in self.slots]
        self._engines = _Engines(replicas, samples)
        for slot in self.slots:
            slot.engine = cast(Engine, _Engine(self._engines, slot.number))
        self._flights: dict[ev.GroupId, None] = {}
        self.flights = cast(dict[ev.GroupId, Flight], self._flights)
        self._rows: dict[ev.GroupId, int] = {}
        """Of groups in flight, and of those that wait for training."""
        count = np.zeros(lanes.COUNTS, np.int64)
        count[lanes.SLOTS] = system.limits.max_in_flight
        count[lanes.TOKENS_OF_PROMPT] = system.workload.prompt_tokens
        count[lanes.LAST_START] = -1 if self._last_start is None else self._last_start
        self._lane = lanes.Lane(
            state=np.zeros(lanes.STATES),
            count=count,
            timer_s=np.zeros(_TIMERS),
            timer=np.zeros((_TIMERS, 2), np.int64),
            wake_s=np.full(engines, math.inf),
            load=np.zeros(engines, np.int64),
            works=np.zeros(engines, np.int64),
            drawn=np.zeros((0, samples), np.int64),
            start=np.zeros((_NOTES, 2), np.int64),
            ending=np.zeros(_NOTES, np.int64),
            changed_s=np.zeros(_NOTES),
            changed=np.zeros((_NOTES, 2), np.int64),
        )
        self._blocks = 0
        """Batches whose lengths were drawn."""

    def _environment(self) -> simpy.Environment:
        return _Clocked()

    def _run_until_over(self) -> None:
        env = cast(_Clocked, self.env)
        while not self.over.processed:
            at, lane = env.peek(), self._lane
            if lane.count[lanes.TIMERS] and lane.timer_s[0] < at:
                self._run_lane(env, at)
            else:
                env.step()

    # --- lanes -----------------------------------------------------------------------------------

    def _run_lane(self, env: _Clocked, until_s: float) -> None:
        lane, accounting = self._lane, self.accounting
        count, state = lane.count, lane.state
        quiet = self.coordinator.quiet()
        count[lanes.ENDS] = min(quiet.ends, _MANY)
        count[lanes.LIMIT] = min(quiet.start_limit, _MANY)
        self._prepare()
        state[lanes.IN_FLIGHT_S] = accounting.in_flight_group_s
        state[lanes.SINCE] = accounting.in_flight_since_s
        why = lanes.run_lane(self._engines.arrays, lane, until_s)
        accounting.in_flight_group_s = float(state[lanes.IN_FLIGHT_S])
        accounting.in_flight_since_s = float(state[lanes.SINCE])
        self._follow()
        accounting.groups_in_flight = len(self._flights)
        if why == lanes.ENDED:
            now_s, slot = float(state[lanes.NOW]), self.slots[count[lanes.ENGINE]]
            env.move(now_s)
            self._advance(now_s, slot)
            if math.isinf(lane.wake_s[slot.number]):
                self._set_timer(now_s, slot)
        elif why == lanes.FULL:
            self._engines.reserve(max(1024, len(self._engines.arrays.group)))
            self._reserve_notes(2 * len(lane.ending))
        elif why == lanes.DRAWS:
            self._draw(self.system.limits.batch_groups)

    def _prepare(self) -> None:
        """Tell the lane the state of the coordinator."""
        lane = self._lane
        count = lane.count
        count[lanes.STARTED] = self.coordinator.started
        count[lanes.FLIGHTS] = len(self._flights)
        count[lanes.VERSION] = self.version
        lane.load[:] = _MANY
        loads = self.coordinator.engine_loads
        lane.load[list(loads)] = list(loads.values())
        count[[lanes.STARTS, lanes.ENDINGS, lanes.CHANGES]] = 0

    def _follow(self) -> None:
        """Tell coordinator, ledger and statistics what the lane did."""
        lane, a = self._lane, self._engines.arrays
        starts, ends, changes = lane.count[[lanes.STARTS, lanes.ENDINGS, lanes.CHANGES]].tolist()
        started: list[ev.StartGroup] = []
        if starts:
            rows, engines = lane.start[:starts].T.tolist()
            first = int(lane.count[lanes.NEXT_GROUP]) - starts
            groups = range(first, first + starts)
            self._rows.update(zip(groups, rows, strict=True))
            self._flights.update(dict.fromkeys(groups))
            version = self.version
            started = [
                ev.StartGroup(group, engine, version)
                for group, engine in zip(groups, engines, strict=True)
            ]
        ended: list[ev.GroupId] = []
        if ends:
            rows = lane.ending[:ends]
            ended = a.group[rows, kernel.NAME].tolist()
            for group, heads, tokens in zip(
                ended, _heads(a, rows), a.group[rows, kernel.TOKENS].tolist(), strict=True
            ):
                self.ledger.finished(group, heads, tokens)
                del self._flights[group]
        if started or ended:
            loads = {engine: load for engine, load in enumerate(lane.load.tolist()) if load < _MANY}
            self.coordinator.follow(started, ended, loads)
        if changes:
            self._note_changes(changes)

    def _note_changes(self, changes: int) -> None:
        lane = self._lane
        for at, (engine, works) in zip(
            lane.changed_s[:changes].tolist(), lane.changed[:changes].tolist(), strict=True
        ):
            if engine < 0:
                self.accounting.nothing_left(at)
                continue
            slot = self.slots[engine]
            slot.flights = _WORKS if works else {}
            self.accounting.engine_changed(at, slot)

    def _start_others(self, now_s: float) -> None:
        groups = self.coordinator.open_starts
        if not groups:
            return
        lane = self._lane
        self._engines.reserve(groups)
        if lane.count[lanes.NEXT_GROUP] + groups > lane.count[lanes.FIRST_DRAWN] + len(lane.drawn):
            self._draw(groups)
        self._reserve_notes(groups)
        lane = self._lane
        self._prepare()
        lanes.start_groups(self._engines.arrays, lane, now_s, groups)
        engines = lane.start[:groups, 1].tolist()
        self._follow()
        for engine in dict.fromkeys(engines):
            self._dirty[self.slots[engine]] = None

    def _draw(self, groups: int) -> None:
        """Draw the lengths of at least so many next groups."""
        lane, count = self._lane, self._lane.count
        kept = lane.drawn[count[lanes.NEXT_GROUP] - count[lanes.FIRST_DRAWN] :]
        blocks = [kept]
        while sum(map(len, blocks)) < groups or len(blocks) == 1:
            lengths = cast(Draws, self.responses).lengths(self._blocks)
            self._check(lengths)
            blocks.append(lengths)
            self._blocks += 1
        count[lanes.FIRST_DRAWN] = count[lanes.NEXT_GROUP]
        self._lane = lane._replace(drawn=np.concatenate(blocks))

    def _check(self, lengths: NDArray[np.int64]) -> None:
        longest = self.system.workload.prompt_tokens + int(lengths.max())
        room = int(self._engines.arrays.size[kernel.CACHE])
        if lengths.min() < 1 or longest > room:
            raise ValueError(
                f"a sequence has {longest} tokens, but the cache of an engine holds {room}; use "
                "GPUs with more memory, more GPUs per engine (tensor_parallel), or shorter "
                "responses (max_tokens)"
            )

    def _reserve_notes(self, notes: int) -> None:
        """Make room for so many starts, ends or timers."""
        lane = self._lane
        timers = int(lane.count[lanes.TIMERS]) + notes + len(self.slots)
        longer: dict[str, NDArray[Any]] = {}
        for name, most in {
            **dict.fromkeys(("timer_s", "timer"), timers),
            **dict.fromkeys(("start", "ending"), notes),
            **dict.fromkeys(("changed_s", "changed"), 3 * notes),
        }.items():
            array = getattr(lane, name)
            if len(array) < most:
                more = np.zeros((2 * most - len(array), *array.shape[1:]), array.dtype)
                longer[name] = np.concatenate([array, more])
        if longer:
            self._lane = lane._replace(**longer)

    # --- single events ---------------------------------------------------------------------------

    def _set_timer(self, now_s: float, slot: Slot) -> None:
        self._set_timers_of([slot.number], now_s)

    def _set_dirty_timers(self, now_s: float) -> None:
        if self._dirty:
            self._set_timers_of([slot.number for slot in self._dirty], now_s)
            self._dirty.clear()

    def _set_timers_of(self, engines: list[int], now_s: float) -> None:
        self._reserve_notes(len(engines))
        lanes.set_timers(self._engines.arrays, self._lane, now_s, np.array(engines))

    def _generated(self, now_s: float, slot: Slot, row: int) -> None:  # type: ignore[override]
        a = self._engines.arrays
        one = a.group[row]
        group = int(one[kernel.NAME])
        self._loses_group(now_s, slot)
        del self._flights[group]
        (heads,) = _heads(a, np.array([row]))
        self.ledger.report(group, heads, int(one[kernel.TOKENS]))
        self.tell(ev.GroupFinished(group, int(one[kernel.HEAD]), int(one[kernel.TAIL])))

    def _loses_group(self, now_s: float, slot: Slot) -> None:
        self._lane.works[slot.number] -= 1
        if not self._lane.works[slot.number]:
            slot.flights = {}
            self._has_no_group(now_s, slot)

    def _drop(self, now_s: float, drop: ev.Drop) -> None:
        group = drop.group
        self.ledger.action(drop)
        self.unfinished += drop.reason == ev.RUN_ENDED
        row, a = self._rows.pop(group), self._engines.arrays
        slot = self.slots[a.group[row, kernel.ENGINE]]
        if group in self._flights and slot.engine.next_s() <= now_s:
            self._advance(now_s, slot)  # It may end at this moment.
        if group not in self._flights:
            kernel.free_group(a, row)
            return
        del self._flights[group]
        tokens = slot.engine.drop(now_s, row)
        self.accounting.dropped_tokens += tokens
        self._dropped(group, tokens)
        self._dirty[slot] = None
        self._loses_group(now_s, slot)

    def take(self, groups: Sequence[ev.GroupId]) -> Batch:
        """The responses of groups that are trained on now."""
        a = self._engines.arrays
        rows = np.array([self._rows.pop(group) for group in groups])
        lengths = self.system.workload.prompt_tokens + a.member[rows, :, kernel.LENGTH].ravel()
        base, counts = a.group[rows, kernel.BASE], a.by_version[rows]
        oldest, versions = int(base.min()), np.arange(counts.shape[1])
        sums = np.zeros((int(base.max()) - oldest + len(versions), 3), np.int64)
        np.add.at(sums, (base[:, None] + versions - oldest).ravel(), counts.reshape(-1, 3))
        heads, tails, tokens = (
            {oldest + place: count for place, count in enumerate(column) if count}
            for column in sums.T.tolist()
        )
        several = int(a.group[rows, kernel.SEVERAL].sum())
        kernel.free_groups(a, rows)
        return Batch(lengths, Tally(heads, tails, tokens, several))


def _heads(a: kernel.Engines, rows: NDArray[np.int64]) -> list[dict[ev.Version, int]]:
    """First tokens of groups by version."""
    counts = a.by_version[rows, :, kernel.HEADS].tolist()
    return [
        {base + place: count for place, count in enumerate(row) if count}
        for base, row in zip(a.group[rows, kernel.BASE].tolist(), counts, strict=True)
    ]
