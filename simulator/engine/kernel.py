"""The engines of `simulator.engine.replica`, compiled: the same state machine on arrays, by numba.

    Replica         method by method, one engine       the rule, which tests compare with this
    kernel          function by function, all engines  arrays, one row for each engine

Every function here has the name of its twin in `Replica` or `DecodeBatch`, or says which it is, and
computes the same numbers in the same order, so that results are equal to the last bit. What only
some runs have is left out: spans, samples that are reported before their group ends, kept contexts,
responses whose lengths change.

    run_lane        timers of all engines, ends of groups and starts of the next ones, until the
                    coordinator has to decide (`Coordinator.quiet`) or another event is due

A group is a row of `group` from its submission until it is trained on. Its tokens are counted by
version, from the one with which it was submitted (`by_version`).

numba is the optional dependency `areal_lab[fast]`. It keeps the compiled functions beside this
file, so that only the first run on a machine waits for them.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from simulator.engine.replica import RETRACT_STEPS

compiled: Final = njit(cache=True)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_COMPENSATED: Final = sys.version_info >= (3, 12)
"""The built-in `sum` of floats adds what rounding lost since Python 3.12."""
_CLOCK_ROUNDING: Final = 1e-12  # `event_loop._CLOCK_ROUNDING`
_ROUNDING: Final = 1e-6  # `decode_batch._ROUNDING`
_STEP_ROUNDING: Final = 1e-6  # `decode._ROUNDING`
_NEVER: Final = math.inf
_NO_END: Final = 1 << 62
FREE: Final = -(1 << 62)  # `sequences.NO_START`
_NOTHING, _COHORT_ENDS, _ANY_ENDS, _FULL = range(4)
IDLE, DECODE, PREFILL, RECOMPUTE, PAUSED = range(5)  # `replica.ACTIVITIES`

# Columns of `seconds`, one row for each engine; the last five are those of the activities.
TIME, NOW, SINCE, JOINED_AT, AHEAD_AT, LAST_READ_S, ACTIVE = range(7)
SECONDS: Final = ACTIVE + 5
# Columns of `number`, one row for each engine.
STEP, SEQUENCES, ORIGINS, OWNED, PREFIXES, KNOWN = range(6)
IS_AHEAD, A_STEP, A_SEQUENCES, A_ORIGINS, A_OWNED, A_BEHIND, A_EVENT = range(6, 13)
FIRST_END, FIRST_LAST, LASTS, FREE_SLOTS, ENDED = range(13, 18)
STATE, EPOCH, SERIAL, DUE, READING, STOPS = range(18, 24)
JOINED, READ_TOKENS, READ_PAIRS, READ_AGAIN, LAST_TOKENS, LAST_PAIRS = range(24, 30)
ENDED_TOKENS, RECOMPUTED, PREEMPTIONS, GROUPS, COST = range(30, 35)
QUEUE, QUEUE_END, DONE, DONE_END = range(35, 39)
NUMBERS: Final = 39
# Columns of `slot`: a cohort in a slot of an engine's batch.
ROW, START, FIRST_STEP, ORIGIN, OWN, LAST, BEGAN, HAD = range(8)
SLOTS: Final = 8
# Columns of `group`.
NAME, PROMPT, LEFT, COHORTS, TOKENS, ENGINE, BASE, ORDER, NEXT, HEAD, TAIL, SEVERAL = range(12)
GROUP: Final = 12
# Columns of `item`: responses in a queue, `group.member[FROM:UNTIL]`.
I_ROW, FROM, UNTIL, HAS, I_NEXT = range(5)
ITEM: Final = 5
# Columns of `member`: a response of a group.
LENGTH, PLACE, FIRST_VERSION = range(3)
MEMBER: Final = 3
_QUEUED: Final = -1
_OVER: Final = -2
# Columns of `by_version`.
HEADS, TAILS, OF_VERSION = range(3)
# Columns of `cost`, one row for each speed of engines.
TOKEN_S, ENGINE_S, SEQUENCE_S, FLOOR_S, OVERLAP, BATCH_FLOOR_S, BATCH_RISE_S, RISING = range(8)
PAIR_S, CHUNK, MEASURED, PASS_S, READ_TOKEN_S, SLOWDOWN = range(8, 14)
COSTS: Final = 14
# Places of `size`.
RUNNING, CACHE, SHARING, RESERVE_RUNNING, RESERVE_NEW, BITS, FREE_GROUP, FREE_ITEM, FREE_GROUPS = (
    range(9)
)
FREE_ITEMS: Final = 9
SIZES: Final = 10


class Engines(NamedTuple):
    """All engines of a run."""

    seconds: Floats
    """[engines, SECONDS]"""
    number: Integers
    """[engines, NUMBERS]"""
    ends: Integers
    """[engines, 2 slots]: as `DecodeBatch.ends`, from the place `FIRST_END` on."""
    lasts: Integers
    """[engines, 2 slots]: the same of the last of each cohort, from `FIRST_LAST` on."""
    slot: Integers
    """[engines, slots, SLOTS]"""
    free: Integers
    """[engines, slots]: a stack of free slots."""
    ended: Integers
    """[engines, slots]: cohorts that ended just now."""
    epoch: Integers
    """[engines, epochs, 2]: version, and its first step."""
    cost: Floats
    """[speeds, COSTS]"""
    gpu_s: Floats
    """[speeds, slots + 1]: `DecodeCost.base_s` by number of sequences."""
    base_s: Floats
    """[speeds, slots + 1]: the same with the engine's CPU, if the GPU waits for it."""
    rise_s: Floats
    """[speeds, slots + 1]: difference to one sequence less."""
    pass_s: Floats
    """[speeds, chunk + 1]: `PrefillCost.pass_s`"""
    group: Integers
    """[rows, GROUP]"""
    done_s: Floats
    """[rows]: when its last response ended."""
    member: Integers
    """[rows, samples, MEMBER]"""
    by_version: Integers
    """[rows, versions, 3]: first tokens, last tokens and tokens, from the version `BASE` on."""
    item: Integers
    """[items, ITEM]"""
    size: Integers
    """[SIZES]"""


