"""The event loop with compiled engines: the same run, to the last bit, in a fraction of the time.

    EventLoop       one event at a time       the rule, and all kinds of runs
    CompiledLoop    engines and starts        runs of `serves`: one turn, no rewards that take time,
                    in `kernel`               no failures, requests, scaling or log

The coordinator, the trainer, the ledger and the statistics are those of `EventLoop`. What needs no
decision of the coordinator (`Coordinator.quiet`) happens in `kernel._run_lane`, and is reported to
it afterwards.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
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
from simulator.engine.replica import ACTIVITIES, RETRACT_STEPS, ReplicaSettings
from simulator.engine.sequences import Tally
from simulator.run.event_loop import EventLoop
from simulator.run.flights import Batch, Flight, Slot
from simulator.run.responses import Draws
from simulator.run.system import Engine, System

_WORKS: Final = cast(dict[ev.GroupId, Flight], {-1: None})
"""`Slot.flights` of an engine with groups, which the kernel has."""
_HEADS: Final = [kernel.HEAD, kernel.LAST_HEAD, kernel.BASE]
_MANY: Final = 1 << 60
_VERSIONS: Final = 4
_EPOCHS: Final = 64
"""Versions by which the tokens of a group are counted, and those of an engine, at first."""
_TIMERS: Final = 1024
_NOTES: Final = 4096
"""Ends, starts and changes of engines of one lane."""


class _Clocked(simpy.Environment):
    """Time and order of events, which also the kernel's timers take part in.

    simpy performs what is due at one time in the order in which it was scheduled, the beginning of
    a process first.
    """

    def move(self, now_s: float) -> None:
        """Set the time, which no event passes."""
        self._now = now_s

    def next_order(self) -> int:
        """Number of the next event that is scheduled."""
        return next(self._eid)

    def orders_from(self, number: int) -> None:
        """Let the next event that is scheduled have this number."""
        self._eid = itertools.count(number)

    def first(self) -> tuple[float, int]:
        """Time and number of simpy's next event; the number is -1 if nothing precedes it then."""
        if not self._queue:
            return math.inf, -1
        at, priority, number, _ = self._queue[0]
        return at, number if priority else -1


