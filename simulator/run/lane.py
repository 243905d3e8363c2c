"""Ends of groups, and the starts that follow from them alone, compiled: what happens most often.

A run has some hundred ends of groups between two decisions of the coordinator. While it has nothing
to decide (`Coordinator.quiet`), an end leads at most to the start of the next group, under eq. 3 and
the number of slots, on the least loaded engine. `run_lane` performs these, with the timers of the
engines, as `EventLoop` does one by one, and notes what happened.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from simulator.engine.kernel import (
    _CLOCK_ROUNDING,
    DONE,
    FREE_GROUPS,
    FREE_ITEMS,
    GROUPS,
    RUNNING,
    Floats,
    Integers,
    advance,
    compiled,
    next_s,
    submit,
    take_done,
)

_NEVER: Final = math.inf
WAITS, ENDED, FULL, DRAWS = range(4)
"""Why a lane ends: another event is due; a group has ended, which the coordinator must know;
arrays are full; lengths are missing."""

# Places of `state`.
NOW, IN_FLIGHT_S, SINCE = range(3)
STATES: Final = 3
# Places of `count`.
TIMERS, ORDER, ENDS, STARTED, LIMIT, FLIGHTS, SLOTS, NEXT_GROUP, FIRST_DRAWN = range(9)
VERSION, LAST_START, STARTS, ENDINGS, CHANGES, ENGINE, TOKENS_OF_PROMPT = range(9, 16)
COUNTS: Final = 16
# Columns of `changed`: an engine got its first group or lost its last one, or nothing is left.
C_ENGINE, C_WORKS = range(2)
"""The engine is -1 when the last group of the run has started."""


class Lane(NamedTuple):
    """Timers of the engines, what a lane may do, and what it did."""

    state: Floats
    count: Integers
    timer_s: Floats
    """A heap of timers, with `timer`."""
    timer: Integers
    """[timers, 2]: the order in which they were set, and the engine."""
    wake_s: Floats
    """[engines]: as `Slot.wake_s`."""
    load: Integers
    """[engines]: groups of each, as the router counts; huge for engines that get none."""
    works: Integers
    """[engines]: groups that each generates."""
    drawn: Integers
    """[groups, samples]: lengths of the next groups, from `FIRST_DRAWN` on."""
    start: Integers
    """[starts, 2]: row and engine."""
    ending: Integers
    """[ends]: row."""
    changed_s: Floats
    changed: Integers
    """[changes, 2]"""


@compiled
def _earlier(lane: Any, one: Any, two: Any) -> Any:
    if lane.timer_s[one] != lane.timer_s[two]:
        return lane.timer_s[one] < lane.timer_s[two]
    return lane.timer[one, 0] < lane.timer[two, 0]


@compiled
def _swap(lane: Any, one: Any, two: Any) -> Any:
    at, order, engine = lane.timer_s[one], lane.timer[one, 0], lane.timer[one, 1]
    lane.timer_s[one], lane.timer[one, 0] = lane.timer_s[two], lane.timer[two, 0]
    lane.timer[one, 1] = lane.timer[two, 1]
    lane.timer_s[two], lane.timer[two, 0], lane.timer[two, 1] = at, order, engine


@compiled
def _push_timer(lane: Any, at: Any, e: Any) -> Any:
    place = lane.count[TIMERS]
    lane.count[TIMERS] += 1
    lane.timer_s[place] = at
    lane.timer[place, 0], lane.timer[place, 1] = lane.count[ORDER], e
    lane.count[ORDER] += 1
    while place and _earlier(lane, place, (place - 1) // 2):
        _swap(lane, place, (place - 1) // 2)
        place = (place - 1) // 2


@compiled
def _pop_timer(lane: Any) -> Any:
    """Remove the first timer; returns its engine."""
    e = lane.timer[0, 1]
    lane.count[TIMERS] -= 1
    last, place = lane.count[TIMERS], 0
    _swap(lane, 0, last)
    while True:
        first = place
        for below in (2 * place + 1, 2 * place + 2):
            if below < last and _earlier(lane, below, first):
                first = below
        if first == place:
            return e
        _swap(lane, place, first)
        place = first


@compiled
def _set_timer(a: Any, lane: Any, now_s: Any, e: Any) -> Any:
    """`EventLoop._set_timer`"""
    at = next_s(a, e)
    if at < lane.wake_s[e]:
        lane.wake_s[e] = at
        _push_timer(lane, now_s + (at - now_s if at > now_s else 0.0), e)


@compiled
def set_timers(a: Any, lane: Any, now_s: Any, engines: Any) -> Any:
    """Set the timers of these engines, in this order."""
    for place in range(len(engines)):
        _set_timer(a, lane, now_s, engines[place])


@compiled
def _changes(lane: Any, now_s: Any, e: Any, works: Any) -> Any:
    place = lane.count[CHANGES]
    lane.changed_s[place] = now_s
    lane.changed[place, C_ENGINE], lane.changed[place, C_WORKS] = e, works
    lane.count[CHANGES] += 1


@compiled
def _start(a: Any, lane: Any, now_s: Any) -> Any:
    """Start the next group on the least loaded engine; returns the engine."""
    count = lane.count
    e = 0
    for other in range(1, len(lane.load)):
        if lane.load[other] < lane.load[e]:
            e = other
    lane.load[e] += 1
    lane.works[e] += 1
    if lane.works[e] == 1:
        _changes(lane, now_s, e, 1)
    name = count[NEXT_GROUP]
    lengths = lane.drawn[name - count[FIRST_DRAWN]]
    g = submit(a, e, now_s, name, count[TOKENS_OF_PROMPT], lengths, count[VERSION])
    lane.start[count[STARTS], 0], lane.start[count[STARTS], 1] = g, e
    count[STARTS] += 1
    count[NEXT_GROUP] += 1
    count[STARTED] += 1
    count[FLIGHTS] += 1
    return e


@compiled
def start_groups(a: Any, lane: Any, now_s: Any, groups: Any) -> Any:
    """Start the next groups, as the coordinator decided; `start` has them."""
    for _ in range(groups):
        _start(a, lane, now_s)


@compiled
def _room(a: Any, lane: Any, e: Any) -> Any:
    """Why the next timer of an engine cannot be performed; `WAITS` if it can."""
    groups, count = a.number[e, GROUPS], lane.count
    if (
        a.size[FREE_GROUPS] < groups
        or a.size[FREE_ITEMS] < groups + a.size[RUNNING]
        or count[STARTS] + groups > len(lane.start)
        or count[ENDINGS] + groups > len(lane.ending)
        or count[CHANGES] + 3 * groups > len(lane.changed)
        or count[TIMERS] + groups + 1 > len(lane.timer)
    ):
        return FULL
    if count[NEXT_GROUP] + groups > count[FIRST_DRAWN] + len(lane.drawn):
        return DRAWS
    return WAITS


@compiled
def run_lane(a: Any, lane: Any, until_s: Any) -> Any:
    """Perform timers before `until_s`; returns why it ends.

    After `ENDED`, the groups of `ENGINE` that ended until `NOW` are still to be taken.
    """
    count, state = lane.count, lane.state
    while count[TIMERS] and lane.timer_s[0] < until_s:
        e = lane.timer[0, 1]
        why = _room(a, lane, e)
        if why != WAITS:
            return why
        now_s = lane.timer_s[0]
        _pop_timer(lane)
        if lane.wake_s[e] > now_s * (1 + _CLOCK_ROUNDING):
            continue  # an earlier timer has replaced it
        lane.wake_s[e] = _NEVER
        advance(a, e, now_s)
        while a.number[e, DONE] >= 0 and a.done_s[a.number[e, DONE]] <= now_s:
            if count[ENDS] <= 0 or count[FLIGHTS] == 1:
                state[NOW], count[ENGINE] = now_s, e
                return ENDED
            g = take_done(a, e, now_s)
            before = count[FLIGHTS]
            count[ENDS] -= 1
            count[FLIGHTS] -= 1
            lane.load[e] -= 1
            lane.works[e] -= 1
            if not lane.works[e]:
                _changes(lane, now_s, e, 0)
            lane.ending[count[ENDINGS]] = g
            count[ENDINGS] += 1
            if count[STARTED] < count[LIMIT] and count[FLIGHTS] < count[SLOTS]:
                other = _start(a, lane, now_s)
                if count[STARTED] == count[LAST_START]:
                    _changes(lane, now_s, -1, 0)
                _set_timer(a, lane, now_s, other)
            else:
                state[IN_FLIGHT_S] += before * (now_s - state[SINCE])
                state[SINCE] = now_s
        if lane.wake_s[e] == _NEVER:
            _set_timer(a, lane, now_s, e)
    return WAITS