# --- costs: `DecodeCost`, `_BaseCosts`, `PrefillCost` ------------------------------------------


@compiled
def _total(values: Any, count: Any) -> Any:
    """`sum` of the first `count` values, as the Python that runs adds them."""
    total = 0.0
    if _COMPENSATED:
        lost = 0.0
        for place in range(count):
            value = values[place]
            higher = total + value
            if abs(total) >= abs(value):
                lost += (total - higher) + value
            else:
                lost += (value - higher) + total
            total = higher
        return total + lost
    for place in range(count):
        total += values[place]
    return total


@compiled
def _waiting_steps(missing_s: Any, growth_s: Any, steps: Any) -> Any:
    if missing_s <= 0:
        return 0
    if missing_s >= growth_s * steps:
        return steps
    return min(steps, int(math.ceil(missing_s / growth_s)))


@compiled
def _steps_s(a: Any, c: Any, sequences: Any, context: Any, steps: Any) -> Any:
    cost = a.cost[c]
    first_s = a.gpu_s[c, sequences] + cost[TOKEN_S] * context
    if cost[OVERLAP] == 0:
        first_s += cost[ENGINE_S] + cost[SEQUENCE_S] * sequences
    growth_s = cost[TOKEN_S] * sequences
    least_s = cost[FLOOR_S] + cost[SEQUENCE_S] * sequences
    waiting = _waiting_steps(least_s - first_s, growth_s, steps) if first_s < least_s else 0
    reading = steps * (steps - 1) // 2 - waiting * (waiting - 1) // 2
    return waiting * least_s + (steps - waiting) * first_s + growth_s * reading


@compiled
def _steps_within(a: Any, c: Any, sequences: Any, context: Any, seconds: Any) -> Any:
    if seconds <= 0:
        return 0
    cost = a.cost[c]
    first_s = a.gpu_s[c, sequences] + cost[TOKEN_S] * context
    if cost[OVERLAP] == 0:
        first_s += cost[ENGINE_S] + cost[SEQUENCE_S] * sequences
    growth_s = cost[TOKEN_S] * sequences
    least_s = cost[FLOOR_S] + cost[SEQUENCE_S] * sequences
    most = int(seconds / least_s) + 1 if least_s != 0 else 0
    waiting = _waiting_steps(least_s - first_s, growth_s, most)
    left_s = seconds - waiting * least_s
    if left_s <= 0:
        first_s, growth_s, waiting, left_s = least_s, 0.0, 0, seconds
    else:
        first_s += growth_s * waiting
    half_s = first_s - growth_s / 2
    root = math.sqrt(half_s * half_s + 2 * growth_s * left_s)
    guess = 2 * left_s / (half_s + root) if half_s > 0 else (root - half_s) / growth_s
    done = waiting + int(guess)
    while _steps_s(a, c, sequences, context, done + 1) <= seconds + _STEP_ROUNDING * first_s:
        done += 1
    return done


@compiled
def _prefill_s(a: Any, c: Any, tokens: Any, pairs: Any) -> Any:
    if tokens <= 0:
        return 0.0
    cost = a.cost[c]
    if cost[MEASURED] != 0:
        read_s = cost[PASS_S] + cost[READ_TOKEN_S] * tokens + cost[PAIR_S] * pairs
        return cost[SLOWDOWN] * read_s
    chunk = int(cost[CHUNK])
    chunks, rest = tokens // chunk, tokens % chunk
    linear_s = a.pass_s[c, rest] if rest else 0.0
    if chunks:
        linear_s += chunks * a.pass_s[c, chunk]
    return linear_s + cost[PAIR_S] * pairs


@compiled
def _pairs(tokens: Any, cached: Any) -> Any:
    """`causal_pairs`"""
    return tokens * cached + tokens * (tokens + 1) // 2


# --- sorted rows: `ends` and `lasts` -----------------------------------------------------------


@compiled
def _place(row: Any, first: Any, count: Any, code: Any, after: Any) -> Any:
    """`bisect_left`, or `bisect_right` if `after`, among `row[first:first + count]`."""
    low, high = first, first + count
    while low < high:
        middle = (low + high) // 2
        if row[middle] < code or (after and row[middle] == code):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(row: Any, first: Any, count: Any, code: Any) -> Any:
    """`insort`; returns the new first place, as rows move to the left when they reach the end."""
    if first + count == len(row):
        for place in range(count):
            row[place] = row[first + place]
        first = 0
    place = first + count
    while place > first and row[place - 1] > code:
        row[place] = row[place - 1]
        place -= 1
    row[place] = code
    return first


@compiled
def _remove(row: Any, first: Any, count: Any, code: Any) -> Any:
    """Remove `code`; returns the new first place."""
    place = _place(row, first, count, code, False)
    while place > first:
        row[place] = row[place - 1]
        place -= 1
    return first + 1


# --- the batch: `DecodeBatch` ------------------------------------------------------------------


@compiled
def _cached_tokens(a: Any, e: Any) -> Any:
    n = a.number[e]
    return n[SEQUENCES] * n[STEP] - n[OWNED] + n[PREFIXES]


@compiled
def _nothing_known(a: Any, e: Any) -> Any:
    n = a.number[e]
    if n[IS_AHEAD]:
        return False
    return not (n[SEQUENCES] and a.ends[e, n[FIRST_END]] >> a.size[BITS] == n[STEP])