class _Engine:
    """One of the engines in arrays, as the event loop uses a `Replica`."""

    def __init__(self, loop: CompiledLoop, number: ev.EngineId) -> None:
        self._loop = loop
        self._number = number

    @property
    def activity_s(self) -> dict[str, float]:
        """Seconds by activity."""
        self._loop.perform(kernel.ADVANCE, self._number)  # to its latest time
        a, e = self._loop.arrays, self._number
        row = a.seconds[e]
        seconds = dict(zip(ACTIVITIES, row[kernel.ACTIVE :].tolist(), strict=True))
        state = ACTIVITIES[a.number[e, kernel.STATE]]
        seconds[state] += max(0.0, float(row[kernel.NOW] - row[kernel.SINCE]))
        return seconds

    @property
    def generated_tokens(self) -> int:
        """Since the start."""
        return self._loop.perform(kernel.GENERATED, self._number)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens prefilled again."""
        return int(self._loop.arrays.number[self._number, kernel.RECOMPUTED])

    @property
    def preemptions(self) -> int:
        """Sequences sent back to the queue."""
        return int(self._loop.arrays.number[self._number, kernel.PREEMPTIONS])

    def next_s(self) -> float:
        """When `advance` has something to do next."""
        self._loop.perform(kernel.NEXT_S, self._number)
        return self._loop.performed_s

    def advance(self, now_s: float) -> list[int]:
        """Do everything until `now_s`; returns the rows of groups that ended."""
        perform, rows = self._loop.perform, []
        perform(kernel.ADVANCE, self._number, now_s)
        while (row := perform(kernel.TAKE_DONE, self._number)) >= 0:
            rows.append(row)
        return rows

    def pause(self, now_s: float) -> None:
        """Stop, and keep unfinished groups."""
        self._loop.perform(kernel.PAUSE, self._number, now_s)

    def resume(self, now_s: float, version: ev.Version) -> None:
        """Continue under the weights of `version`."""
        self._loop.resume(now_s, version, [self._number])


class _Engines:
    """The arrays of all engines, which grow as needed."""

    def __init__(self, settings: Sequence[ReplicaSettings], samples: int) -> None:
        first, engines = settings[0], len(settings)
        running = first.max_running
        speeds = {id(one.decode): one for one in settings}
        places = {name: place for place, name in enumerate(speeds)}
        number = np.zeros((engines, kernel.EPOCHS + 2 * _EPOCHS), np.int64)
        number[:, [kernel.QUEUE, kernel.QUEUE_END, kernel.DONE, kernel.DONE_END]] = -1
        number[:, kernel.FREE_SLOTS] = number[:, kernel.RUNNING] = running
        number[:, kernel.COST] = [places[id(one.decode)] for one in settings]
        number[:, kernel.CACHE], number[:, kernel.SHARING] = (
            first.cache_tokens,
            first.prefix_sharing,
        )
        number[:, kernel.RESERVE_RUNNING] = first.reserve_running_tokens
        number[:, kernel.RESERVE_NEW] = first.reserve_new_tokens
        number[:, kernel.RETRACTS], number[:, kernel.BITS] = RETRACT_STEPS, running.bit_length()
        number[:, kernel.EPOCHS] = -1  # the version of an engine before its first group
        batch = np.zeros((engines, kernel.BATCH, 2 * running), np.int64)
        batch[:, kernel.START] = kernel.FREE
        batch[:, kernel.FREE_OF, :running] = np.arange(running - 1, -1, -1)
        seconds = np.zeros((engines, kernel.SECONDS))
        seconds[:, kernel.JOINED_AT] = -math.inf
        versions = kernel.MEMBERS + kernel.MEMBER * samples
        group = np.zeros((1, versions + 3 * _VERSIONS), np.int64)
        group[0, [kernel.SAMPLES, kernel.VERSIONS]] = samples, versions
        group[0, kernel.FREE_GROUP] = -1
        prefill = first.prefill
        self.arrays = kernel.Engines(
            number=number,
            batch=batch,
            seconds=seconds,
            group=group,
            done_s=np.zeros(1),
            cost=np.array([*map(_costs, speeds.values())]),
            pass_s=_passes(dataclasses.replace(prefill, slowdown=1.0))
            if isinstance(prefill, PrefillCost)
            else np.zeros(1),
        )
        self._version = 0

    def reserve(self, groups: int) -> None:
        """Make room for `groups` more groups."""
        a = self.arrays
        missing = groups - int(a.group[0, kernel.FREE_GROUPS])
        if missing <= 0:
            return
        had, more = len(a.group), max(missing, len(a.group))
        group = np.concatenate([a.group, np.zeros((more, a.group.shape[1]), np.int64)])
        group[had:, kernel.NEXT] = np.arange(had + 1, had + more + 1)
        group[-1, kernel.NEXT] = group[0, kernel.FREE_GROUP]
        group[0, kernel.FREE_GROUP] = had
        group[0, kernel.FREE_GROUPS] += more
        self.arrays = a._replace(group=group, done_s=np.concatenate([a.done_s, np.zeros(more)]))

    def expect(self, version: ev.Version) -> None:
        """Make room for the tokens of a version."""
        if version == self._version:
            return
        self._version, a = version, self.arrays
        epochs = (a.number.shape[1] - kernel.EPOCHS) // 2
        if int(a.number[:, kernel.EPOCH].max()) + 3 > epochs:
            self._forget_epochs()
            if int(a.number[:, kernel.EPOCH].max()) + 3 > epochs // 2:
                more = np.zeros((len(a.number), 2 * epochs), np.int64)
                self.arrays = a = a._replace(number=np.concatenate([a.number, more], axis=1))
        running = a.group[1:][a.group[1:, kernel.LEFT] > 0, kernel.BASE]
        width = 3 * (version - int(running.min(initial=version)) + 1)
        had = a.group.shape[1] - int(a.group[0, kernel.VERSIONS])
        if width > had:
            more = np.zeros((len(a.group), width), np.int64)
            self.arrays = a._replace(group=np.concatenate([a.group, more], axis=1))

    def _forget_epochs(self) -> None:
        """Forget versions of which nothing that runs has tokens to count."""
        number, batch = self.arrays.number, self.arrays.batch
        runs = batch[:, kernel.START] != kernel.FREE
        oldest = np.where(runs, batch[:, kernel.BEGAN], _MANY).min(axis=1)
        gone = int(np.minimum(oldest, number[:, kernel.EPOCH]).min())
        epochs = number[:, kernel.EPOCHS :]
        epochs[:, : epochs.shape[1] - 2 * gone] = epochs[:, 2 * gone :].copy()
        number[:, kernel.EPOCH] -= gone
        batch[:, kernel.BEGAN] -= gone

    def by_version(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """First tokens, last tokens and tokens of groups from their `BASE` on."""
        group = self.arrays.group
        counts = group[rows, group[0, kernel.VERSIONS] :]
        return counts.reshape(len(rows), -1, 3)

    def lengths(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each response of groups."""
        group = self.arrays.group
        first = kernel.MEMBERS + kernel.LENGTH
        return group[rows, first : group[0, kernel.VERSIONS] : kernel.MEMBER].ravel()


