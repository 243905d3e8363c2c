"""The sequences that decode together: when steps end, and which sequences end with them.

    step         k             k + 31        k + 212           one integer per sequence, sorted:
    ends         .             a             b, c              the step that ends it, its cohort

Sequences that began together and have the same prompt form a cohort. One whose first token came
after step s has k - s tokens after step k, so sums over N sequences need no work per token:

    context tokens = N k - sum(s - prompt)        read by every step
    cached tokens  = N k - sum(s) + prefixes      a shared prompt is cached once

Until the next sequence ends, each step reads one more token of context per sequence, so m steps are
an arithmetic series. Looking ahead walks along `ends` and adds up. It changes no state until that
time has come, because events in between (new work, a pause) make the result void.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import Protocol, TypeAlias

from simulator.engine.sequences import NO_START, Cohort, Epoch, Group, Segments

_MOST_STEPS = 1 << 19
"""Steps after which the counter restarts. Python is half as fast with integers of 2**30 and more;
multiplied by the 256 sequences of a large batch, or shifted by the bits of a slot, steps stay
below.
"""
_ROUNDING = 1e-6
"""Fraction of a step by which a time may miss the end of the step and still count as the end: times
are sums of many floats."""


class StepCost(Protocol):
    """Cost of decode steps, such as `simulator.costs.decode.DecodeCost`."""

    @property
    def engine_s(self) -> float:
        """CPU time of the engine per step."""
        ...

    @property
    def engine_sequence_s(self) -> float:
        """CPU time per sequence of the step."""
        ...

    @property
    def floor_s(self) -> float:
        """Least seconds of a step without sequences, for the engine's CPU and its launches."""
        ...

    @property
    def overlap(self) -> bool:
        """A step takes the maximum of CPU and GPU time instead of their sum."""
        ...

    @property
    def context_token_s(self) -> float:
        """GPU seconds of a step per token of context."""
        ...

    def base_s(self, sequences: int, /) -> float:
        """GPU seconds of a step at context 0."""
        ...

    def steps_s(self, sequences: int, context_tokens: float, steps: int, /) -> float:
        """Seconds of `steps` steps during which no sequence joins or leaves."""
        ...

    def steps_within(self, sequences: int, context_tokens: float, seconds: float, /) -> int:
        """Whole steps that are done after `seconds`."""
        ...


_Ahead: TypeAlias = tuple[float, int, int, int, int, int, int]
"""The batch at a later time: time, step, sequences and both sums; how many entries of `ends` have
passed; what happens then. A tuple for speed: there is one per event."""
_NOTHING, _COHORT_ENDS, _ANY_ENDS, _FULL = range(4)