@compiled
def _join(a: Any, e: Any, g: Any, first: Any, until: Any, had: Any) -> Any:
    n, bits = a.number[e], a.size[BITS]
    n[FREE_SLOTS] -= 1
    s = a.free[e, n[FREE_SLOTS]]
    slot, group = a.slot[e, s], a.group[g]
    start = n[STEP] - had
    slot[ROW], slot[BEGAN], slot[HAD] = g, n[EPOCH], had
    slot[START] = slot[FIRST_STEP] = start
    slot[ORIGIN] = origin = start - group[PROMPT]
    slot[OWN] = own = start if a.size[SHARING] else origin
    if a.size[SHARING] and not group[COHORTS]:
        n[PREFIXES] += group[PROMPT]
    group[COHORTS] += 1
    last = 0
    for m in range(first, until):
        a.member[g, m, PLACE] = s
        code = ((start + a.member[g, m, LENGTH]) << bits) | s
        last = max(last, code)
        n[FIRST_END] = _insert(a.ends[e], n[FIRST_END], n[SEQUENCES], code)
        n[SEQUENCES] += 1
    slot[LAST] = last
    n[FIRST_LAST] = _insert(a.lasts[e], n[FIRST_LAST], n[LASTS], last)
    n[LASTS] += 1
    n[ORIGINS] += (until - first) * origin
    n[OWNED] += (until - first) * own
    n[IS_AHEAD] = 0


@compiled
def _subtract(a: Any, e: Any, code: Any) -> Any:
    n = a.number[e]
    slot = a.slot[e, code & ((1 << a.size[BITS]) - 1)]
    n[IS_AHEAD] = 0
    n[ORIGINS] -= slot[ORIGIN]
    n[OWNED] -= slot[OWN]


@compiled
def _close(a: Any, e: Any, s: Any) -> Any:
    n, slot = a.number[e], a.slot[e, s]
    group = a.group[slot[ROW]]
    n[FIRST_LAST] = _remove(a.lasts[e], n[FIRST_LAST], n[LASTS], slot[LAST])
    n[LASTS] -= 1
    slot[START] = FREE
    a.free[e, n[FREE_SLOTS]] = s
    n[FREE_SLOTS] += 1
    group[COHORTS] -= 1
    if a.size[SHARING] and not group[COHORTS]:
        n[PREFIXES] -= group[PROMPT]


@compiled
def _end_cohort(a: Any, e: Any, s: Any) -> Any:
    """Close a cohort, and remember it for `_finish_ended`."""
    _close(a, e, s)
    a.ended[e, a.number[e, ENDED]] = s
    a.number[e, ENDED] += 1


@compiled
def _ended_cohorts(a: Any, e: Any, first: Any, count: Any) -> Any:
    """Close the cohorts whose last entries are among those at `first`."""
    mask = (1 << a.size[BITS]) - 1
    for place in range(first, first + count):
        code = a.ends[e, place]
        s = code & mask
        # Two members that end together have the same entry.
        if a.slot[e, s, START] != FREE and code == a.slot[e, s, LAST]:
            _end_cohort(a, e, s)


@compiled
def _know(a: Any, e: Any, sequences: Any) -> Any:
    a.number[e, KNOWN] = max(a.number[e, KNOWN], sequences)


@compiled
def _look_ahead(
    a: Any,
    e: Any,
    at: Any,
    step: Any,
    sequences: Any,
    origins: Any,
    owned: Any,
    behind: Any,
    event: Any,
) -> Any:
    n = a.number[e]
    a.seconds[e, AHEAD_AT] = at
    n[A_STEP], n[A_SEQUENCES], n[A_ORIGINS], n[A_OWNED] = step, sequences, origins, owned
    n[A_BEHIND], n[A_EVENT] = behind, event


@compiled
def _next_change_s(a: Any, e: Any, any_end: Any) -> Any:
    n = a.number[e]
    if not n[IS_AHEAD]:
        if not n[SEQUENCES]:
            return _NEVER
        if any_end:
            _first_end(a, e)
        elif not _stride(a, e):
            _walk(a, e, _NEVER)
        n[IS_AHEAD] = 1
    return a.seconds[e, AHEAD_AT]


@compiled
def _arrive(a: Any, e: Any) -> Any:
    n = a.number[e]
    a.seconds[e, TIME] = a.seconds[e, AHEAD_AT]
    n[STEP], n[SEQUENCES] = n[A_STEP], n[A_SEQUENCES]
    n[ORIGINS], n[OWNED] = n[A_ORIGINS], n[A_OWNED]
    n[FIRST_END] += n[A_BEHIND]
    n[IS_AHEAD] = 0


@compiled
def _go_to_change(a: Any, e: Any) -> Any:
    """Move to the next change; returns whether the cache is full."""
    n = a.number[e]
    _arrive(a, e)
    event, behind = n[A_EVENT], n[A_BEHIND]
    if event == _FULL:
        return True
    first = n[FIRST_END] - behind
    if event == _ANY_ENDS and behind > 1:
        _ended_cohorts(a, e, first, behind)
        return False
    code = a.ends[e, first + behind - 1]
    s = code & ((1 << a.size[BITS]) - 1)
    if code == a.slot[e, s, LAST]:
        _end_cohort(a, e, s)
    return False


@compiled
def _settle(a: Any, e: Any, now_s: Any) -> Any:
    if now_s > a.seconds[e, TIME] and a.number[e, SEQUENCES]:
        _walk(a, e, now_s)
        _arrive(a, e)


@compiled
def _batch_end_step(a: Any, e: Any, now_s: Any) -> Any:
    """`DecodeBatch.end_step`"""
    n, seconds = a.number[e], a.seconds[e]
    _settle(a, e, now_s)
    left_s = now_s - seconds[TIME]
    if left_s <= 0 or not n[SEQUENCES]:
        return
    c, sequences = n[COST], n[SEQUENCES]
    context = sequences * n[STEP] - n[ORIGINS]
    steps = _steps_within(a, c, sequences, context, left_s)
    taken_s = _steps_s(a, c, sequences, context, steps)
    step_s = _steps_s(a, c, sequences, context + steps * sequences, 1)
    if left_s - taken_s > _ROUNDING * step_s:
        steps, taken_s = steps + 1, taken_s + step_s
    n[STEP] += steps
    seconds[TIME] = max(now_s, seconds[TIME] + taken_s)
    first = n[FIRST_END]
    count = _place(a.ends[e], first, sequences, (n[STEP] + 1) << a.size[BITS], False) - first
    for place in range(first, first + count):
        _subtract(a, e, a.ends[e, place])
    n[IS_AHEAD] = 0
    n[FIRST_END] += count
    n[SEQUENCES] -= count
    _ended_cohorts(a, e, first, count)


