"""The sequences that decode together: when does a step end, and which sequences end with it.

    step         k             k + 31        k + 212           one integer per sequence, sorted:
    ends         .             a             b, c              the step that ends it, its cohort

Sequences that began together and have the same prompt form a cohort. One that had its first token
after step s has k - s tokens after step k, so that sums over N sequences need no work per token:

    context tokens = N k - sum(s - prompt)        read by every step
    cached tokens  = N k - sum(s) + prefixes      a prompt that is shared is cached once

Until the next sequence ends a step only gets longer by one token of context per sequence: m steps
are an arithmetic series. To look ahead is to walk along `ends` and add up; nothing is changed by it
before the time has come, since whatever happens in between (work, a pause) makes it void.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from simulator.versions import Epoch, Segments

_ROUNDING = 1e-6
"""Share of a step by which a moment may miss the end of a step and still be it: times are sums of
many floats."""


class StepCost(Protocol):
    """What decode steps cost; `simulator.decode_cost.DecodeCost` is the real one."""

    @property
    def engine_s(self) -> float:
        """CPU time of the engine per step."""
        ...

    @property
    def overlap(self) -> bool:
        """A step takes the longer of CPU and GPU, instead of their sum."""
        ...

    @property
    def context_token_s(self) -> float:
        """GPU seconds of a step per token of context."""
        ...

    def base_s(self, sequences: int, /) -> float:
        """GPU seconds of a step at context 0."""
        ...

    def steps_s(self, sequences: int, context_tokens: float, steps: int, /) -> float:
        """Seconds of so many steps, during which nobody joins or leaves."""
        ...

    def steps_within(self, sequences: int, context_tokens: float, seconds: float, /) -> int:
        """Whole steps that are done after so many seconds."""
        ...


class Group:
    """A prompt and the answers to it that are being generated."""

    __slots__ = ("cohorts", "lengths", "number", "prompt_tokens", "results", "serial")

    def __init__(
        self, number: int, serial: int, prompt_tokens: int, lengths: Sequence[int]
    ) -> None:
        self.number = number
        self.serial = serial  # in order of submission
        self.prompt_tokens = prompt_tokens
        self.lengths = lengths
        self.cohorts: list[Cohort] = []  # that decode; while there are any the prompt is cached
        self.results: dict[int, Segments] = {}  # by place, of answers that ended


class Cohort:
    """Sequences of one group that decode in step: equal prompts, equal numbers of tokens so far."""

    __slots__ = ("epoch", "group", "members", "past", "slot", "start_step")

    def __init__(
        self, group: Group, members: list[int], start_step: int, epoch: Epoch, past: Segments
    ) -> None:
        self.group = group
        self.members = members  # places in group.lengths, ascending; those that ended stay
        self.start_step = start_step  # before its first token, as if it had never been interrupted
        self.epoch = epoch
        self.past = past  # what it generated before it last began
        self.slot = -1


_Ahead: TypeAlias = tuple[float, int, int, int, int, int, bool]
"""The batch at a later time: time, step, sequences and both sums; how many entries of `ends` are
behind; whether another step would not fit into the cache. No record: there is one per event."""


class DecodeBatch:
    """See the module's text. `time_s` is the time of `step`: all of it until then has happened.

    `time_s` may lie ahead, where something must be over before the next step: the step that runs
    when the batch is to change, or a prefill.
    """

    __slots__ = (
        *("_ahead", "_base_s", "_bits", "_cohorts", "_decode", "_floor_s", "_free", "_last"),
        *("_mask", "_origin", "_origins", "_own", "_owned", "_prefixes", "_sharing", "_starts"),
        *("_token_s", "cache_tokens", "ends", "sequences", "step", "time_s"),
    )

    def __init__(
        self, decode: StepCost, *, max_running: int, cache_tokens: int, prefix_sharing: bool
    ) -> None:
        self.cache_tokens = cache_tokens
        self.step = 0
        self.time_s = 0.0
        self.sequences = 0
        self.ends: list[int] = []
        self._starts: list[int] = []  # like `ends`, of cohorts
        self._origins = 0  # sum of s - prompt
        self._owned = 0  # sum of s, or of s - prompt where prompts are not shared
        self._prefixes = 0  # prompts that are cached for a whole group
        self._sharing = prefix_sharing
        self._ahead: _Ahead | None = None
        self._decode = decode
        self._token_s = decode.context_token_s
        self._floor_s = decode.engine_s if decode.overlap else 0.0
        self._base_s = _StepBase(decode)
        # By slot of a cohort; a cohort has at least one running sequence.
        self._bits = max_running.bit_length()
        self._mask = (1 << self._bits) - 1
        self._free = list(range(max_running - 1, -1, -1))
        self._cohorts: list[Cohort | None] = [None] * max_running
        self._origin = [0] * max_running
        self._own = [0] * max_running
        self._last = [0] * max_running  # of its entries in `ends`

    # --- what there is ---------------------------------------------------------------------------

    @property
    def context_tokens(self) -> int:
        """That the next step reads."""
        return self.sequences * self.step - self._origins

    @property
    def cached_tokens(self) -> int:
        """Tokens of the KV cache in use."""
        return self.sequences * self.step - self._owned + self._prefixes

    @property
    def ends_now(self) -> bool:
        """Whether a sequence that has ended has not left yet."""
        return bool(self.ends) and self.ends[0] >> self._bits == self.step

    def cohorts(self) -> Iterator[tuple[Cohort, int]]:
        """Each with how many of its sequences have not ended."""
        slots = Counter([code & self._mask for code in self.ends])
        for slot, running in slots.items():
            yield self._cohort(slot), running

    def check(self) -> None:
        """Assert that the sums are those of the sequences; for tests."""
        origins = owned = prefixes = 0
        groups = set()
        for cohort, running in self.cohorts():
            group, origin = cohort.group, cohort.start_step - cohort.group.prompt_tokens
            origins += running * origin
            owned += running * (cohort.start_step if self._sharing else origin)
            codes = [code for code in self.ends if code & self._mask == cohort.slot]
            assert self._last[cohort.slot] == max(codes)
            assert cohort in group.cohorts
            if group not in groups:
                groups.add(group)
                prefixes += group.prompt_tokens if self._sharing else 0
        assert (origins, owned, prefixes) == (self._origins, self._owned, self._prefixes)
        assert self.sequences == len(self.ends) <= len(self._last)
        assert self.ends == sorted(self.ends)
        assert not self.ends or self.ends[0] >> self._bits >= self.step
        assert self._starts == sorted(self._starts)
        assert len(self._starts) + len(self._free) == len(self._last)
        assert 0 <= self.cached_tokens <= self.cache_tokens

    def _cohort(self, slot: int) -> Cohort:
        cohort = self._cohorts[slot]
        assert cohort is not None
        return cohort

    # --- joining and leaving ---------------------------------------------------------------------

    def join(self, cohort: Cohort) -> None:
        """Let a cohort decode from now on. It has tokens left to generate."""
        group, start, bits = cohort.group, cohort.start_step, self._bits
        cohort.slot = slot = self._free.pop()
        self._cohorts[slot] = cohort
        origin = self._origin[slot] = start - group.prompt_tokens
        if self._sharing:
            self._own[slot] = own = start
            if not group.cohorts:
                self._prefixes += group.prompt_tokens
        else:
            self._own[slot] = own = origin
        group.cohorts.append(cohort)
        first = start << bits | slot
        insort(self._starts, first)
        lengths, members, ends = group.lengths, cohort.members, self.ends
        if len(members) == 1:
            self._last[slot] = code = first + (lengths[members[0]] << bits)
            insort(ends, code)
            self.sequences += 1
            self._origins += origin
            self._owned += own
        else:
            if len(members) == len(lengths):
                codes = [first + (length << bits) for length in lengths]
            else:
                codes = [first + (lengths[member] << bits) for member in members]
            count = len(codes)
            self._last[slot] = max(codes)
            ends += codes
            ends.sort()
            self.sequences += count
            self._origins += count * origin
            self._owned += count * own
        self._ahead = None

    def remove(self, cohorts: Iterable[Cohort]) -> None:
        """Take out what still runs of these cohorts."""
        slots = {cohort.slot for cohort in cohorts}
        gone = [code for code in self.ends if code & self._mask in slots]
        self.ends = [code for code in self.ends if code & self._mask not in slots]
        self._subtract(gone)
        for slot in slots:
            self._close(slot)

    def retract(self) -> tuple[Cohort, int, bool]:
        """Take out the running sequence that loses the fewest tokens.

        Among equals the one with the longest prompt, which frees most; then the latest.

        Returns:
            Its cohort, its place in the group, and whether nothing of its cohort runs any more.
        """
        bits, mask, starts = self._bits, self._mask, self._starts
        slot = starts[-1] & mask
        equals = starts[bisect_left(starts, starts[-1] >> bits << bits) :]
        if len(equals) > 1:
            slot = max([code & mask for code in equals], key=self._retracts_after)
        cohort = self._cohort(slot)
        member = self._latest(cohort)
        cohort.members.remove(member)
        code = cohort.start_step + cohort.group.lengths[member] << bits | slot
        del self.ends[bisect_left(self.ends, code)]
        self._subtract([code])
        latest = self._latest(cohort)
        if latest < 0:
            self._close(slot)
        else:
            longest = max([cohort.group.lengths[other] for other in cohort.members])
            self._last[slot] = cohort.start_step + longest << bits | slot
        return cohort, member, latest < 0

    def _retracts_after(self, slot: int) -> tuple[int, int, int]:
        cohort = self._cohort(slot)
        return (cohort.group.prompt_tokens, cohort.group.serial, self._latest(cohort))

    def _latest(self, cohort: Cohort) -> int:
        """The last of its members that runs, or -1."""
        lengths, done = cohort.group.lengths, self.step - cohort.start_step
        return max([member for member in cohort.members if lengths[member] > done], default=-1)

    def _subtract(self, codes: Sequence[int]) -> None:
        self._ahead = None
        self.sequences -= len(codes)
        for code in codes:
            self._origins -= self._origin[code & self._mask]
            self._owned -= self._own[code & self._mask]

    def _close(self, slot: int) -> Cohort:
        """Give the cohort's slot back, and its prompt if nobody needs it any more."""
        cohort = self._cohort(slot)
        self._cohorts[slot] = None
        self._free.append(slot)
        del self._starts[bisect_left(self._starts, cohort.start_step << self._bits | slot)]
        group = cohort.group
        group.cohorts.remove(cohort)
        if self._sharing and not group.cohorts:
            self._prefixes -= group.prompt_tokens
        return cohort

    # --- time ------------------------------------------------------------------------------------

    def next_change_s(self, *, any_end: bool) -> float:
        """When a cohort has ended (any sequence, if `any_end`) or the cache is full."""
        ahead = self._ahead
        if ahead is None:
            if not self.ends:
                return math.inf
            ahead = self._ahead = self._walk(math.inf, any_end)
        return ahead[0]

    def forget_change(self) -> None:
        """What `next_change_s` asks for has changed."""
        self._ahead = None

    def go_to_change(self) -> tuple[list[Cohort], bool]:
        """Let the time of the next change come: cohorts that ended, and whether the cache is full.

        Where the cache is full, no cohort has ended.
        """
        ahead = self._ahead
        assert ahead is not None
        return self._ended_cohorts(self._arrive(ahead)), ahead[6]

    def end_step(self, now_s: float) -> list[Cohort]:
        """Let the step that runs at `now_s`, before the next change, come to its end.

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
        self.step += steps
        # A step that ended a rounding error ago ends now.
        self.time_s = max(now_s, self.time_s + taken_s)
        count = bisect_left(self.ends, self.step + 1 << self._bits)
        ended = self.ends[:count]
        del self.ends[:count]
        self._subtract(ended)
        return self._ended_cohorts(ended)

    def settle(self, now_s: float) -> None:
        """Count sequences that ended until `now_s`, before the next change, as ended."""
        if now_s > self.time_s and self.ends:
            self._arrive(self._walk(now_s, any_end=False))

    def at(self, now_s: float) -> tuple[int, int, int]:
        """Step, sequences and cached tokens at a time before the next change."""
        if now_s <= self.time_s or not self.ends:
            return self.step, self.sequences, self.cached_tokens
        time_s, step, sequences, origins, owned, _, _ = self._walk(now_s, any_end=False)
        context, left_s = sequences * step - origins, max(0.0, now_s - time_s)
        step += self._decode.steps_within(sequences, context, left_s)
        return step, sequences, sequences * step - owned + self._prefixes

    def _arrive(self, ahead: _Ahead) -> list[int]:
        """The batch is now as `ahead` says; returns the entries of `ends` that are behind."""
        self.time_s, self.step, self.sequences, self._origins, self._owned, behind, _ = ahead
        ended = self.ends[:behind]
        del self.ends[:behind]
        self._ahead = None
        return ended

    def _ended_cohorts(self, codes: Sequence[int]) -> list[Cohort]:
        """Close the cohorts whose last entry is among these."""
        last, mask = self._last, self._mask
        closed: list[Cohort] = []
        previous = -1
        for code in codes:
            # Two members that end together have the same entry.
            if code == last[code & mask] and code != previous:
                closed.append(self._close(code & mask))
            previous = code
        return closed

    def _walk(self, until_s: float, any_end: bool) -> _Ahead:
        """The batch at its next change, or after the last end until `until_s`.

        This is where a simulation spends its time: one turn of the loop per sequence.
        """
        ends, origin, own, last = self.ends, self._origin, self._own, self._last
        bits, mask, base_s, floor_s = self._bits, self._mask, self._base_s, self._floor_s
        half_token_s, room = self._token_s / 2, self.cache_tokens - self._prefixes
        time_s, step, sequences = self.time_s, self.step, self.sequences
        origins, owned = self._origins, self._owned
        behind = 0
        for code in ends:
            end = code >> bits
            if end != step:
                if any_end and behind:
                    break
                full = sequences * end - owned > room
                if full:
                    end = (room + owned) // sequences
                step_s = base_s[sequences]
                if step_s < floor_s:
                    # Steps may wait for the engine's CPU.
                    context = sequences * step - origins
                    spent_s = self._decode.steps_s(sequences, context, end - step)
                else:
                    twice = sequences * (step + end - 1) - 2 * origins
                    spent_s = (end - step) * (step_s + half_token_s * twice)
                if time_s + spent_s > until_s:
                    break
                time_s += spent_s
                step = end
                if full:
                    return (time_s, step, sequences, origins, owned, behind, True)
            behind += 1
            sequences -= 1
            slot = code & mask
            origins -= origin[slot]
            owned -= own[slot]
            if code == last[slot] and not any_end and ends[behind : behind + 1] != [code]:
                break
        return (time_s, step, sequences, origins, owned, behind, False)


class _StepBase(dict[int, float]):
    """Seconds of a step at context 0, by number of sequences; the engine's where it adds to them.

    A dictionary that fills itself: a hit costs no call.
    """

    def __init__(self, decode: StepCost) -> None:
        super().__init__()
        self._decode = decode
        self._added_s = 0.0 if decode.overlap else decode.engine_s

    def __missing__(self, sequences: int) -> float:
        seconds = self[sequences] = self._decode.base_s(sequences) + self._added_s
        return seconds