def _costs(settings: ReplicaSettings) -> NDArray[np.float64]:
    """`Engines.cost` of one speed."""
    decode, prefill, running, *_ = settings
    assert isinstance(decode, DecodeCost)
    assert isinstance(prefill, PrefillCost | MeasuredPrefill)
    waits = decode.overlap or decode.floor_s > decode.engine_s
    added_s = 0.0 if decode.overlap else decode.engine_s
    added_sequence_s = 0.0 if decode.overlap else decode.engine_sequence_s
    table = np.zeros((4, max(running + 1, kernel.COSTS)))
    scalars, gpu_s, base_s, rise_s = table
    rising = running
    for sequences in range(1, running + 1):
        gpu_s[sequences] = decode.base_s(sequences)
        base_s[sequences] = gpu_s[sequences] + (added_s + added_sequence_s * sequences)
        rise_s[sequences] = base_s[sequences] - base_s[sequences - 1]
        if rise_s[sequences] < 0:
            rising = min(rising, sequences - 1)
    scalars[kernel.TOKEN_S], scalars[kernel.ENGINE_S] = decode.context_token_s, decode.engine_s
    scalars[kernel.SEQUENCE_S], scalars[kernel.FLOOR_S] = decode.engine_sequence_s, decode.floor_s
    scalars[kernel.OVERLAP], scalars[kernel.RISING] = decode.overlap, rising
    scalars[kernel.BATCH_FLOOR_S] = decode.floor_s if waits else 0.0
    scalars[kernel.BATCH_RISE_S] = decode.engine_sequence_s if waits else 0.0
    scalars[kernel.PAIR_S], scalars[kernel.SLOWDOWN] = prefill.pair_s, prefill.slowdown
    if isinstance(prefill, MeasuredPrefill):
        scalars[kernel.MEASURED] = 1.0
        scalars[kernel.PASS_S], scalars[kernel.READ_TOKEN_S] = prefill.pass_s, prefill.token_s
    else:
        scalars[kernel.CHUNK] = prefill.chunk_tokens
    return table


@lru_cache(maxsize=64)
def _passes(prefill: PrefillCost) -> NDArray[np.float64]:
    """`Engines.pass_s`"""
    return np.array([0.0, *map(prefill.pass_s, range(1, prefill.chunk_tokens + 1))])


def _settings_of(system: System) -> Callable[[ev.EngineId, int], ReplicaSettings] | None:
    """Costs and sizes of an engine for a seed; None if engines are not the replicas of a config."""
    return getattr(system.make_engine, "settings", None)


def serves(system: System) -> bool:
    """Return whether `CompiledLoop` can simulate a system."""
    others = (system.scaling, system.controller, system.reward, system.failures)
    find_settings = _settings_of(system)
    if (
        Coordinator.starts_stay(system.limits)
        or any(one is not None for one in others)
        or system.requests
        or system.workload.most_turns > 1
        or find_settings is None
    ):
        return False
    decode, prefill, *_ = find_settings(0, 0)
    if not isinstance(decode, DecodeCost) or not isinstance(prefill, PrefillCost | MeasuredPrefill):
        return False
    # Windows and states have other costs.
    if isinstance(prefill, MeasuredPrefill):
        return True
    return prefill.model.window is None and prefill.model.linear is None