@compiled
def _stride(a: Any, e: Any) -> Any:
    n, ends, bits = a.number[e], a.ends[e], a.size[BITS]
    now, sequences, c = n[STEP], n[SEQUENCES], n[COST]
    mask = (1 << bits) - 1
    code = a.lasts[e, n[FIRST_LAST]]
    end = code >> bits
    if sequences * end - n[OWNED] > a.size[CACHE] - n[PREFIXES]:
        return False
    cost, base_s, rise_s = a.cost[c], a.base_s[c], a.rise_s[c]
    token_s, steps = cost[TOKEN_S], end - now
    _know(a, e, sequences)
    first = n[FIRST_END]
    behind = _place(ends, first, sequences, code, True) - first
    left = sequences - behind
    if n[KNOWN] > cost[RISING]:
        return False
    over_origins = over_own = 0
    for place in range(first, first + behind):
        slot = a.slot[e, ends[place] & mask]
        over_origins += slot[ORIGIN]
        over_own += slot[OWN]
    lasting = n[ORIGINS] - over_origins
    lasting_tokens = left * now - lasting
    floor_s, floor_rise_s = cost[BATCH_FLOOR_S], cost[BATCH_RISE_S]
    least_s = floor_s + floor_rise_s * (left + 1)
    if base_s[sequences] + token_s * (sequences * end - n[ORIGINS]) <= least_s:
        spent_s = steps * least_s
        if floor_rise_s:
            to_go = 0
            for place in range(first, first + behind - 1):
                to_go += (ends[place] >> bits) - now
            spent_s += floor_rise_s * to_go
    elif base_s[left + 1] + token_s * lasting_tokens >= floor_s + floor_rise_s * sequences:
        twice, read = 2 * now - 1, 0
        for place in range(first, first + behind):
            x = (ends[place] >> bits) - now
            o = a.slot[e, ends[place] & mask, ORIGIN]
            read += x * (x + twice - o - o)
        read = (read + left * steps * (steps - 1)) // 2 + steps * lasting_tokens
        spent_s = token_s * read + steps * base_s[left + 1]
        added_s = np.empty(behind)
        for place in range(behind - 1):
            added_s[place] = ((ends[first + place] >> bits) - now) * rise_s[sequences - place]
        spent_s += _total(added_s, behind - 1)
    else:
        return False
    at = a.seconds[e, TIME] + spent_s
    _look_ahead(a, e, at, end, left, lasting, n[OWNED] - over_own, behind, _COHORT_ENDS)
    return True


@compiled
def _spent_s(a: Any, c: Any, sequences: Any, origins: Any, step: Any, end: Any) -> Any:
    cost = a.cost[c]
    step_s, floor_s = a.base_s[c, sequences], cost[BATCH_FLOOR_S]
    if cost[BATCH_RISE_S]:
        floor_s += cost[BATCH_RISE_S] * sequences
    if step_s + cost[TOKEN_S] * (sequences * end - origins) <= floor_s:
        return (end - step) * floor_s
    if step_s < floor_s:
        return _steps_s(a, c, sequences, sequences * step - origins, end - step)
    twice = sequences * (step + end - 1) - origins - origins
    return (end - step) * (step_s + cost[TOKEN_S] / 2 * twice)


@compiled
def _first_end(a: Any, e: Any) -> Any:
    n, ends, bits = a.number[e], a.ends[e], a.size[BITS]
    step, sequences, c = n[STEP], n[SEQUENCES], n[COST]
    origins, owned, at = n[ORIGINS], n[OWNED], a.seconds[e, TIME]
    first, mask = n[FIRST_END], (1 << bits) - 1
    code = ends[first]
    end = code >> bits
    if end != step:
        _know(a, e, sequences)
        room = a.size[CACHE] - n[PREFIXES]
        if sequences * end - owned > room:
            end = (room + owned) // sequences
            at += _spent_s(a, c, sequences, origins, step, end)
            _look_ahead(a, e, at, end, sequences, origins, owned, 0, _FULL)
            return
        at += _spent_s(a, c, sequences, origins, step, end)
    following = (end + 1) << bits
    slot = a.slot[e, code & mask]
    origins -= slot[ORIGIN]
    owned -= slot[OWN]
    behind = 1
    while behind < sequences and ends[first + behind] < following:
        slot = a.slot[e, ends[first + behind] & mask]
        origins -= slot[ORIGIN]
        owned -= slot[OWN]
        behind += 1
    _look_ahead(a, e, at, end, sequences - behind, origins, owned, behind, _ANY_ENDS)