class DecodeBatch:
    """The running sequences; see the module docstring. `time_s` is the time of `step`.

    `time_s` may lie in the future while something must end before the next step: a prefill, or the
    running step when the batch is about to change.
    """

    __slots__ = (
        *("_ahead", "_bits", "_cohorts", "_costs", "_decode", "_floor_s", "_floor_rise_s"),
        *("_free", "_last"),
        *(
            "_lasts",
            "_mask",
            "_origin",
            "_origins",
            "_own",
            "_owned",
            "_prefixes",
            "_sharing",
            "_starts",
        ),
        *("_step", "_token_s", "_zero", "cache_tokens", "ends", "sequences", "time_s"),
    )

    def __init__(
        self, decode: StepCost, *, max_running: int, cache_tokens: int, prefix_sharing: bool
    ) -> None:
        self.cache_tokens = cache_tokens
        self._zero = 0
        self._step = 0
        self.time_s = 0.0
        self.sequences = 0
        self.ends: list[int] = []
        self._origins = 0  # sum of s - prompt
        self._owned = 0  # sum of s, or of s - prompt if prompts are not shared
        self._prefixes = 0  # tokens of prompts that are cached for a whole group
        self._sharing = prefix_sharing
        self._ahead: _Ahead | None = None
        self._decode = decode
        self._token_s = decode.context_token_s
        # A step is never shorter than the CPU's work, which grows with the sequences. Without
        # overlap and launches it is part of every step.
        waits = decode.overlap or decode.floor_s > decode.engine_s
        self._floor_s = decode.floor_s if waits else 0.0
        self._floor_rise_s = decode.engine_sequence_s if waits else 0.0
        self._costs = _BaseCosts(decode)
        # By slot; a cohort has at least one running sequence.
        self._bits = max_running.bit_length()
        self._mask = (1 << self._bits) - 1
        self._free = list(range(max_running - 1, -1, -1))
        self._cohorts = [Cohort(slot) for slot in range(max_running)]
        self._starts = [NO_START] * max_running
        self._origin = [0] * max_running
        self._own = [0] * max_running
        self._last = [0] * max_running  # of its entries in `ends`
        self._lasts: list[int] = []  # the same of all cohorts, sorted

    # --- state -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of decode steps so far."""
        return self._zero + self._step

    @property
    def context_tokens(self) -> int:
        """Context tokens that the next step reads."""
        return self.sequences * self._step - self._origins

    @property
    def cached_tokens(self) -> int:
        """Tokens of the KV cache in use."""
        return self.sequences * self._step - self._owned + self._prefixes

    @property
    def nothing_known(self) -> bool:
        """No look ahead is stored, and no ended sequence has yet to leave."""
        ends = self.ends
        return self._ahead is None and not (ends and ends[0] >> self._bits == self._step)

    @property
    def cohorts(self) -> list[Cohort]:
        """Cohorts with running sequences."""
        cohorts, mask = self._cohorts, self._mask
        return [cohorts[code & mask] for code in self._lasts]

    def running(self) -> list[tuple[Cohort, int]]:
        """The same, each with its number of running sequences."""
        mask = self._mask
        counts = Counter(map(mask.__and__, self.ends))
        return [(self._cohorts[slot], count) for slot, count in counts.items()]

    def check(self) -> None:
        """Assert that the sums equal those over the sequences; for tests."""
        origins = owned = prefixes = 0
        groups: Counter[Group] = Counter()
        assert {cohort.slot for cohort in self.cohorts} == {one.slot for one, _ in self.running()}
        for cohort, running in self.running():
            group, start = cohort.group, cohort.start_step - self._zero
            origins += running * (start - group.prompt_tokens)
            owned += running * (start - (0 if self._sharing else group.prompt_tokens))
            assert self._starts[cohort.slot] == start
            codes = [code for code in self.ends if code & self._mask == cohort.slot]
            assert self._last[cohort.slot] == max(codes)
            if self._sharing and not groups[group]:
                prefixes += group.prompt_tokens
            groups[group] += 1
        assert all(group.cohorts == count for group, count in groups.items())
        assert (origins, owned, prefixes) == (self._origins, self._owned, self._prefixes)
        assert self.sequences == len(self.ends) <= len(self._cohorts)
        assert self.ends == sorted(self.ends)
        assert self._lasts == sorted(self._last[cohort.slot] for cohort in self.cohorts)
        assert not self.ends or self.ends[0] >> self._bits >= self._step
        assert len(self.cohorts) + len(self._free) == len(self._cohorts)
        assert 0 <= self.cached_tokens <= self.cache_tokens

    # --- joining and leaving ---------------------------------------------------------------------

    def join(
        self, group: Group, members: list[int], start: int, epoch: Epoch, past: Segments
    ) -> None:
        """Add a cohort; see `Cohort`. It must have tokens left to generate."""
        if self._step > _MOST_STEPS:
            self._move_zero()
        slot = self._free.pop()
        cohort = self._cohorts[slot]
        cohort.group, cohort.members, cohort.start_step = group, members, start
        start -= self._zero
        cohort.epoch, cohort.past = epoch, past
        self._starts[slot] = start
        self._origin[slot] = origin = start - group.prompt_tokens
        own = start if self._sharing else origin
        self._own[slot] = own
        if self._sharing and not group.cohorts:
            self._prefixes += group.prompt_tokens
        group.cohorts += 1
        lengths, bits, ends = group.lengths, self._bits, self.ends
        count = len(members)
        if count == 1:
            code = last = start + lengths[members[0]] << bits | slot
            insort(ends, code)
        else:
            first = start << bits | slot
            if count < len(lengths):
                lengths = [lengths[member] for member in members]
            codes = [first + (length << bits) for length in lengths]
            last = first + (max(lengths) << bits)
            ends += codes
            ends.sort()
        self._last[slot] = last
        insort(self._lasts, last)
        self.sequences += count
        self._origins += count * origin
        self._owned += count * own
        self._ahead = None

    def remove(self, group: Group) -> None:
        """Remove the running sequences of a group."""
        cohorts = [cohort for cohort in self.cohorts if cohort.group is group]
        slots = {cohort.slot for cohort in cohorts}
        gone = [code for code in self.ends if code & self._mask in slots]
        self.ends = [code for code in self.ends if code & self._mask not in slots]
        self._subtract(gone)
        for cohort in cohorts:
            self._close(cohort)

    def tokens_of(self, group: Group) -> dict[int, int]:
        """Tokens so far of the group's responses in running cohorts, by index."""
        lengths, step = group.lengths, self.step
        return {
            member: min(lengths[member], step - cohort.start_step)
            for cohort in self.cohorts
            if cohort.group is group
            for member in cohort.members
        }

    def revise(self, group: Group, lengths: Sequence[int]) -> None:
        """Replace the lengths of a group, of which running responses have tokens left."""
        step, bits, mask = self.step, self._bits, self._mask
        for cohort in [one for one in self.cohorts if one.group is group]:
            slot, start = cohort.slot, self._starts[cohort.slot]
            running = [
                one for one in cohort.members if group.lengths[one] > step - cohort.start_step
            ]
            codes = [start + lengths[member] << bits | slot for member in running]
            self.ends = sorted([code for code in self.ends if code & mask != slot] + codes)
            self._lasts.remove(self._last[slot])
            self._last[slot] = max(codes)
            insort(self._lasts, self._last[slot])
        group.lengths = lengths
        self._ahead = None

    def retract(self) -> tuple[Cohort, int, bool]:
        """Remove the running sequence that loses the fewest tokens.

        Among equals, the one with the longest prompt, which frees the most cache; then the latest.

        Returns:
            Its cohort, its index in the group, and whether it was the last one running of its
            cohort.
        """
        starts = self._starts
        latest_start = max(starts)
        slot = starts.index(latest_start)
        cohort = self._cohorts[slot]
        for _ in range(starts.count(latest_start) - 1):
            slot = starts.index(latest_start, slot + 1)
            cohort = max(cohort, self._cohorts[slot], key=self._retracts_before)
        slot, lengths = cohort.slot, cohort.group.lengths
        member = self._latest(cohort)
        cohort.members.remove(member)
        code = latest_start + lengths[member] << self._bits | slot
        del self.ends[bisect_left(self.ends, code)]
        self._subtract([code])
        if self._latest(cohort) < 0:
            self._close(cohort)
            return cohort, member, True
        longest = max([lengths[other] for other in cohort.members])
        self._lasts.remove(self._last[slot])
        self._last[slot] = latest_start + longest << self._bits | slot
        insort(self._lasts, self._last[slot])
        return cohort, member, False

    def _retracts_before(self, cohort: Cohort) -> tuple[int, int, int]:
        return (cohort.group.prompt_tokens, cohort.group.serial, self._latest(cohort))

    def _latest(self, cohort: Cohort) -> int:
        """The last running member, or -1."""
        lengths, done = cohort.group.lengths, self.step - cohort.start_step
        return max([member for member in cohort.members if lengths[member] > done], default=-1)

    def _subtract(self, codes: Sequence[int]) -> None:
        self._ahead = None
        self.sequences -= len(codes)
        for code in codes:
            self._origins -= self._origin[code & self._mask]
            self._owned -= self._own[code & self._mask]

    def _close(self, cohort: Cohort) -> None:
        slot, group = cohort.slot, cohort.group
        self._lasts.remove(self._last[slot])
        self._starts[slot] = NO_START
        self._free.append(slot)
        group.cohorts -= 1
        if self._sharing and not group.cohorts:
            self._prefixes -= group.prompt_tokens

    def _move_zero(self) -> None:
        by = self._step
        self._zero += by
        self._step = 0
        self.ends = [code - (by << self._bits) for code in self.ends]
        self._last = [code - (by << self._bits) for code in self._last]
        self._lasts = [code - (by << self._bits) for code in self._lasts]
        self._origin = [origin - by for origin in self._origin]
        self._own = [own - by for own in self._own]
        self._starts = [start if start == NO_START else start - by for start in self._starts]
        self._origins -= by * self.sequences
        self._owned -= by * self.sequences
        self._ahead = None

    # --- time ------------------------------------------------------------------------------------

    def next_change_s(self, *, any_end: bool) -> float:
        """When the next cohort ends (or any sequence, if `any_end`), or the cache is full."""
        ahead = self._ahead
        if ahead is None:
            if not self.ends:
                return math.inf
            ahead = self._first_end() if any_end else self._stride() or self._walk(math.inf)
            self._ahead = ahead
        return ahead[0]

    def forget_change(self) -> None:
        """Discard the stored look ahead."""
        self._ahead = None

    def go_to_change(self) -> tuple[list[Cohort], bool]:
        """Move to the next change; returns cohorts that ended, and whether the cache is full.

        If the cache is full, no cohort has ended.
        """
        ahead, ends = self._ahead, self.ends
        assert ahead is not None
        self.time_s, self._step, self.sequences, self._origins, self._owned, behind, event = ahead
        self._ahead = None
        if event == _ANY_ENDS and behind > 1:
            codes = ends[:behind]
            del ends[:behind]
            return self._ended_cohorts(codes), False
        if event == _FULL:
            del ends[:behind]
            return [], True
        # Only the last entry can be the last of a cohort.
        code = ends[behind - 1]
        del ends[:behind]
        slot = code & self._mask
        if code != self._last[slot]:
            return [], False
        cohort = self._cohorts[slot]
        self._close(cohort)
        return [cohort], False

    def end_step(self, now_s: float) -> list[Cohort]:
        """Move to the end of the step that runs at `now_s`, before the next change.

        Returns:
            Cohorts that ended with it.
        """
        self.settle(now_s)
        left_s = now_s - self.time_s
        if left_s <= 0 or not self.ends:
            return []
        sequences, context = self.sequences, self.context_tokens
        steps = self._decode.steps_within(sequences, context, left_s)
        taken_s = self._decode.steps_s(sequences, context, steps)
        step_s = self._decode.steps_s(sequences, context + steps * sequences, 1)
        if left_s - taken_s > _ROUNDING * step_s:
            steps, taken_s = steps + 1, taken_s + step_s
        self._step += steps
        # A step that ended a rounding error ago ends now.
        self.time_s = max(now_s, self.time_s + taken_s)
        count = bisect_left(self.ends, self._step + 1 << self._bits)
        ended = self.ends[:count]
        del self.ends[:count]
        self._subtract(ended)
        return self._ended_cohorts(ended)

    def settle(self, now_s: float) -> None:
        """Remove sequences that ended until `now_s`, before the next change."""
        if now_s > self.time_s and self.ends:
            self._arrive(self._walk(now_s))

    def at(self, now_s: float) -> tuple[int, int, int]:
        """Step, sequences and cached tokens at a time before the next change."""
        if now_s <= self.time_s or not self.ends:
            return self.step, self.sequences, self.cached_tokens
        time_s, step, sequences, origins, owned, _, _ = self._walk(now_s)
        context, left_s = sequences * step - origins, max(0.0, now_s - time_s)
        step += self._decode.steps_within(sequences, context, left_s)
        return self._zero + step, sequences, sequences * step - owned + self._prefixes

    def _arrive(self, ahead: _Ahead) -> None:
        self.time_s, self._step, self.sequences, self._origins, self._owned, behind, _ = ahead
        del self.ends[:behind]
        self._ahead = None

    def _ended_cohorts(self, codes: Sequence[int]) -> list[Cohort]:
        # Two members that end together have the same entry.
        last, mask = self._last, self._mask
        slots = dict.fromkeys([code & mask for code in codes if code == last[code & mask]])
        ended = [self._cohorts[slot] for slot in slots]
        for cohort in ended:
            self._close(cohort)
        return ended

    def _stride(self) -> _Ahead | None:
        r"""The batch when the next cohort has ended, by sums; None if `_walk` is needed.

        Sequence i of the m that end until then has x_i steps left at step s. All N sequences read

        $$ \sum_{i \le m} [x_i (s - o_i) + x_i (x_i - 1) / 2]
        + x_m (s (N - m) - O) + (N - m) x_m (x_m - 1) / 2 $$

        tokens, where O is the sum of the origins of the sequences that remain. In addition, each
        step of b sequences takes base(b): in total

        $$ x_m base(N - m + 1) + \sum_{i < m} x_i [base(N - i + 1) - base(N - i)]. $$

        If all steps are shorter than the engine's CPU time, they take that time instead, which
        grows with b as well.
        """
        ends, bits, now, sequences = self.ends, self._bits, self._step, self.sequences
        code = self._lasts[0]
        end = code >> bits
        # Upper bound: as if no sequence left before the last one does.
        if sequences * end - self._owned > self.cache_tokens - self._prefixes:
            return None
        costs, token_s, rise_s = self._costs, self._token_s, self._floor_rise_s
        base_s, mask, steps = costs.base_s, self._mask, end - now
        if len(base_s) <= sequences:
            costs.know(sequences)
        behind = bisect_right(ends, code)
        over, left = ends[:behind], sequences - behind
        if not costs.rising:
            return None
        slots = [one & mask for one in over]
        origins = list(map(self._origin.__getitem__, slots))
        lasting = self._origins - sum(origins)
        lasting_tokens = left * now - lasting
        least_s = self._floor_s + rise_s * (left + 1)
        if base_s[sequences] + token_s * (sequences * end - self._origins) <= least_s:
            spent_s = steps * least_s
            if rise_s:
                spent_s += rise_s * sum((one >> bits) - now for one in over[:-1])
        elif base_s[left + 1] + token_s * lasting_tokens >= self._floor_s + rise_s * sequences:
            to_go = [(one >> bits) - now for one in over]
            twice = 2 * now - 1
            read = sum([x * (x + twice - o - o) for x, o in zip(to_go, origins, strict=True)])
            read = (read + left * steps * (steps - 1)) // 2 + steps * lasting_tokens
            spent_s = token_s * read + steps * base_s[left + 1]
            spent_s += sum(map(mul, to_go, costs.rise_s[sequences : left + 1 : -1]))
        else:
            return None
        owned = self._owned - sum(map(self._own.__getitem__, slots))
        return (self.time_s + spent_s, end, left, lasting, owned, behind, _COHORT_ENDS)

    def _first_end(self) -> _Ahead:
        """The batch after the next sequence ended, with those that end in the same step."""
        ends, bits, step, sequences = self.ends, self._bits, self._step, self.sequences
        origins, owned, time_s = self._origins, self._owned, self.time_s
        code = ends[0]
        end = code >> bits
        if end != step:
            if len(self._costs.base_s) <= sequences:
                self._costs.know(sequences)
            room = self.cache_tokens - self._prefixes
            if sequences * end - owned > room:
                end = (room + owned) // sequences
                time_s += self._spent_s(sequences, origins, step, end)
                return (time_s, end, sequences, origins, owned, 0, _FULL)
            time_s += self._spent_s(sequences, origins, step, end)
        slot, following = code & self._mask, end + 1 << bits
        origins -= self._origin[slot]
        owned -= self._own[slot]
        behind = 1
        while behind < sequences and (code := ends[behind]) < following:
            slot = code & self._mask
            origins -= self._origin[slot]
            owned -= self._own[slot]
            behind += 1
        return (time_s, end, sequences - behind, origins, owned, behind, _ANY_ENDS)

    def _walk(self, until_s: float) -> _Ahead:
        """The batch at the next end of a cohort, or full cache, or after the last end until
        `until_s`, found end by end."""
        ends, origin, own, last = self.ends, self._origin, self._own, self._last
        bits, mask = self._bits, self._mask
        self._costs.know(self.sequences)
        room = self.cache_tokens - self._prefixes
        time_s, step, sequences = self.time_s, self._step, self.sequences
        origins, owned = self._origins, self._owned
        behind = 0
        for code in ends:
            end = code >> bits
            if end != step:
                full = sequences * end - owned > room
                if full:
                    end = (room + owned) // sequences
                spent_s = self._spent_s(sequences, origins, step, end)
                if time_s + spent_s > until_s:
                    return (time_s, step, sequences, origins, owned, behind, _NOTHING)
                time_s += spent_s
                step = end
                if full:
                    return (time_s, step, sequences, origins, owned, behind, _FULL)
            slot = code & mask
            cohort_ends = code == last[slot] and ends[behind + 1 : behind + 2] != [code]
            if cohort_ends and until_s < math.inf:
                # `_stride`, which rounds differently, puts this end just after `until_s`.
                return (time_s, step, sequences, origins, owned, behind, _NOTHING)
            behind += 1
            sequences -= 1
            origins -= origin[slot]
            owned -= own[slot]
            if cohort_ends:
                return (time_s, step, sequences, origins, owned, behind, _COHORT_ENDS)
        return (time_s, step, sequences, origins, owned, behind, _ANY_ENDS)

    def _spent_s(self, sequences: int, origins: int, step: int, end: int) -> float:
        """Seconds from `step` to `end`, until which no sequence leaves."""
        step_s, floor_s = self._costs.base_s[sequences], self._floor_s
        if rise_s := self._floor_rise_s:
            floor_s += rise_s * sequences
        if step_s + self._token_s * (sequences * end - origins) <= floor_s:
            return (end - step) * floor_s
        if step_s < floor_s:
            # Steps may wait for the engine's CPU.
            return self._decode.steps_s(sequences, sequences * step - origins, end - step)
        twice = sequences * (step + end - 1) - origins - origins
        return (end - step) * (step_s + self._token_s / 2 * twice)


class _BaseCosts:
    """Seconds of a step at context 0, by number of sequences; with CPU time unless overlapped."""

    __slots__ = ("_added_s", "_added_sequence_s", "_decode", "base_s", "rise_s", "rising")

    def __init__(self, decode: StepCost) -> None:
        self._decode = decode
        self._added_s = 0.0 if decode.overlap else decode.engine_s
        self._added_sequence_s = 0.0 if decode.overlap else decode.engine_sequence_s
        self.base_s = [0.0]
        self.rise_s = [0.0]
        """Difference to one sequence less."""
        self.rising = True
        """No step is shorter than a step of fewer sequences."""

    def know(self, sequences: int) -> None:
        """Compute the seconds for up to `sequences` sequences."""
        base_s = self.base_s
        for number in range(len(base_s), sequences + 1):
            added_s = self._added_s + self._added_sequence_s * number
            base_s.append(self._decode.base_s(number) + added_s)
            self.rise_s.append(base_s[-1] - base_s[-2])
            self.rising = self.rising and self.rise_s[-1] >= 0