class CompiledLoop(EventLoop):
    """A run whose engines and starts are compiled; `serves` tells for which systems."""

    def __init__(self, system: System, seed: int) -> None:
        super().__init__(system, seed)
        assert isinstance(self.coordinator, Coordinator)
        assert isinstance(self.responses, Draws)
        self._control, self._draws = self.coordinator, self.responses
        self._control.leave_starts()
        samples, engines = system.workload.samples_per_prompt, len(self.slots)
        find_settings = _settings_of(system)
        assert find_settings is not None
        settings = [find_settings(slot.number, seed) for slot in self.slots]
        self._engines = _Engines(settings, samples)
        self._groups = 0
        self._rows: dict[ev.GroupId, int] = {}
        """Of groups in flight, and of those that wait for training."""
        count = np.zeros(kernel.COUNTS, np.int64)
        count[kernel.ALL_SLOTS] = system.limits.max_in_flight
        count[kernel.TOKENS_OF_PROMPT] = system.workload.prompt_tokens
        count[kernel.LAST_START] = -1 if self._last_start is None else self._last_start
        self._lane = kernel.Lane(
            state=np.zeros(kernel.STATES),
            counts=count,
            timer_s=np.zeros(_TIMERS),
            timer=np.zeros((_TIMERS, 2), np.int64),
            wake_s=np.full(engines, math.inf),
            load=np.zeros(engines, np.int64),
            works=np.zeros(engines, np.int64),
            drawn=np.zeros((0, samples), np.int64),
            start=np.zeros((_NOTES, 2), np.int64),
            ending=np.zeros(_NOTES, np.int64),
            some=np.zeros(_NOTES, np.int64),
            changed_s=np.zeros(_NOTES),
            changed=np.zeros((_NOTES, 2), np.int64),
        )
        self._blocks = 0
        """Batches whose lengths were drawn."""

    def _environment(self) -> simpy.Environment:
        self._clock = _Clocked()
        return self._clock

    def _make_slot(self, number: ev.EngineId) -> Slot:
        return Slot(number, cast(Engine, _Engine(self, number)))

    def _run_until_over(self) -> None:
        env = self._clock
        while not self.over.processed:
            at, number = env.first()
            lane = self._lane
            if lane.counts[kernel.TIMERS] and (lane.timer_s[0], lane.timer[0, 0]) < (at, number):
                self._run_lane(at, number)
            else:
                env.step()

    # --- engines and groups ----------------------------------------------------------------------

    @property
    def arrays(self) -> kernel.Engines:
        """The engines."""
        return self._engines.arrays

    @property
    def groups_in_flight(self) -> int:
        """Groups that were started and have not entered the queue."""
        return self._groups

    def perform(self, what: int, engine: int = 0, at: float = 0.0, number: int = 0) -> int:
        """`kernel.perform`"""
        count, clock = self._lane.counts, self._clock
        count[kernel.SET] = clock.next_order()
        did = kernel.perform(self._engines.arrays, self._lane, what, engine, float(at), number)
        clock.orders_from(int(count[kernel.SET]))
        return int(did)

    @property
    def performed_s(self) -> float:
        """Seconds that `perform` found."""
        return float(self._lane.state[kernel.RESULT])

    def resume(self, now_s: float, version: ev.Version, engines: list[int]) -> None:
        """Let these engines continue under the weights of `version`."""
        self._engines.expect(version)
        self._perform_for(kernel.RESUME, engines, now_s, version)

    def _perform_for(self, what: int, some: list[int], at: float = 0.0, engine: int = 0) -> None:
        self._reserve_notes(len(some))
        self._lane.some[: len(some)] = some
        self.perform(what, engine, at, len(some))

    def _pause_engines(self, now_s: float) -> None:
        after = self.perform(kernel.PAUSE_ALL, 0, now_s)
        while after >= 0:
            self._pause_engine(now_s, self.slots[after])
            after = self.perform(kernel.PAUSE_ALL, after + 1, now_s)
        for slot in self.slots:
            slot.paused = True
        self._dirty.update(dict.fromkeys(self.slots))

    def _resume_engines(self, now_s: float) -> None:
        slots = [slot for slot in self.slots if slot.paused and not slot.trains]
        self.resume(now_s, self.version, [slot.number for slot in slots])
        for slot in slots:
            slot.paused = False
        self._dirty.update(dict.fromkeys(slots))

    # --- lanes -----------------------------------------------------------------------------------

    def _run_lane(self, until_s: float, until_set: int) -> None:
        lane, accounting = self._lane, self.accounting
        count, state = lane.counts, lane.state
        quiet = self._control.quiet()
        count[kernel.MAY_END] = min(quiet.ends, _MANY)
        count[kernel.LIMIT] = min(quiet.start_limit, _MANY)
        self._prepare()
        state[kernel.IN_FLIGHT_S] = accounting.in_flight_group_s
        state[kernel.IN_FLIGHT_SINCE] = accounting.in_flight_since_s
        why = self.perform(kernel.RUN, 0, until_s, until_set)
        accounting.in_flight_group_s = float(state[kernel.IN_FLIGHT_S])
        accounting.in_flight_since_s = float(state[kernel.IN_FLIGHT_SINCE])
        self._follow()
        accounting.groups_in_flight = self._groups
        if why == kernel.GROUP_ENDED:
            now_s, slot = float(state[kernel.L_NOW]), self.slots[count[kernel.AT_ENGINE]]
            self._clock.move(now_s)
            self._advance(now_s, slot)
            if math.isinf(lane.wake_s[slot.number]):
                self._set_timer(now_s, slot)
        elif why == kernel.FULL:
            most = int(lane.works.max())
            self._engines.reserve(2 * most)
            self._reserve_notes(2 * most)
        elif why == kernel.DRAWS:
            self._draw(self.system.limits.batch_groups)

    def _prepare(self) -> None:
        """Tell the lane the state of the coordinator."""
        self._engines.expect(self.version)  # engines without work take it without a pause
        lane = self._lane
        count = lane.counts
        count[kernel.STARTED] = self._control.started
        count[kernel.FLIGHTS] = self._groups
        count[kernel.VERSION] = self.version
        lane.load[:] = _MANY
        loads = self._control.engine_loads
        lane.load[list(loads)] = list(loads.values())
        count[[kernel.STARTS, kernel.ENDINGS, kernel.CHANGES]] = 0

    def _follow(self) -> None:
        """Tell coordinator, ledger and statistics what the lane did."""
        lane, a = self._lane, self._engines.arrays
        starts, ends, changes = lane.counts[
            [kernel.STARTS, kernel.ENDINGS, kernel.CHANGES]
        ].tolist()
        engines: list[ev.EngineId] = []
        if starts:
            rows, engines = lane.start[:starts].T.tolist()
            first = int(lane.counts[kernel.NEXT_GROUP]) - starts
            groups = range(first, first + starts)
            self._rows.update(zip(groups, rows, strict=True))
        ended: list[ev.GroupId] = []
        if ends:
            rows = lane.ending[:ends]
            ended = a.group[rows, kernel.NAME].tolist()
            tokens = a.group[rows, kernel.TOKENS].tolist()
            self.ledger.finished(ended, self._heads(rows), tokens)
        self._groups += starts - ends
        if starts or ends:
            loads = {
                engine: load for engine, load in enumerate(lane.load.tolist()) if load < _MANY // 2
            }
            self._control.follow(engines, ended, loads)
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
        groups = self._control.open_starts
        if not groups:
            return
        lane = self._lane
        self._engines.reserve(groups)
        if lane.counts[kernel.NEXT_GROUP] + groups > lane.counts[kernel.FIRST_DRAWN] + len(
            lane.drawn
        ):
            self._draw(groups)
        self._reserve_notes(groups)
        lane = self._lane
        self._prepare()
        self.perform(kernel.START_GROUPS, 0, now_s, groups)
        engines = lane.start[:groups, 1].tolist()
        self._follow()
        for engine in dict.fromkeys(engines):
            self._dirty[self.slots[engine]] = None

    def _draw(self, groups: int) -> None:
        """Draw the lengths of the next groups, at least of `groups`."""
        lane, count = self._lane, self._lane.counts
        kept = lane.drawn[count[kernel.NEXT_GROUP] - count[kernel.FIRST_DRAWN] :]
        blocks = [kept]
        while sum(map(len, blocks)) < groups or len(blocks) == 1:
            lengths = self._draws.lengths(self._blocks)
            self._check(lengths)
            blocks.append(lengths)
            self._blocks += 1
        count[kernel.FIRST_DRAWN] = count[kernel.NEXT_GROUP]
        self._lane = lane._replace(drawn=np.concatenate(blocks))

    def _check(self, lengths: NDArray[np.int64]) -> None:
        longest = self.system.workload.prompt_tokens + int(lengths.max())
        room = int(self._engines.arrays.number[0, kernel.CACHE])
        if lengths.min() < 1 or longest > room:
            raise ValueError(
                f"a sequence has {longest} tokens, but the cache of an engine holds {room}; use "
                "GPUs with more memory, more GPUs per engine (tensor_parallel), or shorter "
                "responses (max_tokens)"
            )

    def _reserve_notes(self, notes: int) -> None:
        """Make room for `notes` starts, ends or timers."""
        lane = self._lane
        timers = int(lane.counts[kernel.TIMERS]) + notes + len(self.slots)
        if timers <= len(lane.timer) and notes <= len(lane.some):
            return
        longer: dict[str, NDArray[Any]] = {}
        for name, most in {
            **dict.fromkeys(("timer_s", "timer"), timers),
            **dict.fromkeys(("start", "ending", "some"), notes),
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
        self._perform_for(kernel.SET_TIMERS, [slot.number], now_s)

    def _set_dirty_timers(self, now_s: float) -> None:
        if self._dirty:
            self._perform_for(kernel.SET_TIMERS, [slot.number for slot in self._dirty], now_s)
            self._dirty.clear()

    # These engines name a group by its row, where others return what it has done.
    def _generated(self, now_s: float, slot: Slot, row: int) -> None:  # type: ignore[override]
        a = self._engines.arrays
        one = a.group[row]
        group = int(one[kernel.NAME])
        self._loses_group(now_s, slot)
        self._groups -= 1
        (heads,) = self._heads(np.array([row]))
        self.ledger.report(group, heads, int(one[kernel.TOKENS]))
        self.tell(ev.GroupFinished(group, int(one[kernel.HEAD]), int(one[kernel.TAIL])))

    def _loses_group(self, now_s: float, slot: Slot) -> None:
        self._lane.works[slot.number] -= 1
        if not self._lane.works[slot.number]:
            slot.flights = {}
            self._has_no_group(now_s, slot)

    def _drop(self, now_s: float, drop: ev.Drop) -> None:
        assert drop.reason == ev.RUN_ENDED, "others are not served"
        self.ledger.action(drop)
        self.unfinished += 1
        row = self._rows.pop(drop.group)
        one = self._engines.arrays.group[row]
        if one[kernel.TAKEN]:
            return
        engine = int(one[kernel.ENGINE])
        tokens = self.perform(kernel.DROP, engine, now_s, row)
        if tokens < 0:
            self._advance(now_s, self.slots[engine])  # It may end at this moment.
            if one[kernel.TAKEN]:
                return
            tokens = self.perform(kernel.DROP, engine, now_s, row)
        self._groups -= 1
        self.accounting.dropped_tokens += tokens
        self._dropped(drop.group, tokens)
        self._loses_group(now_s, self.slots[engine])

    def take(self, groups: Sequence[ev.GroupId]) -> Batch:
        """The responses of groups that are trained on now."""
        a = self._engines.arrays
        rows = np.array([self._rows.pop(group) for group in groups])
        lengths = self.system.workload.prompt_tokens + self._engines.lengths(rows)
        base, counts = a.group[rows, kernel.BASE], self._engines.by_version(rows)
        oldest, versions = int(base.min()), np.arange(counts.shape[1])
        sums = np.zeros((int(base.max()) - oldest + len(versions), 3), np.int64)
        np.add.at(sums, (base[:, None] + versions - oldest).ravel(), counts.reshape(-1, 3))
        heads, tails, tokens = (
            {oldest + place: count for place, count in enumerate(column) if count}
            for column in sums.T.tolist()
        )
        several = int(a.group[rows, kernel.SEVERAL].sum())
        self._perform_for(kernel.FREE_GROUPS_OF, rows.tolist())
        return Batch(lengths, Tally(heads, tails, tokens, several))

    def _heads(self, rows: NDArray[np.int64]) -> list[Mapping[ev.Version, int]]:
        """First tokens of groups by version; groups with equal ones share them."""
        samples, group = self.system.workload.samples_per_prompt, self._engines.arrays.group
        first, last, base = group[rows][:, _HEADS].T.tolist()
        known = {head: {head: samples} for head in set(first)}
        heads: list[Mapping[ev.Version, int]] = [known[head] for head in first]
        for place, (one, other) in enumerate(zip(first, last, strict=True)):
            if one != other:
                counts = self._engines.by_version(rows[place : place + 1])[0, :, kernel.HEADS]
                found = enumerate(counts.tolist(), base[place])
                heads[place] = {version: count for version, count in found if count}
        return heads