@compiled
def _walk(a: Any, e: Any, until_s: Any) -> Any:
    n, ends, bits = a.number[e], a.ends[e], a.size[BITS]
    c, mask = n[COST], (1 << bits) - 1
    _know(a, e, n[SEQUENCES])
    room, first, count = a.size[CACHE] - n[PREFIXES], n[FIRST_END], n[SEQUENCES]
    at, step, sequences = a.seconds[e, TIME], n[STEP], n[SEQUENCES]
    origins, owned, behind = n[ORIGINS], n[OWNED], 0
    for place in range(first, first + count):
        code = ends[place]
        end = code >> bits
        if end != step:
            full = sequences * end - owned > room
            if full:
                end = (room + owned) // sequences
            spent_s = _spent_s(a, c, sequences, origins, step, end)
            if at + spent_s > until_s:
                _look_ahead(a, e, at, step, sequences, origins, owned, behind, _NOTHING)
                return
            at += spent_s
            step = end
            if full:
                _look_ahead(a, e, at, step, sequences, origins, owned, behind, _FULL)
                return
        slot = a.slot[e, code & mask]
        alone = place + 1 == first + count or ends[place + 1] != code
        cohort_ends = code == slot[LAST] and alone
        if cohort_ends and until_s < _NEVER:
            _look_ahead(a, e, at, step, sequences, origins, owned, behind, _NOTHING)
            return
        behind += 1
        sequences -= 1
        origins -= slot[ORIGIN]
        owned -= slot[OWN]
        if cohort_ends:
            _look_ahead(a, e, at, step, sequences, origins, owned, behind, _COHORT_ENDS)
            return
    _look_ahead(a, e, at, step, sequences, origins, owned, behind, _ANY_ENDS)


# --- tokens by version: `sequences.decoded` ----------------------------------------------------


@compiled
def _count_tokens(a: Any, e: Any, g: Any, m: Any, s: Any, start: Any, had: Any, until: Any) -> Any:
    """Count the tokens from `had` to `until` of a response; returns the version of the last."""
    group, member = a.group[g], a.member[g, m]
    done, k, newest = had, a.slot[e, s, BEGAN], a.number[e, EPOCH]
    version = a.epoch[e, k, 0]
    while done < until:
        end = a.epoch[e, k + 1, 1] - start if k < newest else _NO_END
        if end > done:
            version = a.epoch[e, k, 0]
            reached = min(end, until)
            a.by_version[g, version - group[BASE], OF_VERSION] += reached - done
            if member[FIRST_VERSION] < 0:
                member[FIRST_VERSION] = version
            done = reached
        k += 1
    return version


@compiled
def _finish(a: Any, e: Any, s: Any) -> Any:
    """A cohort has ended, and with the last one of a group the group."""
    n, slot = a.number[e], a.slot[e, s]
    g = slot[ROW]
    start, had = slot[FIRST_STEP], slot[HAD]
    group = a.group[g]
    for m in range(a.member.shape[1]):
        member = a.member[g, m]
        if member[PLACE] != s:
            continue
        member[PLACE] = _OVER
        last = _count_tokens(a, e, g, m, s, start, had, member[LENGTH])
        head = member[FIRST_VERSION]
        a.by_version[g, head - group[BASE], HEADS] += 1
        a.by_version[g, last - group[BASE], TAILS] += 1
        group[SEVERAL] += head != last
        group[HEAD] = min(group[HEAD], head)
        group[TAIL] = max(group[TAIL], last)
        group[LEFT] -= 1
    if group[LEFT]:
        return
    n[GROUPS] -= 1
    n[ENDED_TOKENS] += group[TOKENS]
    a.done_s[g] = a.seconds[e, TIME]
    group[NEXT] = -1
    if n[DONE] < 0:
        n[DONE] = g
    else:
        a.group[n[DONE_END], NEXT] = g
    n[DONE_END] = g


@compiled
def _finish_ended(a: Any, e: Any) -> Any:
    for place in range(a.number[e, ENDED]):
        _finish(a, e, a.ended[e, place])
    a.number[e, ENDED] = 0


# --- the engine: `Replica` ---------------------------------------------------------------------


@compiled
def _set_state(a: Any, e: Any, at: Any, state: Any) -> Any:
    """`Clock.set`"""
    n, seconds = a.number[e], a.seconds[e]
    if state == n[STATE]:
        return
    if at > seconds[SINCE]:
        seconds[ACTIVE + n[STATE]] += at - seconds[SINCE]
    n[STATE] = state
    seconds[SINCE] = at


@compiled
def _clock(a: Any, e: Any, now_s: Any) -> Any:
    seconds = a.seconds[e]
    seconds[NOW] = max(seconds[NOW], now_s)
    return seconds[NOW]


@compiled
def _queue_item(a: Any, e: Any, g: Any, first: Any, until: Any, has: Any) -> Any:
    """Append to the queue."""
    n, size = a.number[e], a.size
    place = size[FREE_ITEM]
    item = a.item[place]
    size[FREE_ITEM] = item[I_NEXT]
    size[FREE_ITEMS] -= 1
    item[I_ROW], item[FROM], item[UNTIL], item[HAS], item[I_NEXT] = g, first, until, has, -1
    if n[QUEUE] < 0:
        n[QUEUE] = place
    else:
        a.item[n[QUEUE_END], I_NEXT] = place
    n[QUEUE_END] = place


@compiled
def _free_item(a: Any, place: Any) -> Any:
    a.item[place, I_NEXT] = a.size[FREE_ITEM]
    a.size[FREE_ITEM] = place
    a.size[FREE_ITEMS] += 1


@compiled
def _run(a: Any, e: Any, now_s: Any, more_to_come: Any) -> Any:
    n, seconds = a.number[e], a.seconds[e]
    while seconds[TIME] <= now_s and not n[STOPS]:
        if n[READING]:
            n[READING] = 0
            _set_state(a, e, seconds[TIME], DECODE if n[SEQUENCES] else IDLE)
            if n[QUEUE] >= 0:
                n[DUE] = 1
                seconds[JOINED_AT] = -_NEVER
        if n[DUE]:
            at = seconds[TIME]
            if more_to_come and at == now_s and now_s != seconds[JOINED_AT]:
                return
            _admit(a, e)
        elif seconds[TIME] == now_s and _nothing_known(a, e):
            return
        elif _next_change_s(a, e, n[QUEUE] >= 0) > now_s:
            return
        else:
            full = _go_to_change(a, e)
            _finish_ended(a, e)
            if full:
                _retract(a, e)
            elif n[QUEUE] >= 0:
                n[DUE] = 1
            elif not n[SEQUENCES]:
                _after_change(a, e)


