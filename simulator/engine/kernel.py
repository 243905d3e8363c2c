"""The engines of `simulator.engine.replica`, compiled: the same state machine on arrays, by numba.

    Replica    method by method, one engine       the rule, which tests compare with this
    kernel     function by function, all engines  arrays, one row for each engine

A function here has the name of its twin in `Replica`, `DecodeBatch` or `EventLoop`, or says which
it is. It computes the same numbers in the same order, so that results are equal to the last bit.
What only some runs have is left out: spans, samples that are reported before their group ends, kept
contexts, responses whose lengths change.

    _run_lane    timers of all engines, ends of groups and the starts that follow, until the
                 coordinator has to decide (`Coordinator.quiet`) or another event is due

A group is a row of `Engines.group` from its submission until it is trained on. Its tokens are
counted by version, from the one with which it was submitted.

    a                    `Engines`
    n, b, r, q, t, k, p  its number, batch, seconds, group, done_s, cost and pass_s
    e, g, m, s, c        an engine, the row of a group, a response in it, a slot, a speed

numba is the optional dependency `areal_lab[fast]`. It keeps the compiled `perform` beside this
file. All is one file: numba compiles again when the file of `perform` changes, and only then.
Without reference counts (`_nrt`) nothing here may make an array.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

# `_nrt` is in no type of numba's, but without it each array in a call is counted.
compiled: Final = njit(_nrt=False)  # type: ignore[call-overload]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_COMPENSATED: Final = sys.version_info >= (3, 12)
"""The built-in `sum` of floats adds what rounding lost since Python 3.12."""
_CLOCK_ROUNDING: Final = 1e-12  # `event_loop._CLOCK_ROUNDING`
_ROUNDING: Final = 1e-6  # `decode_batch._ROUNDING`
_STEP_ROUNDING: Final = 1e-6  # `decode._ROUNDING`
_NEVER: Final = math.inf
_NO_TIME: Final = -math.inf
_NO_END: Final = 1 << 62
FREE: Final = -(1 << 62)  # `sequences.NO_START`
_NOTHING, _COHORT_ENDS, _ANY_ENDS, _FULL = range(4)
IDLE, DECODE, PREFILL, RECOMPUTE, PAUSED = range(5)  # `replica.ACTIVITIES`

# `Engines.seconds`, by engine; the last five columns are those of the activities.
TIME, NOW, SINCE, JOINED_AT, AHEAD_AT, LAST_READ_S, ACTIVE = range(7)
SECONDS: Final = ACTIVE + 5
# `Engines.number`, by engine; from EPOCHS on versions and their first steps.
STEP, SEQUENCES, ORIGINS, OWNED, PREFIXES, KNOWN = range(6)
IS_AHEAD, A_STEP, A_SEQUENCES, A_ORIGINS, A_OWNED, A_BEHIND, A_EVENT = range(6, 13)
FIRST_END, FIRST_LAST, LASTS, FREE_SLOTS, ENDED = range(13, 18)
STATE, EPOCH, SERIAL, DUE, READING, STOPS = range(18, 24)
JOINED, READ_TOKENS, READ_PAIRS, READ_AGAIN, LAST_TOKENS, LAST_PAIRS = range(24, 30)
ENDED_TOKENS, RECOMPUTED, PREEMPTIONS, GROUPS, COST = range(30, 35)
QUEUE, QUEUE_END, DONE, DONE_END = range(35, 39)
RUNNING, CACHE, SHARING, RESERVE_RUNNING, RESERVE_NEW, RETRACTS, BITS, EPOCHS = range(39, 47)
# `Engines.batch`, by engine and slot: cohorts; sorted ends of sequences and of cohorts, from the
# places FIRST_END and FIRST_LAST on; a stack of free slots; cohorts that ended just now.
ROW, START, FIRST_STEP, ORIGIN, OWN, LAST, BEGAN, HAD = range(8)
ENDS, LASTS_OF, FREE_OF, ENDED_OF = range(8, 12)
BATCH: Final = 12
# `Engines.group`, by row: a group, its responses from MEMBERS on, its tokens by version from there.
NAME, PROMPT, LEFT, COHORTS, TOKENS, ENGINE, BASE, ORDER, NEXT = range(9)
HEAD, LAST_HEAD, TAIL, SEVERAL, TAKEN, COUNTED = range(9, 15)
QUEUED_FROM, GROUP_FOLLOWING, MEMBERS = range(15, 18)
LENGTH, PLACE, FIRST_VERSION, DONE_BEFORE, FOLLOWING, MEMBER = range(6)
HEADS, TAILS, OF_VERSION = range(3)
SAMPLES, VERSIONS, FREE_GROUP, FREE_GROUPS = range(4)  # of row 0, which is no group
_QUEUED, _OVER = -1, -2
# `Engines.cost`, by speed of engines.
SCALARS, GPU_S, BASE_S, RISE_S = range(4)
TOKEN_S, ENGINE_S, SEQUENCE_S, FLOOR_S, OVERLAP, BATCH_FLOOR_S, BATCH_RISE_S, RISING = range(8)
PAIR_S, CHUNK, MEASURED, PASS_S, READ_TOKEN_S, SLOWDOWN, COSTS = range(8, 15)


class Engines(NamedTuple):
    """All engines of a run, and their groups. Few arrays: numba passes each as nine values."""

    number: Integers
    """[engines, EPOCHS + 2 epochs]"""
    batch: Integers
    """[engines, BATCH, 2 slots]"""
    seconds: Floats
    """[engines, SECONDS]"""
    group: Integers
    """[rows, MEMBERS + MEMBER samples + 3 versions]"""
    done_s: Floats
    """[rows]: when the last response of a group ended."""
    cost: Floats
    """[speeds, 4, slots + 1]: scalars, and seconds of decode steps by number of sequences."""
    pass_s: Floats
    """[chunk + 1]: `PrefillCost.pass_s` by tokens, without a slowdown."""


# --- costs: `DecodeCost`, `_BaseCosts`, `PrefillCost` ------------------------------------------


@compiled
def _waiting_steps(missing_s: Any, growth_s: Any, steps: Any) -> Any:
    if missing_s <= 0:
        return 0
    if missing_s >= growth_s * steps:
        return steps
    return min(steps, math.ceil(missing_s / growth_s))


@compiled
def _steps_s(k: Any, c: Any, sequences: Any, context: Any, steps: Any) -> Any:
    first_s = k[c, GPU_S, sequences] + k[c, SCALARS, TOKEN_S] * context
    if k[c, SCALARS, OVERLAP] == 0:
        first_s += k[c, SCALARS, ENGINE_S] + k[c, SCALARS, SEQUENCE_S] * sequences
    growth_s = k[c, SCALARS, TOKEN_S] * sequences
    least_s = k[c, SCALARS, FLOOR_S] + k[c, SCALARS, SEQUENCE_S] * sequences
    waiting = _waiting_steps(least_s - first_s, growth_s, steps) if first_s < least_s else 0
    reading = steps * (steps - 1) // 2 - waiting * (waiting - 1) // 2
    return waiting * least_s + (steps - waiting) * first_s + growth_s * reading


@compiled
def _steps_within(k: Any, c: Any, sequences: Any, context: Any, seconds: Any) -> Any:
    if seconds <= 0:
        return 0
    first_s = k[c, GPU_S, sequences] + k[c, SCALARS, TOKEN_S] * context
    if k[c, SCALARS, OVERLAP] == 0:
        first_s += k[c, SCALARS, ENGINE_S] + k[c, SCALARS, SEQUENCE_S] * sequences
    growth_s = k[c, SCALARS, TOKEN_S] * sequences
    least_s = k[c, SCALARS, FLOOR_S] + k[c, SCALARS, SEQUENCE_S] * sequences
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
    while _steps_s(k, c, sequences, context, done + 1) <= seconds + _STEP_ROUNDING * first_s:
        done += 1
    return done


@compiled
def _prefill_s(k: Any, p: Any, c: Any, tokens: Any, pairs: Any) -> Any:
    if tokens <= 0:
        return 0.0
    if k[c, SCALARS, MEASURED] != 0:
        read_s = (
            k[c, SCALARS, PASS_S]
            + k[c, SCALARS, READ_TOKEN_S] * tokens
            + k[c, SCALARS, PAIR_S] * pairs
        )
        return k[c, SCALARS, SLOWDOWN] * read_s
    chunk = int(k[c, SCALARS, CHUNK])
    chunks, rest = tokens // chunk, tokens % chunk
    linear_s = p[rest] * k[c, SCALARS, SLOWDOWN] if rest else 0.0
    if chunks:
        linear_s += chunks * (p[chunk] * k[c, SCALARS, SLOWDOWN])
    return linear_s + k[c, SCALARS, PAIR_S] * pairs


@compiled
def _pairs(tokens: Any, cached: Any) -> Any:
    """`causal_pairs`"""
    return tokens * cached + tokens * (tokens + 1) // 2


# --- sorted rows: `ends` and `lasts` -----------------------------------------------------------


@compiled
def _place(codes: Any, first: Any, count: Any, code: Any) -> Any:
    """`bisect_left` among the `count` codes from `first` on."""
    low, high = first, first + count
    while low < high:
        middle = (low + high) >> 1
        if codes[middle] < code:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(codes: Any, first: Any, count: Any, code: Any) -> Any:
    """`insort`; returns the new first place, as codes move to the left when they reach the end."""
    if first + count == len(codes):
        for place in range(count):
            codes[place] = codes[first + place]
        first = 0
    place = _place(codes, first, count, code)
    if first and place - first < first + count - place:
        first -= 1
        place -= 1
        for one in range(first, place):
            codes[one] = codes[one + 1]
    else:
        for one in range(first + count, place, -1):
            codes[one] = codes[one - 1]
    codes[place] = code
    return first


@compiled
def _remove(codes: Any, first: Any, count: Any, code: Any) -> Any:
    """Remove `code`; returns the new first place."""
    for one in range(_place(codes, first, count, code), first, -1):
        codes[one] = codes[one - 1]
    return first + 1


# --- the batch: `DecodeBatch` ------------------------------------------------------------------


@compiled
def _cached_tokens(a: Any, e: Any) -> Any:
    n = a.number
    return n[e, SEQUENCES] * n[e, STEP] - n[e, OWNED] + n[e, PREFIXES]


@compiled
def _nothing_known(a: Any, e: Any) -> Any:
    n, b = a.number, a.batch
    if n[e, IS_AHEAD]:
        return False
    return not (n[e, SEQUENCES] and b[e, ENDS, n[e, FIRST_END]] >> n[e, BITS] == n[e, STEP])


@compiled
def _join(a: Any, e: Any, g: Any, first: Any, until: Any, had: Any) -> Any:
    n, b, q = a.number, a.batch, a.group
    bits = n[e, BITS]
    n[e, FREE_SLOTS] -= 1
    s = b[e, FREE_OF, n[e, FREE_SLOTS]]
    start = n[e, STEP] - had
    b[e, ROW, s], b[e, BEGAN, s], b[e, HAD, s] = g, n[e, EPOCH], had
    b[e, START, s] = b[e, FIRST_STEP, s] = start
    b[e, ORIGIN, s] = origin = start - q[g, PROMPT]
    b[e, OWN, s] = own = start if n[e, SHARING] else origin
    if n[e, SHARING] and not q[g, COHORTS]:
        n[e, PREFIXES] += q[g, PROMPT]
    q[g, COHORTS] += 1
    last = 0
    for m in range(first, until):
        q[g, MEMBERS + MEMBER * m + PLACE] = s
        code = ((start + q[g, MEMBERS + MEMBER * m + LENGTH]) << bits) | s
        last = max(last, code)
        n[e, FIRST_END] = _insert(b[e, ENDS], n[e, FIRST_END], n[e, SEQUENCES], code)
        n[e, SEQUENCES] += 1
    b[e, LAST, s] = last
    n[e, FIRST_LAST] = _insert(b[e, LASTS_OF], n[e, FIRST_LAST], n[e, LASTS], last)
    n[e, LASTS] += 1
    n[e, ORIGINS] += (until - first) * origin
    n[e, OWNED] += (until - first) * own
    n[e, IS_AHEAD] = 0


@compiled
def _subtract(a: Any, e: Any, code: Any) -> Any:
    n, b = a.number, a.batch
    s = code & ((1 << n[e, BITS]) - 1)
    n[e, IS_AHEAD] = 0
    n[e, ORIGINS] -= b[e, ORIGIN, s]
    n[e, OWNED] -= b[e, OWN, s]


@compiled
def _close(a: Any, e: Any, s: Any) -> Any:
    n, b, q = a.number, a.batch, a.group
    g = b[e, ROW, s]
    n[e, FIRST_LAST] = _remove(b[e, LASTS_OF], n[e, FIRST_LAST], n[e, LASTS], b[e, LAST, s])
    n[e, LASTS] -= 1
    b[e, START, s] = FREE
    b[e, FREE_OF, n[e, FREE_SLOTS]] = s
    n[e, FREE_SLOTS] += 1
    q[g, COHORTS] -= 1
    if n[e, SHARING] and not q[g, COHORTS]:
        n[e, PREFIXES] -= q[g, PROMPT]


@compiled
def _end_cohort(a: Any, e: Any, s: Any) -> Any:
    """Close a cohort, and remember it for `_finish_ended`."""
    n, b = a.number, a.batch
    _close(a, e, s)
    b[e, ENDED_OF, n[e, ENDED]] = s
    n[e, ENDED] += 1


@compiled
def _ended_cohorts(a: Any, e: Any, first: Any, count: Any) -> Any:
    """Close the cohorts whose last entries are among those at `first`."""
    n, b = a.number, a.batch
    mask = (1 << n[e, BITS]) - 1
    for place in range(first, first + count):
        code = b[e, ENDS, place]
        s = code & mask
        # Two members that end together have the same entry.
        if b[e, START, s] != FREE and code == b[e, LAST, s]:
            _end_cohort(a, e, s)


@compiled
def _know(a: Any, e: Any, sequences: Any) -> Any:
    n = a.number
    n[e, KNOWN] = max(n[e, KNOWN], sequences)


@compiled
def _look_ahead(
    a: Any,
    e: Any,
    at: Any,
    step: Any,
    running: Any,
    origins: Any,
    owned: Any,
    behind: Any,
    event: Any,
) -> Any:
    n = a.number
    a.seconds[e, AHEAD_AT], n[e, A_STEP], n[e, A_SEQUENCES] = at, step, running
    n[e, A_ORIGINS], n[e, A_OWNED], n[e, A_BEHIND], n[e, A_EVENT] = origins, owned, behind, event


@compiled
def _next_change_s(a: Any, e: Any, any_end: Any) -> Any:
    n, r = a.number, a.seconds
    if not n[e, IS_AHEAD]:
        if not n[e, SEQUENCES]:
            return _NEVER
        if any_end:
            _first_end(a, e)
        elif not _stride(a, e):
            _walk(a, e, _NEVER)
        n[e, IS_AHEAD] = 1
    return r[e, AHEAD_AT]


@compiled
def _arrive(a: Any, e: Any) -> Any:
    n, r = a.number, a.seconds
    r[e, TIME] = r[e, AHEAD_AT]
    n[e, STEP], n[e, SEQUENCES] = n[e, A_STEP], n[e, A_SEQUENCES]
    n[e, ORIGINS], n[e, OWNED] = n[e, A_ORIGINS], n[e, A_OWNED]
    n[e, FIRST_END] += n[e, A_BEHIND]
    n[e, IS_AHEAD] = 0


@compiled
def _go_to_change(a: Any, e: Any) -> Any:
    """Move to the next change; returns whether the cache is full."""
    n, b = a.number, a.batch
    _arrive(a, e)
    event, behind = n[e, A_EVENT], n[e, A_BEHIND]
    if event == _FULL:
        return True
    first = n[e, FIRST_END] - behind
    if event == _ANY_ENDS and behind > 1:
        _ended_cohorts(a, e, first, behind)
        return False
    code = b[e, ENDS, first + behind - 1]
    s = code & ((1 << n[e, BITS]) - 1)
    if code == b[e, LAST, s]:
        _end_cohort(a, e, s)
    return False


@compiled
def _settle(a: Any, e: Any, now_s: Any) -> Any:
    n, r = a.number, a.seconds
    if now_s > r[e, TIME] and n[e, SEQUENCES]:
        _walk(a, e, now_s)
        _arrive(a, e)


@compiled
def _batch_end_step(a: Any, e: Any, now_s: Any) -> Any:
    """`DecodeBatch.end_step`"""
    n, b, r, k = a.number, a.batch, a.seconds, a.cost
    _settle(a, e, now_s)
    left_s = now_s - r[e, TIME]
    if left_s <= 0 or not n[e, SEQUENCES]:
        return
    c, sequences = n[e, COST], n[e, SEQUENCES]
    context = sequences * n[e, STEP] - n[e, ORIGINS]
    steps = _steps_within(k, c, sequences, context, left_s)
    taken_s = _steps_s(k, c, sequences, context, steps)
    step_s = _steps_s(k, c, sequences, context + steps * sequences, 1)
    if left_s - taken_s > _ROUNDING * step_s:
        steps, taken_s = steps + 1, taken_s + step_s
    n[e, STEP] += steps
    r[e, TIME] = max(now_s, r[e, TIME] + taken_s)
    first = n[e, FIRST_END]
    count = _place(b[e, ENDS], first, sequences, (n[e, STEP] + 1) << n[e, BITS]) - first
    for place in range(first, first + count):
        _subtract(a, e, b[e, ENDS, place])
    n[e, IS_AHEAD] = 0
    n[e, FIRST_END] += count
    n[e, SEQUENCES] -= count
    _ended_cohorts(a, e, first, count)


@compiled
def _stride(a: Any, e: Any) -> Any:
    n, b, r, k = a.number, a.batch, a.seconds, a.cost
    bits = n[e, BITS]
    now, sequences, c = n[e, STEP], n[e, SEQUENCES], n[e, COST]
    mask = (1 << bits) - 1
    code = b[e, LASTS_OF, n[e, FIRST_LAST]]
    end = code >> bits
    if sequences * end - n[e, OWNED] > n[e, CACHE] - n[e, PREFIXES]:
        return False
    token_s, steps = k[c, SCALARS, TOKEN_S], end - now
    _know(a, e, sequences)
    first = n[e, FIRST_END]
    behind = _place(b[e, ENDS], first, sequences, code + 1) - first
    left = sequences - behind
    if n[e, KNOWN] > k[c, SCALARS, RISING]:
        return False
    over_origins = over_own = 0
    for place in range(first, first + behind):
        s = b[e, ENDS, place] & mask
        over_origins += b[e, ORIGIN, s]
        over_own += b[e, OWN, s]
    lasting = n[e, ORIGINS] - over_origins
    lasting_tokens = left * now - lasting
    floor_s, floor_rise_s = k[c, SCALARS, BATCH_FLOOR_S], k[c, SCALARS, BATCH_RISE_S]
    least_s = floor_s + floor_rise_s * (left + 1)
    if k[c, BASE_S, sequences] + token_s * (sequences * end - n[e, ORIGINS]) <= least_s:
        spent_s = steps * least_s
        if floor_rise_s:
            to_go = 0
            for place in range(first, first + behind - 1):
                to_go += (b[e, ENDS, place] >> bits) - now
            spent_s += floor_rise_s * to_go
    elif k[c, BASE_S, left + 1] + token_s * lasting_tokens >= floor_s + floor_rise_s * sequences:
        twice, read = 2 * now - 1, 0
        for place in range(first, first + behind):
            x = (b[e, ENDS, place] >> bits) - now
            o = b[e, ORIGIN, b[e, ENDS, place] & mask]
            read += x * (x + twice - o - o)
        read = (read + left * steps * (steps - 1)) // 2 + steps * lasting_tokens
        spent_s = token_s * read + steps * k[c, BASE_S, left + 1]
        added_s = lost_s = 0.0
        for place in range(behind - 1):
            x = (b[e, ENDS, first + place] >> bits) - now
            more_s = x * k[c, RISE_S, sequences - place]
            total_s = added_s + more_s
            if _COMPENSATED:
                larger, smaller = max(added_s, more_s), min(added_s, more_s)  # neither is negative
                lost_s += (larger - total_s) + smaller
            added_s = total_s
        spent_s += added_s + lost_s
    else:
        return False
    at = r[e, TIME] + spent_s
    _look_ahead(a, e, at, end, left, lasting, n[e, OWNED] - over_own, behind, _COHORT_ENDS)
    return True


@compiled
def _spent_s(k: Any, c: Any, sequences: Any, origins: Any, step: Any, end: Any) -> Any:
    step_s, floor_s = k[c, BASE_S, sequences], k[c, SCALARS, BATCH_FLOOR_S]
    if k[c, SCALARS, BATCH_RISE_S]:
        floor_s += k[c, SCALARS, BATCH_RISE_S] * sequences
    if step_s + k[c, SCALARS, TOKEN_S] * (sequences * end - origins) <= floor_s:
        return (end - step) * floor_s
    if step_s < floor_s:
        return _steps_s(k, c, sequences, sequences * step - origins, end - step)
    twice = sequences * (step + end - 1) - origins - origins
    return (end - step) * (step_s + k[c, SCALARS, TOKEN_S] / 2 * twice)


@compiled
def _first_end(a: Any, e: Any) -> Any:
    n, b, r, k = a.number, a.batch, a.seconds, a.cost
    bits = n[e, BITS]
    step, sequences, c = n[e, STEP], n[e, SEQUENCES], n[e, COST]
    origins, owned, at = n[e, ORIGINS], n[e, OWNED], r[e, TIME]
    first, mask = n[e, FIRST_END], (1 << bits) - 1
    code = b[e, ENDS, first]
    end = code >> bits
    if end != step:
        _know(a, e, sequences)
        room = n[e, CACHE] - n[e, PREFIXES]
        if sequences * end - owned > room:
            end = (room + owned) // sequences
            at += _spent_s(k, c, sequences, origins, step, end)
            _look_ahead(a, e, at, end, sequences, origins, owned, 0, _FULL)
            return
        at += _spent_s(k, c, sequences, origins, step, end)
    following = (end + 1) << bits
    s = code & mask
    origins -= b[e, ORIGIN, s]
    owned -= b[e, OWN, s]
    behind = 1
    while behind < sequences and b[e, ENDS, first + behind] < following:
        s = b[e, ENDS, first + behind] & mask
        origins -= b[e, ORIGIN, s]
        owned -= b[e, OWN, s]
        behind += 1
    _look_ahead(a, e, at, end, sequences - behind, origins, owned, behind, _ANY_ENDS)


@compiled
def _walk(a: Any, e: Any, until_s: Any) -> Any:
    n, b, r, k = a.number, a.batch, a.seconds, a.cost
    bits = n[e, BITS]
    c, mask = n[e, COST], (1 << bits) - 1
    _know(a, e, n[e, SEQUENCES])
    room, first, count = n[e, CACHE] - n[e, PREFIXES], n[e, FIRST_END], n[e, SEQUENCES]
    at, step, sequences = r[e, TIME], n[e, STEP], n[e, SEQUENCES]
    origins, owned, behind = n[e, ORIGINS], n[e, OWNED], 0
    for place in range(first, first + count):
        code = b[e, ENDS, place]
        end = code >> bits
        if end != step:
            full = sequences * end - owned > room
            if full:
                end = (room + owned) // sequences
            spent_s = _spent_s(k, c, sequences, origins, step, end)
            if at + spent_s > until_s:
                _look_ahead(a, e, at, step, sequences, origins, owned, behind, _NOTHING)
                return
            at += spent_s
            step = end
            if full:
                _look_ahead(a, e, at, step, sequences, origins, owned, behind, _FULL)
                return
        s = code & mask
        alone = place + 1 == first + count or b[e, ENDS, place + 1] != code
        cohort_ends = code == b[e, LAST, s] and alone
        if cohort_ends and until_s < _NEVER:
            _look_ahead(a, e, at, step, sequences, origins, owned, behind, _NOTHING)
            return
        behind += 1
        sequences -= 1
        origins -= b[e, ORIGIN, s]
        owned -= b[e, OWN, s]
        if cohort_ends:
            _look_ahead(a, e, at, step, sequences, origins, owned, behind, _COHORT_ENDS)
            return
    _look_ahead(a, e, at, step, sequences, origins, owned, behind, _ANY_ENDS)


# --- tokens by version: `sequences.decoded` ----------------------------------------------------


@compiled
def _count_tokens(a: Any, e: Any, g: Any, m: Any, s: Any, start: Any, had: Any, until: Any) -> Any:
    """Count the tokens from `had` to `until` of a response; returns the version of the last."""
    n, b, q = a.number, a.batch, a.group
    done, place, newest = had, b[e, BEGAN, s], n[e, EPOCH]
    version = n[e, EPOCHS + 2 * place]
    while done < until:
        end = n[e, EPOCHS + 2 * place + 3] - start if place < newest else _NO_END
        if end > done:
            version = n[e, EPOCHS + 2 * place]
            reached = min(end, until)
            q[g, q[0, VERSIONS] + 3 * (version - q[g, BASE]) + OF_VERSION] += reached - done
            if q[g, MEMBERS + MEMBER * m + FIRST_VERSION] < 0:
                q[g, MEMBERS + MEMBER * m + FIRST_VERSION] = version
            done = reached
        place += 1
    return version


@compiled
def _finish(a: Any, e: Any, s: Any) -> Any:
    """A cohort has ended, and with the last one of a group the group."""
    n, b, r, q, t = a.number, a.batch, a.seconds, a.group, a.done_s
    g = b[e, ROW, s]
    start, had = b[e, FIRST_STEP, s], b[e, HAD, s]
    for m in range(q[0, SAMPLES]):
        if q[g, MEMBERS + MEMBER * m + PLACE] != s:
            continue
        q[g, MEMBERS + MEMBER * m + PLACE] = _OVER
        last = _count_tokens(a, e, g, m, s, start, had, q[g, MEMBERS + MEMBER * m + LENGTH])
        head = q[g, MEMBERS + MEMBER * m + FIRST_VERSION]
        q[g, q[0, VERSIONS] + 3 * (head - q[g, BASE]) + HEADS] += 1
        q[g, q[0, VERSIONS] + 3 * (last - q[g, BASE]) + TAILS] += 1
        q[g, SEVERAL] += head != last
        q[g, HEAD], q[g, LAST_HEAD] = min(q[g, HEAD], head), max(q[g, LAST_HEAD], head)
        q[g, TAIL] = max(q[g, TAIL], last)
        q[g, LEFT] -= 1
    if q[g, LEFT]:
        return
    n[e, GROUPS] -= 1
    n[e, ENDED_TOKENS] += q[g, TOKENS]
    t[g] = r[e, TIME]
    q[g, NEXT] = -1
    if n[e, DONE] < 0:
        n[e, DONE] = g
    else:
        q[n[e, DONE_END], NEXT] = g
    n[e, DONE_END] = g


@compiled
def _finish_ended(a: Any, e: Any) -> Any:
    n, b = a.number, a.batch
    for place in range(n[e, ENDED]):
        _finish(a, e, b[e, ENDED_OF, place])
    n[e, ENDED] = 0


# --- the engine: `Replica` ---------------------------------------------------------------------


@compiled
def _set_state(a: Any, e: Any, at: Any, state: Any) -> Any:
    """`Clock.set`"""
    n, r = a.number, a.seconds
    if state == n[e, STATE]:
        return
    if at > r[e, SINCE]:
        r[e, ACTIVE + n[e, STATE]] += at - r[e, SINCE]
    n[e, STATE] = state
    r[e, SINCE] = at


@compiled
def _clock(a: Any, e: Any, now_s: Any) -> Any:
    r = a.seconds
    r[e, NOW] = max(r[e, NOW], now_s)
    return r[e, NOW]


@compiled
def _queue_item(a: Any, e: Any, item: Any) -> Any:
    """Append to the queue what waits: a group, whose item is its row times (samples + 1), or a
    preempted response of it, which adds its number and 1."""
    n = a.number
    _set_following(a, item, -1)
    if n[e, QUEUE] < 0:
        n[e, QUEUE] = item
    else:
        _set_following(a, n[e, QUEUE_END], item)
    n[e, QUEUE_END] = item


@compiled
def _set_following(a: Any, item: Any, following: Any) -> Any:
    q = a.group
    g, m = item // (q[0, SAMPLES] + 1), item % (q[0, SAMPLES] + 1)
    if m:
        q[g, MEMBERS + MEMBER * (m - 1) + FOLLOWING] = following
    else:
        q[g, GROUP_FOLLOWING] = following


@compiled
def _following(a: Any, item: Any) -> Any:
    q = a.group
    g, m = item // (q[0, SAMPLES] + 1), item % (q[0, SAMPLES] + 1)
    return q[g, MEMBERS + MEMBER * (m - 1) + FOLLOWING] if m else q[g, GROUP_FOLLOWING]


@compiled
def _run(a: Any, e: Any, now_s: Any, more_at: Any) -> Any:
    """`Replica._run`; the owner has another command at `more_at`, or it is `_NO_TIME`."""
    n, r = a.number, a.seconds
    while r[e, TIME] <= now_s and not n[e, STOPS]:
        if n[e, READING]:
            n[e, READING] = 0
            _set_state(a, e, r[e, TIME], DECODE if n[e, SEQUENCES] else IDLE)
            if n[e, QUEUE] >= 0:
                n[e, DUE] = 1
                r[e, JOINED_AT] = -_NEVER
        if n[e, DUE]:
            at = r[e, TIME]
            if at == more_at and at != r[e, JOINED_AT]:
                return
            _admit(a, e)
        elif r[e, TIME] == now_s and _nothing_known(a, e):
            return
        elif _next_change_s(a, e, n[e, QUEUE] >= 0) > now_s:
            return
        else:
            full = _go_to_change(a, e)
            _finish_ended(a, e)
            if full:
                _retract(a, e)
            elif n[e, QUEUE] >= 0:
                n[e, DUE] = 1
            elif not n[e, SEQUENCES]:
                _after_change(a, e)


@compiled
def _end_step(a: Any, e: Any, now_s: Any) -> Any:
    n, r = a.number, a.seconds
    if n[e, SEQUENCES]:
        _batch_end_step(a, e, now_s)
        _finish_ended(a, e)
        _after_change(a, e)
    elif r[e, TIME] < now_s:
        r[e, TIME] = now_s


@compiled
def _after_change(a: Any, e: Any) -> Any:
    n, r = a.number, a.seconds
    if n[e, QUEUE] >= 0:
        n[e, DUE] = 1
    elif not n[e, SEQUENCES] and not n[e, READING]:
        _set_state(a, e, r[e, TIME], IDLE)


@compiled
def _admit(a: Any, e: Any) -> Any:
    n, r, q = a.number, a.seconds, a.group
    at, sequences, reserve = r[e, TIME], n[e, SEQUENCES], n[e, RESERVE_NEW]
    joined = n[e, JOINED] if at == r[e, JOINED_AT] else 0
    free = n[e, CACHE] - _cached_tokens(a, e)
    free -= n[e, RESERVE_RUNNING] * (sequences - joined) + reserve * joined
    n[e, DUE] = 0
    while n[e, QUEUE] >= 0 and sequences < n[e, RUNNING]:
        item = n[e, QUEUE]
        g, m = item // (q[0, SAMPLES] + 1), item % (q[0, SAMPLES] + 1) - 1
        had = 0 if m < 0 else q[g, MEMBERS + MEMBER * m + DONE_BEFORE]
        once, each, cached = q[g, PROMPT], had, q[g, PROMPT]
        if not n[e, SHARING]:
            once, each, cached = 0, once + had, 0
        elif q[g, COHORTS]:
            once = 0
        count = (free - once) // (each + reserve)
        if count < 1:
            if sequences:
                break
            count = 1
        first, last = q[g, QUEUED_FROM], q[0, SAMPLES]
        if m >= 0:
            first, last = m, m + 1
        until = min(last, first + min(count, n[e, RUNNING] - sequences))
        count = until - first
        if m < 0:
            q[g, QUEUED_FROM] = until
        if until == last:
            n[e, QUEUE] = _following(a, item)
        if not joined:
            r[e, JOINED_AT] = at
            n[e, READ_TOKENS] = n[e, READ_PAIRS] = n[e, READ_AGAIN] = 0
        _join(a, e, g, first, until, had)
        free -= once + count * (each + reserve)
        sequences += count
        joined += count
        if once or each:
            pairs = count * _pairs(each, cached) if each else 0
            tokens = once + count * each
            n[e, READ_TOKENS] += tokens
            n[e, READ_PAIRS] += _pairs(once, 0) + pairs
            if had:
                n[e, READ_AGAIN] += tokens
                n[e, RECOMPUTED] += tokens
    if joined:
        _begin_reading(a, e, at, joined)


@compiled
def _begin_reading(a: Any, e: Any, at: Any, joined: Any) -> Any:
    n, r, k, p = a.number, a.seconds, a.cost, a.pass_s
    n[e, JOINED] = joined
    if n[e, READ_TOKENS]:
        again = n[e, READ_AGAIN] == n[e, READ_TOKENS]
        _set_state(a, e, at, RECOMPUTE if again else PREFILL)
        if n[e, READ_TOKENS] != n[e, LAST_TOKENS] or n[e, READ_PAIRS] != n[e, LAST_PAIRS]:
            n[e, LAST_TOKENS], n[e, LAST_PAIRS] = n[e, READ_TOKENS], n[e, READ_PAIRS]
            r[e, LAST_READ_S] = _prefill_s(k, p, n[e, COST], n[e, READ_TOKENS], n[e, READ_PAIRS])
        r[e, TIME] = at + r[e, LAST_READ_S]
        n[e, READING] = 1
    elif n[e, STATE] != DECODE:
        _set_state(a, e, at, DECODE)


@compiled
def _latest(a: Any, g: Any, s: Any, done: Any) -> Any:
    """The last running response of a cohort, or -1."""
    q = a.group
    for m in range(q[0, SAMPLES] - 1, -1, -1):
        if q[g, MEMBERS + MEMBER * m + PLACE] == s and q[g, MEMBERS + MEMBER * m + LENGTH] > done:
            return m
    return -1


@compiled
def _retract(a: Any, e: Any) -> Any:
    """`Replica._retract` and `DecodeBatch.retract`"""
    n, b, q = a.number, a.batch, a.group
    bits = n[e, BITS]
    while True:
        s = -1
        for other in range(n[e, RUNNING]):
            start = b[e, START, other]
            if s < 0 or start > b[e, START, s]:
                s = other
            elif start == b[e, START, s] and start != FREE:
                g, h = b[e, ROW, s], b[e, ROW, other]
                done = n[e, STEP] - start
                one = (q[g, PROMPT], q[g, ORDER], _latest(a, g, s, done))
                two = (q[h, PROMPT], q[h, ORDER], _latest(a, h, other, done))
                if two > one:
                    s = other
        g, start, had = b[e, ROW, s], b[e, START, s], b[e, HAD, s]
        done = n[e, STEP] - start
        m = _latest(a, g, s, done)
        q[g, MEMBERS + MEMBER * m + PLACE] = _QUEUED
        code = ((start + q[g, MEMBERS + MEMBER * m + LENGTH]) << bits) | s
        n[e, FIRST_END] = _remove(b[e, ENDS], n[e, FIRST_END], n[e, SEQUENCES], code)
        n[e, SEQUENCES] -= 1
        _subtract(a, e, code)
        _count_tokens(a, e, g, m, s, start, had, done)
        closed = _latest(a, g, s, done) < 0
        if closed:
            _end_cohort(a, e, s)
        else:
            longest = 0
            for other in range(q[0, SAMPLES]):
                if q[g, MEMBERS + MEMBER * other + PLACE] == s:
                    longest = max(longest, q[g, MEMBERS + MEMBER * other + LENGTH])
            n[e, FIRST_LAST] = _remove(b[e, LASTS_OF], n[e, FIRST_LAST], n[e, LASTS], b[e, LAST, s])
            b[e, LAST, s] = ((start + longest) << bits) | s
            n[e, FIRST_LAST] = _insert(
                b[e, LASTS_OF], n[e, FIRST_LAST], n[e, LASTS] - 1, b[e, LAST, s]
            )
        q[g, MEMBERS + MEMBER * m + DONE_BEFORE] = done
        _queue_item(a, e, g * (q[0, SAMPLES] + 1) + m + 1)
        n[e, PREEMPTIONS] += 1
        _finish_ended(a, e)  # others of its cohort, which had all ended
        free = n[e, CACHE] - _cached_tokens(a, e)
        if n[e, SEQUENCES] == 1 or free >= n[e, RETRACTS] * n[e, SEQUENCES]:
            return


@compiled
def next_s(a: Any, e: Any) -> Any:
    """`Replica.next_s`"""
    n, r, t = a.number, a.seconds, a.done_s
    if (n[e, DUE] or n[e, READING]) and r[e, TIME] <= r[e, NOW]:
        _run(a, e, r[e, NOW], _NO_TIME)
    if n[e, DONE] >= 0:
        return max(t[n[e, DONE]], r[e, NOW])
    if n[e, STOPS]:
        return _NEVER
    if n[e, DUE]:
        return r[e, TIME]
    waits = n[e, QUEUE] >= 0
    if waits and n[e, READING] and n[e, SEQUENCES] < n[e, RUNNING]:
        return r[e, TIME]
    return _next_change_s(a, e, waits)


@compiled
def advance(a: Any, e: Any, now_s: Any) -> Any:
    """`Replica.advance`; groups that ended are taken by `take_done`."""
    now_s = _clock(a, e, now_s)
    _run(a, e, now_s, _NO_TIME)


@compiled
def take_done(a: Any, e: Any) -> Any:
    """Row of a group that has ended, once, in the order of their ends; -1 for none."""
    n, r, q, t = a.number, a.seconds, a.group, a.done_s
    g = n[e, DONE]
    if g < 0 or t[g] > r[e, NOW]:
        return -1
    n[e, DONE] = q[g, NEXT]
    q[g, TAKEN] = 1
    return g


@compiled
def submit(a: Any, e: Any, now_s: Any, name: Any, prompt: Any, lengths: Any, version: Any) -> Any:
    """`Replica.submit`; returns the row of the group."""
    n, r, q = a.number, a.seconds, a.group
    now_s = _clock(a, e, now_s)
    if r[e, TIME] < now_s or not _nothing_known(a, e):
        _run(a, e, now_s, now_s)
    if version > n[e, EPOCHS + 2 * n[e, EPOCH]]:
        _change_epoch(a, e, version)
    g = q[0, FREE_GROUP]
    q[0, FREE_GROUP] = q[g, NEXT]
    q[0, FREE_GROUPS] -= 1
    base = n[e, EPOCHS + 2 * n[e, EPOCH]]
    q[g, NAME], q[g, PROMPT], q[g, COHORTS], q[g, ENGINE] = name, prompt, 0, e
    q[g, LEFT], q[g, BASE], q[g, ORDER], q[g, NEXT] = len(lengths), base, n[e, SERIAL], -1
    q[g, HEAD], q[g, TAIL], q[g, SEVERAL], q[g, TOKENS] = _NO_END, -1, 0, 0
    q[g, TAKEN], q[g, COUNTED], q[g, LAST_HEAD] = 0, 0, -1
    q[g, q[0, VERSIONS] :] = 0
    for m in range(len(lengths)):
        q[g, MEMBERS + MEMBER * m + LENGTH], q[g, MEMBERS + MEMBER * m + PLACE] = (
            lengths[m],
            _QUEUED,
        )
        q[g, MEMBERS + MEMBER * m + FIRST_VERSION] = -1
        q[g, MEMBERS + MEMBER * m + DONE_BEFORE] = 0
        q[g, TOKENS] += lengths[m]
    n[e, SERIAL] += 1
    n[e, GROUPS] += 1
    if n[e, QUEUE] < 0 and not n[e, STOPS]:
        if r[e, JOINED_AT] == now_s:
            r[e, TIME] = now_s
            n[e, READING] = 0
            n[e, DUE] = 1
        else:
            _settle(a, e, now_s)
            if n[e, SEQUENCES] < n[e, RUNNING]:
                if r[e, TIME] < now_s:
                    _end_step(a, e, now_s)
                n[e, DUE] = 1
        n[e, IS_AHEAD] = 0
    q[g, QUEUED_FROM] = 0
    _queue_item(a, e, g * (q[0, SAMPLES] + 1))
    return g


@compiled
def _change_epoch(a: Any, e: Any, version: Any) -> Any:
    n = a.number
    n[e, EPOCH] += 1
    n[e, EPOCHS + 2 * n[e, EPOCH]] = version
    n[e, EPOCHS + 2 * n[e, EPOCH] + 1] = n[e, STEP]


@compiled
def pause(a: Any, e: Any, now_s: Any) -> Any:
    """`Replica.pause`"""
    n, r = a.number, a.seconds
    now_s = _clock(a, e, now_s)
    _run(a, e, now_s, now_s)
    if n[e, STOPS]:
        return
    if n[e, READING]:
        stops_s = max(now_s, r[e, SINCE])
        r[e, TIME] = stops_s
        n[e, READING] = 0
    else:
        _end_step(a, e, now_s)
    n[e, STOPS] = 1
    _set_state(a, e, r[e, TIME], PAUSED)


@compiled
def _contexts(a: Any, e: Any) -> Any:
    """Pairs of attention of all running sequences."""
    n, b, q = a.number, a.batch, a.group
    mask = (1 << n[e, BITS]) - 1
    pairs = 0
    for place in range(n[e, FIRST_END], n[e, FIRST_END] + n[e, SEQUENCES]):
        s = b[e, ENDS, place] & mask
        done, prompt = n[e, STEP] - b[e, START, s], q[b[e, ROW, s], PROMPT]
        pairs += _pairs(done, prompt) if n[e, SHARING] else _pairs(prompt + done, 0)
    if n[e, SHARING]:
        for place in range(n[e, FIRST_LAST], n[e, FIRST_LAST] + n[e, LASTS]):
            g = b[e, ROW, b[e, LASTS_OF, place] & mask]
            if not q[g, COUNTED]:
                q[g, COUNTED] = 1
                pairs += _pairs(q[g, PROMPT], 0)
        for place in range(n[e, FIRST_LAST], n[e, FIRST_LAST] + n[e, LASTS]):
            q[b[e, ROW, b[e, LASTS_OF, place] & mask], COUNTED] = 0
    return pairs


@compiled
def resume(a: Any, e: Any, now_s: Any, version: Any) -> Any:
    """`Replica.resume`"""
    n, r, k, p = a.number, a.seconds, a.cost, a.pass_s
    now_s = _clock(a, e, now_s)
    if version != n[e, EPOCHS + 2 * n[e, EPOCH]]:
        _change_epoch(a, e, version)
    activity, left_s, reads = DECODE if n[e, SEQUENCES] else IDLE, 0.0, 0
    if n[e, SEQUENCES]:
        tokens = _cached_tokens(a, e)
        n[e, RECOMPUTED] += tokens
        activity, reads = RECOMPUTE, 1
        left_s = _prefill_s(k, p, n[e, COST], tokens, _contexts(a, e))
    r[e, TIME] = max(now_s, r[e, TIME])
    _set_state(a, e, r[e, TIME], activity)
    r[e, TIME] += left_s
    n[e, READING], n[e, STOPS] = reads, 0
    n[e, DUE] = n[e, QUEUE] >= 0
    r[e, JOINED_AT] = -_NEVER
    n[e, IS_AHEAD] = 0


@compiled
def _tokens_so_far(a: Any, e: Any, g: Any, step: Any) -> Any:
    """Tokens of an unfinished group until `step`: of ended, running and preempted responses."""
    b, q = a.batch, a.group
    tokens = 0
    for m in range(q[0, SAMPLES]):
        place, length = q[g, MEMBERS + MEMBER * m + PLACE], q[g, MEMBERS + MEMBER * m + LENGTH]
        if place == _OVER:
            tokens += length
        elif place >= 0:
            tokens += min(length, step - b[e, START, place])
        else:
            tokens += q[g, MEMBERS + MEMBER * m + DONE_BEFORE]
    return tokens


@compiled
def free_group(a: Any, g: Any) -> Any:
    """Forget a group."""
    q = a.group
    q[g, LEFT], q[g, NEXT] = 0, q[0, FREE_GROUP]
    q[0, FREE_GROUP] = g
    q[0, FREE_GROUPS] += 1


@compiled
def drop(a: Any, e: Any, now_s: Any, g: Any) -> Any:
    """`Replica.drop`; returns the tokens of the group, whose row is then free."""
    n, b, r, q = a.number, a.batch, a.seconds, a.group
    now_s = _clock(a, e, now_s)
    _run(a, e, now_s, now_s)
    mask = (1 << n[e, BITS]) - 1
    if q[g, LEFT] and not n[e, STOPS]:
        _end_step(a, e, now_s)
    if not q[g, LEFT]:  # it ends with the running step
        before, other = -1, n[e, DONE]
        while other != g:
            before, other = other, q[other, NEXT]
        if before < 0:
            n[e, DONE] = q[g, NEXT]
        else:
            q[before, NEXT] = q[g, NEXT]
        if n[e, DONE_END] == g:
            n[e, DONE_END] = before
        free_group(a, g)
        return q[g, TOKENS]
    tokens = _tokens_so_far(a, e, g, n[e, STEP])
    n[e, GROUPS] -= 1
    item = n[e, QUEUE]
    n[e, QUEUE] = -1
    while item >= 0:
        following = _following(a, item)
        if item // (q[0, SAMPLES] + 1) != g:
            _queue_item(a, e, item)
        item = following
    first, kept = n[e, FIRST_END], 0
    for place in range(first, first + n[e, SEQUENCES]):
        code = b[e, ENDS, place]
        if b[e, ROW, code & mask] == g:
            _subtract(a, e, code)
        else:
            b[e, ENDS, first + kept] = code
            kept += 1
    n[e, SEQUENCES] = kept
    for s in range(n[e, RUNNING]):
        if b[e, START, s] != FREE and b[e, ROW, s] == g:
            _close(a, e, s)
    n[e, IS_AHEAD] = 0
    r[e, JOINED_AT] = -_NEVER
    n[e, ENDED_TOKENS] += tokens
    if not n[e, STOPS]:
        _after_change(a, e)
    free_group(a, g)
    return tokens


@compiled
def _step_now(a: Any, e: Any) -> Any:
    """`Replica.decode_steps`: steps until the latest time, without moving to it."""
    n, r, k = a.number, a.seconds, a.cost
    _run(a, e, r[e, NOW], _NO_TIME)
    now_s = r[e, TIME] if n[e, STOPS] else r[e, NOW]
    if now_s <= r[e, TIME] or not n[e, SEQUENCES]:
        return n[e, STEP]
    had, at, event = n[e, IS_AHEAD], r[e, AHEAD_AT], n[e, A_EVENT]
    kept = n[e, A_STEP], n[e, A_SEQUENCES], n[e, A_ORIGINS], n[e, A_OWNED], n[e, A_BEHIND]
    _walk(a, e, now_s)
    step, sequences, origins = n[e, A_STEP], n[e, A_SEQUENCES], n[e, A_ORIGINS]
    left_s = max(0.0, now_s - r[e, AHEAD_AT])
    _look_ahead(a, e, at, kept[0], kept[1], kept[2], kept[3], kept[4], event)
    n[e, IS_AHEAD] = had
    return step + _steps_within(k, n[e, COST], sequences, sequences * step - origins, left_s)


@compiled
def generated_tokens(a: Any, e: Any) -> Any:
    """`Replica.generated_tokens`"""
    n, b, q = a.number, a.batch, a.group
    step, mask = _step_now(a, e), (1 << n[e, BITS]) - 1
    tokens = n[e, ENDED_TOKENS]
    for counted in range(2):  # each group once, and then the marks go
        for place in range(n[e, FIRST_LAST], n[e, FIRST_LAST] + n[e, LASTS]):
            g = b[e, ROW, b[e, LASTS_OF, place] & mask]
            if q[g, COUNTED] == counted:
                q[g, COUNTED] = 1 - counted
                tokens += 0 if counted else _tokens_so_far(a, e, g, step)
        item = n[e, QUEUE]
        while item >= 0:
            g = item // (q[0, SAMPLES] + 1)
            if q[g, COUNTED] == counted:
                q[g, COUNTED] = 1 - counted
                tokens += 0 if counted else _tokens_so_far(a, e, g, step)
            item = _following(a, item)
    return tokens


# --- lanes: `EventLoop` ------------------------------------------------------------------------

WAITS, GROUP_ENDED, FULL, DRAWS = range(4)
"""Why a lane ends: another event is due; a group has ended, which the coordinator must know;
arrays are full; lengths are missing."""

# What `perform` does.
RUN, START_GROUPS, SET_TIMERS, NEXT_S, ADVANCE, TAKE_DONE = range(6)
PAUSE, PAUSE_ALL, RESUME, DROP, FREE_GROUPS_OF, GENERATED = range(6, 12)
# `Lane.state`.
L_NOW, IN_FLIGHT_S, IN_FLIGHT_SINCE, RESULT, STATES = range(5)
# `Lane.counts`.
TIMERS, SET, MAY_END, STARTED, LIMIT, FLIGHTS, ALL_SLOTS, NEXT_GROUP, FIRST_DRAWN = range(9)
VERSION, LAST_START, STARTS, ENDINGS, CHANGES, AT_ENGINE, TOKENS_OF_PROMPT, COUNTS = range(9, 17)


class Lane(NamedTuple):
    """Timers of the engines, what a lane may do, and what it did."""

    state: Floats
    counts: Integers
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
    some: Integers
    """Engines, or rows of groups, of which `perform` does something."""
    changed_s: Floats
    changed: Integers
    """[changes, 2]: an engine got its first group (1) or lost its last one (0); engine -1: the last
    group of the run has started."""


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
    place = lane.counts[TIMERS]
    lane.counts[TIMERS] += 1
    lane.timer_s[place] = at
    lane.timer[place, 0], lane.timer[place, 1] = lane.counts[SET], e
    lane.counts[SET] += 1
    while place and _earlier(lane, place, (place - 1) // 2):
        _swap(lane, place, (place - 1) // 2)
        place = (place - 1) // 2


@compiled
def _pop_timer(lane: Any) -> Any:
    """Remove the first timer; returns its engine."""
    e = lane.timer[0, 1]
    lane.counts[TIMERS] -= 1
    last, place = lane.counts[TIMERS], 0
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
def _changes(lane: Any, now_s: Any, e: Any, works: Any) -> Any:
    place = lane.counts[CHANGES]
    lane.changed_s[place] = now_s
    lane.changed[place, 0], lane.changed[place, 1] = e, works
    lane.counts[CHANGES] += 1


@compiled
def _start(a: Any, lane: Any, now_s: Any) -> Any:
    """Start the next group on the least loaded engine; returns the engine."""
    count = lane.counts
    e = np.argmin(lane.load)  # the first of equals
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
def _room(a: Any, lane: Any, e: Any) -> Any:
    """Why the next timer of an engine cannot be performed; `WAITS` if it can."""
    groups, count = lane.works[e], lane.counts  # those that ended, and were not taken, included
    if (
        a.group[0, FREE_GROUPS] < groups
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
def _run_lane(a: Any, lane: Any, until_s: Any, until_set: Any) -> Any:
    """Perform timers before `until_s`, or at it if they were set before `until_set`; returns why it
    ends.

    After `GROUP_ENDED`, the groups of `AT_ENGINE` that ended until `L_NOW` are still to be taken.
    """
    count, state = lane.counts, lane.state
    while count[TIMERS]:
        now_s = lane.timer_s[0]
        if now_s > until_s or (now_s == until_s and lane.timer[0, 0] >= until_set):
            return WAITS
        e = lane.timer[0, 1]
        why = _room(a, lane, e)
        if why != WAITS:
            return why
        _pop_timer(lane)
        if lane.wake_s[e] > now_s * (1 + _CLOCK_ROUNDING):
            continue  # an earlier timer has replaced it
        lane.wake_s[e] = _NEVER
        advance(a, e, now_s)
        while a.number[e, DONE] >= 0 and a.done_s[a.number[e, DONE]] <= now_s:
            if count[MAY_END] <= 0 or count[FLIGHTS] == 1:
                state[L_NOW], count[AT_ENGINE] = now_s, e
                return GROUP_ENDED
            g = take_done(a, e)
            before = count[FLIGHTS]
            count[MAY_END] -= 1
            count[FLIGHTS] -= 1
            lane.load[e] -= 1
            lane.works[e] -= 1
            if not lane.works[e]:
                _changes(lane, now_s, e, 0)
            lane.ending[count[ENDINGS]] = g
            count[ENDINGS] += 1
            if count[STARTED] < count[LIMIT] and count[FLIGHTS] < count[ALL_SLOTS]:
                other = _start(a, lane, now_s)
                if count[STARTED] == count[LAST_START]:
                    _changes(lane, now_s, -1, 0)
                _set_timer(a, lane, now_s, other)
            else:
                state[IN_FLIGHT_S] += before * (now_s - state[IN_FLIGHT_SINCE])
                state[IN_FLIGHT_SINCE] = now_s
        if lane.wake_s[e] == _NEVER:
            _set_timer(a, lane, now_s, e)
    return WAITS


@njit(cache=True, _nrt=False)  # type: ignore[call-overload]
def perform(a: Any, lane: Any, what: Any, e: Any, at: Any, number: Any) -> Any:
    """Do something with engines. One function, since numba loads each one by itself.

    RUN             `_run_lane` until `at`, of timers set before `number`; returns why it ends
    START_GROUPS    start `number` groups; `start` has them
    SET_TIMERS      of the first `number` engines in `some`, in this order
    PAUSE_ALL       engines from `e` on; returns one that must advance first, or -1
    RESUME          the first `number` engines in `some`, under the weights of version `e`
    FREE_GROUPS_OF  the first `number` rows of `some`
    DROP            the group in row `number`; -1 if the engine must advance first
    others          the function of that name; NEXT_S is in `state`
    """
    if what == RUN:
        return _run_lane(a, lane, at, number)
    if what == START_GROUPS:
        for _ in range(number):
            _start(a, lane, at)
    elif what == SET_TIMERS:
        for place in range(number):
            _set_timer(a, lane, at, lane.some[place])
    elif what == NEXT_S:
        lane.state[RESULT] = next_s(a, e)
    elif what == ADVANCE:
        advance(a, e, at)
    elif what == TAKE_DONE:
        return take_done(a, e)
    elif what == PAUSE:
        pause(a, e, at)
    elif what == PAUSE_ALL:
        for other in range(e, len(a.number)):
            if not a.number[other, STOPS]:
                if next_s(a, other) <= at:
                    return other
                pause(a, other, at)
        return -1
    elif what == RESUME:
        for place in range(number):
            resume(a, lane.some[place], at, e)
    elif what == DROP:
        return drop(a, e, at, number) if next_s(a, e) > at else -1
    elif what == FREE_GROUPS_OF:
        for place in range(number):
            free_group(a, lane.some[place])
    elif what == GENERATED:
        return generated_tokens(a, e)
    return 0