@compiled
def _end_step(a: Any, e: Any, now_s: Any) -> Any:
    if a.number[e, SEQUENCES]:
        _batch_end_step(a, e, now_s)
        _finish_ended(a, e)
        _after_change(a, e)
    elif a.seconds[e, TIME] < now_s:
        a.seconds[e, TIME] = now_s


@compiled
def _after_change(a: Any, e: Any) -> Any:
    n = a.number[e]
    if n[QUEUE] >= 0:
        n[DUE] = 1
    elif not n[SEQUENCES] and not n[READING]:
        _set_state(a, e, a.seconds[e, TIME], IDLE)


@compiled
def _admit(a: Any, e: Any) -> Any:
    n, seconds, size = a.number[e], a.seconds[e], a.size
    at, sequences, reserve = seconds[TIME], n[SEQUENCES], size[RESERVE_NEW]
    joined = n[JOINED] if at == seconds[JOINED_AT] else 0
    free = size[CACHE] - _cached_tokens(a, e)
    free -= size[RESERVE_RUNNING] * (sequences - joined) + reserve * joined
    n[DUE] = 0
    while n[QUEUE] >= 0 and sequences < size[RUNNING]:
        place = n[QUEUE]
        item = a.item[place]
        g, had = item[I_ROW], item[HAS]
        group = a.group[g]
        once, each, cached = group[PROMPT], had, group[PROMPT]
        if not size[SHARING]:
            once, each, cached = 0, once + had, 0
        elif group[COHORTS]:
            once = 0
        count = (free - once) // (each + reserve)
        if count < 1:
            if sequences:
                break
            count = 1
        first = item[FROM]
        until = min(item[UNTIL], first + min(count, size[RUNNING] - sequences))
        count = until - first
        item[FROM] = until
        if until == item[UNTIL]:
            n[QUEUE] = item[I_NEXT]
            _free_item(a, place)
        if not joined:
            seconds[JOINED_AT] = at
            n[READ_TOKENS] = n[READ_PAIRS] = n[READ_AGAIN] = 0
        _join(a, e, g, first, until, had)
        free -= once + count * (each + reserve)
        sequences += count
        joined += count
        if once or each:
            pairs = count * _pairs(each, cached) if each else 0
            tokens = once + count * each
            n[READ_TOKENS] += tokens
            n[READ_PAIRS] += _pairs(once, 0) + pairs
            if had:
                n[READ_AGAIN] += tokens
                n[RECOMPUTED] += tokens
    if joined:
        _begin_reading(a, e, at, joined)


@compiled
def _begin_reading(a: Any, e: Any, at: Any, joined: Any) -> Any:
    n, seconds = a.number[e], a.seconds[e]
    n[JOINED] = joined
    if n[READ_TOKENS]:
        again = n[READ_AGAIN] == n[READ_TOKENS]
        _set_state(a, e, at, RECOMPUTE if again else PREFILL)
        if n[READ_TOKENS] != n[LAST_TOKENS] or n[READ_PAIRS] != n[LAST_PAIRS]:
            n[LAST_TOKENS], n[LAST_PAIRS] = n[READ_TOKENS], n[READ_PAIRS]
            seconds[LAST_READ_S] = _prefill_s(a, n[COST], n[READ_TOKENS], n[READ_PAIRS])
        seconds[TIME] = at + seconds[LAST_READ_S]
        n[READING] = 1
    elif n[STATE] != DECODE:
        _set_state(a, e, at, DECODE)


@compiled
def _latest(a: Any, g: Any, s: Any, done: Any) -> Any:
    """The last running response of a cohort, or -1."""
    for m in range(a.member.shape[1] - 1, -1, -1):
        if a.member[g, m, PLACE] == s and a.member[g, m, LENGTH] > done:
            return m
    return -1


@compiled
def _retract(a: Any, e: Any) -> Any:
    """`Replica._retract` and `DecodeBatch.retract`"""
    n, bits = a.number[e], a.size[BITS]
    while True:
        s = -1
        for other in range(a.size[RUNNING]):
            start = a.slot[e, other, START]
            if s < 0 or start > a.slot[e, s, START]:
                s = other
            elif start == a.slot[e, s, START] and start != FREE:
                g, h = a.slot[e, s, ROW], a.slot[e, other, ROW]
                done = n[STEP] - start
                one = (a.group[g, PROMPT], a.group[g, ORDER], _latest(a, g, s, done))
                two = (a.group[h, PROMPT], a.group[h, ORDER], _latest(a, h, other, done))
                if two > one:
                    s = other
        slot = a.slot[e, s]
        g, start, had = slot[ROW], slot[START], slot[HAD]
        done = n[STEP] - start
        m = _latest(a, g, s, done)
        a.member[g, m, PLACE] = _QUEUED
        code = ((start + a.member[g, m, LENGTH]) << bits) | s
        n[FIRST_END] = _remove(a.ends[e], n[FIRST_END], n[SEQUENCES], code)
        n[SEQUENCES] -= 1
        _subtract(a, e, code)
        _count_tokens(a, e, g, m, s, start, had, done)
        closed = _latest(a, g, s, done) < 0
        if closed:
            _end_cohort(a, e, s)
        else:
            longest = 0
            for other in range(a.member.shape[1]):
                if a.member[g, other, PLACE] == s:
                    longest = max(longest, a.member[g, other, LENGTH])
            n[FIRST_LAST] = _remove(a.lasts[e], n[FIRST_LAST], n[LASTS], slot[LAST])
            slot[LAST] = ((start + longest) << bits) | s
            n[FIRST_LAST] = _insert(a.lasts[e], n[FIRST_LAST], n[LASTS] - 1, slot[LAST])
        _queue_item(a, e, g, m, m + 1, done)
        n[PREEMPTIONS] += 1
        _finish_ended(a, e)  # others of its cohort, which had all ended
        free = a.size[CACHE] - _cached_tokens(a, e)
        if n[SEQUENCES] == 1 or free >= RETRACT_STEPS * n[SEQUENCES]:
            return


@compiled
def next_s(a: Any, e: Any) -> Any:
    """`Replica.next_s`"""
    n, seconds = a.number[e], a.seconds[e]
    if (n[DUE] or n[READING]) and seconds[TIME] <= seconds[NOW]:
        _run(a, e, seconds[NOW], False)
    if n[DONE] >= 0:
        return max(a.done_s[n[DONE]], seconds[NOW])
    if n[STOPS]:
        return _NEVER
    if n[DUE]:
        return seconds[TIME]
    if n[QUEUE] < 0:
        return _next_change_s(a, e, False)
    if n[READING] and n[SEQUENCES] < a.size[RUNNING]:
        return seconds[TIME]
    return _next_change_s(a, e, True)


@compiled
def advance(a: Any, e: Any, now_s: Any) -> Any:
    """`Replica.advance`; groups that ended are taken by `take_done`."""
    now_s = _clock(a, e, now_s)
    _run(a, e, now_s, False)


@compiled
def take_done(a: Any, e: Any, now_s: Any) -> Any:
    """Row of a group that ended until `now_s`, once, in the order of their ends; -1 for none."""
    n = a.number[e]
    g = n[DONE]
    if g < 0 or a.done_s[g] > a.seconds[e, NOW]:
        return -1
    n[DONE] = a.group[g, NEXT]
    return g


@compiled
def submit(a: Any, e: Any, now_s: Any, name: Any, prompt: Any, lengths: Any, version: Any) -> Any:
    """`Replica.submit`; returns the row of the group."""
    now_s = _clock(a, e, now_s)
    n, seconds = a.number[e], a.seconds[e]
    if seconds[TIME] < now_s or not _nothing_known(a, e):
        _run(a, e, now_s, True)
    if version > a.epoch[e, n[EPOCH], 0]:
        _change_epoch(a, e, version)
    g = a.size[FREE_GROUP]
    group = a.group[g]
    a.size[FREE_GROUP] = group[NEXT]
    a.size[FREE_GROUPS] -= 1
    base = a.epoch[e, n[EPOCH], 0]
    group[NAME], group[PROMPT], group[COHORTS], group[ENGINE] = name, prompt, 0, e
    group[LEFT], group[BASE], group[ORDER], group[NEXT] = len(lengths), base, n[SERIAL], -1
    group[HEAD], group[TAIL], group[SEVERAL], group[TOKENS] = _NO_END, -1, 0, 0
    a.by_version[g] = 0
    for m in range(len(lengths)):
        a.member[g, m, LENGTH], a.member[g, m, PLACE] = lengths[m], _QUEUED
        a.member[g, m, FIRST_VERSION] = -1
        group[TOKENS] += lengths[m]
    n[SERIAL] += 1
    n[GROUPS] += 1
    if n[QUEUE] < 0 and not n[STOPS]:
        if seconds[JOINED_AT] == now_s:
            seconds[TIME] = now_s
            n[READING] = 0
            n[DUE] = 1
        else:
            _settle(a, e, now_s)
            if n[SEQUENCES] < a.size[RUNNING]:
                if seconds[TIME] < now_s:
                    _end_step(a, e, now_s)
                n[DUE] = 1
        n[IS_AHEAD] = 0
    _queue_item(a, e, g, 0, len(lengths), 0)
    return g


@compiled
def _change_epoch(a: Any, e: Any, version: Any) -> Any:
    a.number[e, EPOCH] += 1
    a.epoch[e, a.number[e, EPOCH], 0] = version
    a.epoch[e, a.number[e, EPOCH], 1] = a.number[e, STEP]


@compiled
def pause(a: Any, e: Any, now_s: Any) -> Any:
    """`Replica.pause`"""
    now_s = _clock(a, e, now_s)
    _run(a, e, now_s, True)
    n, seconds = a.number[e], a.seconds[e]
    if n[STOPS]:
        return
    if n[READING]:
        stops_s = max(now_s, seconds[SINCE])
        seconds[TIME] = stops_s
        n[READING] = 0
    else:
        _end_step(a, e, now_s)
    n[STOPS] = 1
    _set_state(a, e, seconds[TIME], PAUSED)


@compiled
def _contexts(a: Any, e: Any) -> Any:
    """Pairs of attention of all running sequences."""
    n, mask = a.number[e], (1 << a.size[BITS]) - 1
    pairs = 0
    for place in range(n[FIRST_END], n[FIRST_END] + n[SEQUENCES]):
        slot = a.slot[e, a.ends[e, place] & mask]
        done, prompt = n[STEP] - slot[START], a.group[slot[ROW], PROMPT]
        pairs += _pairs(done, prompt) if a.size[SHARING] else _pairs(prompt + done, 0)
    if a.size[SHARING]:
        for place in range(n[FIRST_LAST], n[FIRST_LAST] + n[LASTS]):
            g = a.slot[e, a.lasts[e, place] & mask, ROW]
            first = True  # of the cohorts of its group
            for before in range(n[FIRST_LAST], place):
                first = first and a.slot[e, a.lasts[e, before] & mask, ROW] != g
            if first:
                pairs += _pairs(a.group[g, PROMPT], 0)
    return pairs


@compiled
def resume(a: Any, e: Any, now_s: Any, version: Any) -> Any:
    """`Replica.resume`"""
    now_s = _clock(a, e, now_s)
    n, seconds = a.number[e], a.seconds[e]
    if version != a.epoch[e, n[EPOCH], 0]:
        _change_epoch(a, e, version)
    activity, left_s, reads = DECODE if n[SEQUENCES] else IDLE, 0.0, 0
    if n[SEQUENCES]:
        tokens = _cached_tokens(a, e)
        n[RECOMPUTED] += tokens
        activity, reads = RECOMPUTE, 1
        left_s = _prefill_s(a, n[COST], tokens, _contexts(a, e))
    seconds[TIME] = max(now_s, seconds[TIME])
    _set_state(a, e, seconds[TIME], activity)
    seconds[TIME] += left_s
    n[READING], n[STOPS] = reads, 0
    n[DUE] = n[QUEUE] >= 0
    seconds[JOINED_AT] = -_NEVER
    n[IS_AHEAD] = 0


@compiled
def _tokens_so_far(a: Any, e: Any, g: Any) -> Any:
    """Tokens of an unfinished group: of ended, running and preempted responses."""
    n, tokens = a.number[e], 0
    for m in range(a.member.shape[1]):
        place, length = a.member[g, m, PLACE], a.member[g, m, LENGTH]
        if place == _OVER:
            tokens += length
        elif place >= 0:
            tokens += min(length, n[STEP] - a.slot[e, place, START])
    item = n[QUEUE]
    while item >= 0:
        if a.item[item, I_ROW] == g:
            tokens += a.item[item, HAS]
        item = a.item[item, I_NEXT]
    return tokens


@compiled
def free_group(a: Any, g: Any) -> Any:
    """Forget a group."""
    a.group[g, LEFT], a.group[g, NEXT] = 0, a.size[FREE_GROUP]
    a.size[FREE_GROUP] = g
    a.size[FREE_GROUPS] += 1


@compiled
def free_groups(a: Any, rows: Any) -> Any:
    """Forget several."""
    for g in rows:
        free_group(a, g)


@compiled
def drop(a: Any, e: Any, now_s: Any, g: Any) -> Any:
    """`Replica.drop`; returns the tokens of the group, whose row is then free."""
    now_s = _clock(a, e, now_s)
    _run(a, e, now_s, True)
    n, mask = a.number[e], (1 << a.size[BITS]) - 1
    if a.group[g, LEFT] and not n[STOPS]:
        _end_step(a, e, now_s)
    if not a.group[g, LEFT]:  # it ends with the running step
        before, other = -1, n[DONE]
        while other != g:
            before, other = other, a.group[other, NEXT]
        if before < 0:
            n[DONE] = a.group[g, NEXT]
        else:
            a.group[before, NEXT] = a.group[g, NEXT]
        if n[DONE_END] == g:
            n[DONE_END] = before
        free_group(a, g)
        return a.group[g, TOKENS]
    tokens = _tokens_so_far(a, e, g)
    n[GROUPS] -= 1
    before, item = -1, n[QUEUE]
    while item >= 0:
        following = a.item[item, I_NEXT]
        if a.item[item, I_ROW] == g:
            if before < 0:
                n[QUEUE] = following
            else:
                a.item[before, I_NEXT] = following
            if n[QUEUE_END] == item:
                n[QUEUE_END] = before
            _free_item(a, item)
        else:
            before = item
        item = following
    first, kept = n[FIRST_END], 0
    for place in range(first, first + n[SEQUENCES]):
        code = a.ends[e, place]
        if a.slot[e, code & mask, ROW] == g:
            _subtract(a, e, code)
        else:
            a.ends[e, first + kept] = code
            kept += 1
    n[SEQUENCES] = kept
    for s in range(a.size[RUNNING]):
        if a.slot[e, s, START] != FREE and a.slot[e, s, ROW] == g:
            _close(a, e, s)
    n[IS_AHEAD] = 0
    a.seconds[e, JOINED_AT] = -_NEVER
    n[ENDED_TOKENS] += tokens
    if not n[STOPS]:
        _after_change(a, e)
    free_group(a, g)
    return tokens


@compiled
def look(a: Any, e: Any) -> Any:
    """Bring an engine to its latest time; returns its decode steps, sequences and cached tokens
    then."""
    n, seconds = a.number[e], a.seconds[e]
    _run(a, e, seconds[NOW], False)
    now_s = seconds[TIME] if n[STOPS] else seconds[NOW]
    if now_s <= seconds[TIME] or not n[SEQUENCES]:
        return n[STEP], n[SEQUENCES], _cached_tokens(a, e)
    had = n[IS_AHEAD]
    at, event = seconds[AHEAD_AT], n[A_EVENT]
    kept = n[A_STEP], n[A_SEQUENCES], n[A_ORIGINS], n[A_OWNED], n[A_BEHIND]
    _walk(a, e, now_s)
    step, sequences, origins, owned = n[A_STEP], n[A_SEQUENCES], n[A_ORIGINS], n[A_OWNED]
    left_s = max(0.0, now_s - seconds[AHEAD_AT])
    _look_ahead(a, e, at, kept[0], kept[1], kept[2], kept[3], kept[4], event)
    n[IS_AHEAD] = had
    step += _steps_within(a, n[COST], sequences, sequences * step - origins, left_s)
    return step, sequences, sequences * step - owned + n[PREFIXES]


@compiled
def generated_tokens(a: Any, e: Any) -> Any:
    """`Replica.generated_tokens`"""
    step = look(a, e)[0]
    n = a.number[e]
    tokens = n[ENDED_TOKENS]
    counted = np.zeros(len(a.group), np.bool_)
    for place in range(n[FIRST_LAST], n[FIRST_LAST] + n[LASTS]):
        s = a.lasts[e, place] & ((1 << a.size[BITS]) - 1)
        counted[a.slot[e, s, ROW]] = True
    item = n[QUEUE]
    while item >= 0:
        counted[a.item[item, I_ROW]] = True
        tokens += a.item[item, HAS]
        item = a.item[item, I_NEXT]
    for g in range(len(counted)):
        if counted[g]:
            for m in range(a.member.shape[1]):
                place, length = a.member[g, m, PLACE], a.member[g, m, LENGTH]
                if place == _OVER:
                    tokens += length
                elif place >= 0:
                    tokens += min(length, step - a.slot[e, place, START])
    return tokens
