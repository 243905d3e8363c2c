"""One inference server as a state machine: continuous batching, a bounded KV cache, interruptions.

    submit --> queue --admission--> prefill --> decode --> GroupDone
                 ^                                |
                 +---- preempted: cache full -----+      pause / resume: kept, prefilled again

    when                                        then
    a decode step or a prefill ends             the queue is admitted first, then decode continues
    the cache is full                           sequences with the fewest tokens are preempted
    pause, drop, fail, work for a free slot     the running step ends first
    pause or fail during a prefill              the prefill stops at once
    resume after new weights                    every context is prefilled again (recompute), or not

Time is an argument: the owner asks `next_s` and calls `advance` at that time. Only a change of the
batch's composition costs an event, a decode step does not (`simulator.engine.decode_batch`).

Scheduling follows SGLang 0.5: first come, first served; prefill before decode; cache is reserved
for running and newly admitted sequences; sequences with the fewest generated tokens are retracted
until there is room for 20 steps, and go to the end of the queue; an interrupted step ends, and its
tokens count. Four things are simpler. A prefill generates no token, it only fills the cache. An
interrupted prefill stops within its chunk, not after it (under 0.1 s). Sequences that ran when the
engine was paused continue before those that waited; SGLang puts them behind. And the reserve for
running sequences does not grow after a retraction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from areal_lab.control.events import GroupId, Version
from simulator.costs.prefill import causal_pairs
from simulator.engine.clock import Clock, RecordSpan
from simulator.engine.decode_batch import DecodeBatch, StepCost
from simulator.engine.sequences import (
    Cohort,
    Decoded,
    Ended,
    Epoch,
    Group,
    KeptContexts,
    Queued,
    Segments,
    decoded,
    segments,
)

IDLE = "idle"
DECODE = "decode"
PREFILL = "prefill"
RECOMPUTE = "recompute"
PAUSED = "paused"
ACTIVITIES = (IDLE, DECODE, PREFILL, RECOMPUTE, PAUSED)
NOT_WORK = frozenset({IDLE, PAUSED})
"""Activities in which an engine does no work; the cause follows from the state of the run."""

RESERVE_RUNNING_TOKENS = 401
"""Cache tokens reserved for each running sequence when others are admitted.

SGLang keeps `new_token_ratio` times what it may still generate, at most 4,096 tokens; the ratio
falls from 0.7 to 0.7 * 0.14 within 600 steps (SGLang 0.5, `schedule_policy.py`, `environ.py`).
"""
RESERVE_NEW_TOKENS = 4096
"""Reserved tokens of each newly admitted sequence: SGLang's clip of `max_new_tokens`."""
RETRACT_STEPS = 20
"""Steps for which a retraction must make room (SGLang 0.5, `environ.py`)."""

_CLOCK_ROUNDING = 1e-9
"""Relative error by which the clock may go back: timers are set by differences of times."""


class PrefillSeconds(Protocol):
    """Cost of a prefill, such as `simulator.costs.prefill.PrefillCost`."""

    def seconds(self, new_tokens: int, pairs: float, /) -> float:
        """Seconds for the new tokens and (query, key) pairs of attention of all sequences."""
        ...


class GroupDone(NamedTuple):
    """A group whose responses have all ended."""

    group: GroupId
    time_s: float
    lengths: Sequence[int]
    ended: Sequence[Ended]

    @property
    def segments(self) -> tuple[Segments, ...]:
        """(version, tokens) of each response, in the order of the lengths."""
        return segments(self.ended, self.lengths)

    @property
    def decoded(self) -> list[Decoded]:
        """The segments, with responses that decoded together in one entry."""
        return decoded(self.ended, self.lengths)


class ReplicaSettings(NamedTuple):
    """Costs and sizes of an engine; see `Replica`."""

    decode: StepCost
    prefill: PrefillSeconds
    max_running: int
    cache_tokens: int
    prefix_sharing: bool = True
    reserve_running_tokens: int = RESERVE_RUNNING_TOKENS
    reserve_new_tokens: int = RESERVE_NEW_TOKENS


class Replica:
    """An inference server in simulated time; see the module docstring.

    Args:
        decode: cost of decode steps.
        prefill: cost of prefilling prompts, and contexts that an interruption discarded.
        max_running: sequences that decode at the same time.
        cache_tokens: size of the KV cache.
        prefix_sharing: responses to one prompt share its prefill and its cache, from the first that
            is admitted until none is running.
        record_spans: receives `name, start_s, end_s` of everything the engine did.
        reserve_running_tokens: cache reserved for each running sequence when others are admitted.
        reserve_new_tokens: free cache, beyond its context, that a sequence needs to be admitted.
    """

    def __init__(
        self,
        *,
        decode: StepCost,
        prefill: PrefillSeconds,
        max_running: int,
        cache_tokens: int,
        prefix_sharing: bool = True,
        record_spans: RecordSpan | None = None,
        reserve_running_tokens: int = RESERVE_RUNNING_TOKENS,
        reserve_new_tokens: int = RESERVE_NEW_TOKENS,
    ) -> None:
        for name, value in (
            ("max_running", max_running),
            ("cache_tokens", cache_tokens),
            ("reserve_running_tokens", reserve_running_tokens),
            ("reserve_new_tokens", reserve_new_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, but must be >= 1")
        self.max_running = max_running
        self.cache_tokens = cache_tokens
        self.recomputed_tokens = 0
        """Prefilled again after an interruption or a preemption."""
        self.preemptions = 0
        """Sequences that were sent back to the queue because the cache was full."""
        self._cost = prefill
        self._sharing = prefix_sharing
        self._reserve_running = reserve_running_tokens
        self._reserve_new = reserve_new_tokens
        self._batch = DecodeBatch(
            decode,
            max_running=max_running,
            cache_tokens=cache_tokens,
            prefix_sharing=prefix_sharing,
        )
        self._activity = Clock(IDLE, record_spans)
        self._now_s = 0.0
        self._groups: dict[GroupId, Group] = {}
        self._kept = KeptContexts()
        self._serial = 0
        self._queue: deque[Queued] = deque()
        self._epoch = Epoch(-1, 0)
        self._done: list[GroupDone] = []
        self._by_sample = False
        self._ended_samples: list[tuple[float, GroupId, int]] = []  # by time
        self._ended_tokens = 0  # of groups that are done, dropped or lost
        self._admission_due = False  # at the batch's time, because something has changed
        self._reading = False  # a prefill runs until the batch's time
        # Sequences that joined last, when, and what is prefilled for them; more may join then.
        self._joined_s = -math.inf
        self._joined = 0
        self._read_tokens = 0
        self._read_pairs = 0
        self._read_again = 0  # tokens, of preempted sequences
        self._last_read, self._last_read_s = (0, 0), 0.0  # tokens and pairs of the last prefill
        self._paused = False
        self._stopped: tuple[str, float] | None = None  # rest of a prefill, while paused

    # --- state -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences in the batch, those being prefilled included."""
        return self._look()[1]

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return sum([len(queued.members) for queued in self._queue])

    @property
    def decode_steps(self) -> int:
        """Since the start; generated tokens divided by these is the mean batch size."""
        return self._look()[0]

    @property
    def cache_used_tokens(self) -> int:
        """Tokens in the KV cache."""
        return self._look()[2]

    @property
    def generated_tokens(self) -> int:
        """Since the start, those of dropped and lost groups included."""
        return self._ended_tokens + self._unfinished_tokens(self._look()[0])

    @property
    def activity_s(self) -> dict[str, float]:
        """Seconds by activity until the latest call, or the end of the step that runs then."""
        self._run(self._now_s)
        return dict.fromkeys(ACTIVITIES, 0.0) | self._activity.read(self._now_s)

    # --- time ------------------------------------------------------------------------------------

    def next_s(self) -> float:
        """When `advance` has something to do next; infinite if the engine has no work."""
        batch = self._batch
        if (self._admission_due or self._reading) and batch.time_s <= self._now_s:
            self._run(self._now_s)
        if self._ended_samples or self._done:  # a sample ends before its group, or with it
            known_s = self._ended_samples[0][0] if self._ended_samples else self._done[0].time_s
            return max(known_s, self._now_s)
        if self._paused:
            return math.inf
        if self._admission_due:
            return batch.time_s
        if not self._queue:
            return batch.next_change_s(any_end=False)
        if self._reading and batch.sequences < self.max_running:
            return batch.time_s  # Prefilled sequences reserve less cache: more may join.
        return batch.next_change_s(any_end=True)

    def advance(self, now_s: float) -> list[GroupDone]:
        """Move the time to `now_s`; returns the groups that ended until then."""
        now_s = self._clock(now_s)
        self._run(now_s)
        if not self._done:
            return []
        done = self._done
        if done[-1].time_s <= now_s:
            self._done = []
            return done
        self._done = [one for one in done if one.time_s > now_s]
        return [one for one in done if one.time_s <= now_s]

    def report_samples(self) -> None:
        """From now on, keep the end of each sample for `ended_samples`.

        Each sample is a cohort, so that its end is a change of the batch.
        """
        self._by_sample = True

    def ended_samples(self, now_s: float) -> list[tuple[GroupId, int]]:
        """Groups and numbers of their samples that ended until `now_s`, each once; after
        `advance`."""
        ended: dict[GroupId, int] = {}
        for time_s, group, samples in self._ended_samples:
            if time_s <= now_s:
                ended[group] = ended.get(group, 0) + samples
        if ended:
            self._ended_samples = [one for one in self._ended_samples if one[0] > now_s]
        return list(ended.items())

    # --- commands --------------------------------------------------------------------------------

    def submit(
        self,
        now_s: float,
        group: GroupId,
        prompt_tokens: int,
        lengths: Sequence[int],
        version: Version,
    ) -> None:
        """Generate responses of given lengths to a prompt; while paused, queue them.

        Args:
            group: any number that is not in use on this engine.
            prompt_tokens: length of the prompt that all responses share.
            lengths: tokens of each response, which the engine uses only to end it.
            version: lower bound of the version that the engine holds. An engine without work takes
                this version.
        """
        now_s = self._clock(now_s)
        self._check(group, prompt_tokens, lengths)
        if self._batch.time_s < now_s or not self._batch.nothing_known:
            self._run(now_s, more_to_come=True)
        epoch = self._epoch
        if version > epoch.version:
            if self._groups:
                raise ValueError(
                    f"version is {version}, but the engine is generating with {epoch.version}; "
                    "load new weights with pause and resume"
                )
            self._epoch = epoch.change(version, self._batch.step)
        one = self._groups[group] = Group(group, self._serial, prompt_tokens, lengths)
        self._serial += 1
        # Behind others in the queue it changes nothing.
        if not self._queue and not self._paused:
            batch = self._batch
            if self._joined_s == now_s:
                # It arrives in time for the prefill that begins now.
                batch.time_s = now_s
                self._reading = False
                self._admission_due = True
            else:
                batch.settle(now_s)
                if batch.sequences < self.max_running:
                    if batch.time_s < now_s:
                        self._end_step(now_s)
                    self._admission_due = True
            batch.forget_change()
        self._queue.append(Queued(one, list(range(len(lengths))), 0, ()))

    def keep(self, key: Hashable, tokens: int) -> None:
        """A sequence has ended: leave its context in the cache until the room is needed.

        Args:
            key: by which `begin_with` finds it; new weights and failures make it unknown.
        """
        self._kept.keep(key, tokens, self.cache_tokens - self._batch.cached_tokens)

    def begin_with(self, group: GroupId, key: Hashable, *, shared: bool = False) -> None:
        """The prompt of a group that was just submitted begins with the context of `key`.

        What is left of it when the group is admitted is not read again.

        Args:
            shared: the prompt is the context of `key`, for this group and others: the first of them
                reads it.
        """
        one = self._groups[group]
        if len(one.lengths) != 1 or one.cohorts:
            raise ValueError(f"group {group} must be new and have one response")
        one.begins_with = (key, shared)

    def pause(self, now_s: float) -> None:
        """Stop after the running step, and keep unfinished work. No effect if paused already."""
        now_s = self._clock(now_s)
        self._run(now_s, more_to_come=True)
        if self._paused:
            return
        batch, clock = self._batch, self._activity
        if self._reading:
            # The prefill begins later if a step has to end first.
            stops_s = max(now_s, clock.since_s)
            self._stopped = (clock.state, batch.time_s - stops_s)
            batch.time_s = stops_s
            self._reading = False
        else:
            self._end_step(now_s)
        self._paused = True
        clock.set(batch.time_s, PAUSED)

    def resume(self, now_s: float, version: Version, *, recompute: bool = True) -> None:
        """Continue under the weights of `version`.

        Args:
            version: version that the engine now holds.
            recompute: drop the cache, and prefill every context again under the new weights
                (SGLang: pause mode `retract`, then a flush). False keeps the old cache
                (`in_place`).
        """
        now_s = self._clock(now_s)
        if not self._paused:
            raise ValueError("the engine is not paused; call pause before resume")
        batch = self._batch
        if version != self._epoch.version:
            self._epoch = self._epoch.change(version, batch.step)
        stopped, self._stopped = self._stopped, None
        if recompute:
            stopped = None
            self._kept.clear()
            if batch.sequences:
                tokens, pairs = self._contexts()
                self.recomputed_tokens += tokens
                stopped = (RECOMPUTE, self._cost.seconds(tokens, pairs))
        batch.time_s = max(now_s, batch.time_s)
        activity, left_s = stopped or (DECODE if batch.sequences else IDLE, 0.0)
        self._activity.set(batch.time_s, activity)
        batch.time_s += left_s
        self._reading = stopped is not None
        self._paused = False
        self._admission_due = bool(self._queue)
        self._joined_s = -math.inf
        batch.forget_change()

    def drop(self, now_s: float, group: GroupId) -> int:
        """Drop a group; returns its generated tokens, 0 if the engine does not have it."""
        now_s = self._clock(now_s)
        self._run(now_s, more_to_come=True)
        if group in self._groups and not self._paused:
            self._end_step(now_s)
        if self._ended_samples:
            self._ended_samples = [one for one in self._ended_samples if one[1] != group]
        for done in self._done:
            if done.group == group:
                self._done.remove(done)
                return sum(done.lengths)
        if group not in self._groups:
            return 0
        batch, queue = self._batch, self._queue
        before = self._unfinished_tokens(batch.step)
        one = self._groups.pop(group)
        self._queue = deque([item for item in queue if item.group is not one])
        batch.remove(one)
        self._joined_s = -math.inf
        tokens = before - self._unfinished_tokens(batch.step)
        self._ended_tokens += tokens
        if not self._paused:
            self._after_change()
        return tokens

    def fail(self, now_s: float) -> list[GroupId]:
        """Lose everything; returns the lost groups. Work may be submitted afterwards.

        The running step counts as done, but groups that it ends are lost as well. Groups that ended
        before are not lost: `advance` still returns them.
        """
        now_s = self._clock(now_s)
        self._run(now_s, more_to_come=True)
        batch = self._batch
        if self._reading:
            batch.time_s = max(now_s, self._activity.since_s)
        elif not self._paused:
            self._end_step(now_s)
        lost = [done.group for done in self._done if done.time_s > now_s]
        self._done = [done for done in self._done if done.time_s <= now_s]
        self._ended_tokens += self._unfinished_tokens(batch.step)
        for one in self._groups.values():
            batch.remove(one)
        batch.time_s = max(now_s, batch.time_s)
        lost += self._groups
        self._groups.clear()
        self._ended_samples.clear()
        self._queue.clear()
        self._kept.clear()
        self._paused = self._reading = self._admission_due = False
        self._stopped = None
        self._joined_s = -math.inf
        self._activity.set(batch.time_s, IDLE)
        return sorted(lost)

    # --- while paused ----------------------------------------------------------------------------

    def tokens_of(self, group: GroupId) -> list[int]:
        """Tokens of each response of a group so far; all of them if it has ended."""
        for done in self._done:
            if done.group == group:
                return list(done.lengths)
        one = self._paused_group(group)
        tokens = self._batch.tokens_of(one)
        for *_, members in one.ended:
            tokens |= {member: one.lengths[member] for member in members}
        for item in self._queue:
            if item.group is one:
                tokens |= dict.fromkeys(item.members, item.done)
        return [tokens[member] for member in range(len(one.lengths))]

    def revise(self, group: GroupId, lengths: Sequence[int]) -> None:
        """Replace the lengths of a group's responses, since other weights end them elsewhere."""
        done, before = self.tokens_of(group), None
        for one in self._done:
            if one.group == group:
                before = one.lengths
        if before is None:
            before = self._paused_group(group).lengths
        for member, (old, new, tokens) in enumerate(zip(before, lengths, done, strict=True)):
            if (old == tokens != new) or (old > tokens >= new):
                raise ValueError(
                    f"response {member} of group {group} has {tokens} of {old} tokens, but would "
                    f"have a length of {new}; ended ones keep theirs, others need more than they "
                    "have"
                )
        if group not in self._groups or list(before) == list(lengths):
            return
        one_group = self._groups[group]
        self._check_fits(group, one_group.prompt_tokens, lengths)
        self._batch.revise(one_group, lengths)

    def _paused_group(self, group: GroupId) -> Group:
        if not self._paused:
            raise ValueError("the engine is not paused; call pause first")
        if group not in self._groups:
            raise ValueError(f"group {group} is not on this engine")
        return self._groups[group]

    # --- scheduling ------------------------------------------------------------------------------

    def _clock(self, now_s: float) -> float:
        if now_s >= self._now_s:
            self._now_s = now_s
        elif not self._now_s - now_s <= _CLOCK_ROUNDING * self._now_s:
            raise ValueError(
                f"the time is {now_s} s, but must be >= {self._now_s} s, the latest time"
            )
        return self._now_s

    def _run(self, now_s: float, *, more_to_come: bool = False) -> None:
        """Process everything until `now_s`.

        Args:
            more_to_come: the owner has another command at this time, so admission waits.
        """
        batch = self._batch
        while batch.time_s <= now_s and not self._paused:
            if self._reading:
                self._reading = False
                self._activity.set(batch.time_s, DECODE if batch.sequences else IDLE)
                if self._queue:
                    self._admission_due = True
                    self._joined_s = -math.inf
            if self._admission_due:
                if more_to_come and batch.time_s == now_s != self._joined_s:
                    return
                self._admit()
            elif batch.time_s == now_s and batch.nothing_known:
                return  # Work may arrive at this time: it is too early to look ahead.
            elif batch.next_change_s(any_end=bool(self._queue)) > now_s:
                return
            else:
                ended, full = batch.go_to_change()
                for cohort in ended:
                    self._finish(cohort)
                if full:
                    self._retract()
                elif self._queue:
                    self._admission_due = True
                elif not batch.sequences:
                    self._after_change()

    def _end_step(self, now_s: float) -> None:
        batch = self._batch
        if batch.ends:
            for cohort in batch.end_step(now_s):
                self._finish(cohort)
            self._after_change()
        elif batch.time_s < now_s:
            batch.time_s = now_s

    def _after_change(self) -> None:
        """Admit others, or become idle, after sequences left the batch."""
        if self._queue:
            self._admission_due = True
        elif not self._batch.sequences and not self._reading:
            self._activity.set(self._batch.time_s, IDLE)

    def _admit(self) -> None:
        """Admit sequences from the queue, first come, first served, and start their prefill."""
        batch, queue, reserve = self._batch, self._queue, self._reserve_new
        time_s, sequences = batch.time_s, batch.sequences
        joined = self._joined if time_s == self._joined_s else 0
        free = self.cache_tokens - batch.cached_tokens
        free -= self._reserve_running * (sequences - joined) + reserve * joined
        self._admission_due = False
        step, max_running = batch.step, self.max_running
        while queue and sequences < max_running:
            item = queue[0]
            group, done = item.group, item.done
            # Tokens to prefill once for the group, and for each of its sequences.
            once, each, cached = group.prompt_tokens, done, group.prompt_tokens
            if not self._sharing:
                once, each, cached = 0, once + done, 0
            elif group.cohorts:
                once = 0
            count = (free - once) // (each + reserve)
            if count < 1:
                if sequences:
                    break
                count = 1  # It fits when alone: `submit` has checked that.
            members = item.take(min(count, max_running - sequences))
            count = len(members)
            if not item.members:
                queue.popleft()
            if not joined:
                self._joined_s = time_s
                self._read_tokens = self._read_pairs = self._read_again = 0
            known = self._known(group) if group.begins_with else 0
            for cohort in [[one] for one in members] if self._by_sample else [members]:
                batch.join(group, cohort, step - done, self._epoch, item.past)
            free -= once + count * (each + reserve)
            sequences += count
            joined += count
            if known:
                once, each, cached = 0, group.prompt_tokens - known + done, known
            if once or each:
                pairs = count * causal_pairs(each, cached) if each else 0
                self._read(once + count * each, causal_pairs(once) + pairs, again=bool(done))
        if joined:
            self._begin_reading(time_s, joined)

    def _known(self, group: Group) -> int:
        """Tokens of a prompt that need not be read."""
        assert group.begins_with is not None
        (key, shared), group.begins_with = group.begins_with, None
        room = self.cache_tokens - self._batch.cached_tokens
        known = min(self._kept.find(key, room), group.prompt_tokens)
        if shared:
            self._kept.keep(key, group.prompt_tokens, room - group.prompt_tokens)
        else:
            self._kept.forget(key)  # a running sequence has it
        return known

    def _read(self, tokens: int, pairs: int, *, again: bool) -> None:
        self._read_tokens += tokens
        self._read_pairs += pairs
        if again:
            self._read_again += tokens
            self.recomputed_tokens += tokens

    def _begin_reading(self, time_s: float, joined: int) -> None:
        """Start the prefill of the sequences that joined, or decode if there is nothing to read."""
        batch = self._batch
        self._joined = joined
        if self._kept.tokens:
            self._kept.make_room(self.cache_tokens - batch.cached_tokens)
        if self._read_tokens:
            again = self._read_again == self._read_tokens
            self._activity.set(time_s, RECOMPUTE if again else PREFILL)
            batch.time_s = time_s + self._reading_s()
            self._reading = True
        elif self._activity.state != DECODE:
            self._activity.set(time_s, DECODE)

    def _reading_s(self) -> float:
        """Duration of the prefill; cached, as prompts often have the same length."""
        read = (self._read_tokens, self._read_pairs)
        if read != self._last_read:
            self._last_read, self._last_read_s = read, self._cost.seconds(*read)
        return self._last_read_s

    def _contexts(self) -> tuple[int, int]:
        """Tokens and pairs of attention of all running sequences."""
        batch, sharing = self._batch, self._sharing
        pairs, prompts = 0, {}
        step = batch.step
        for cohort, running in batch.running():
            group, done = cohort.group, step - cohort.start_step
            prompt = group.prompt_tokens
            if sharing:
                prompts[group.number] = causal_pairs(prompt)
                pairs += running * causal_pairs(done, prompt)
            else:
                pairs += running * causal_pairs(prompt + done)
        return batch.cached_tokens, pairs + sum(prompts.values())

    def _finish(self, cohort: Cohort) -> None:
        group, members, lengths = cohort.group, cohort.members, cohort.group.lengths
        ended = group.ended
        ended.append((cohort.epoch, cohort.start_step, cohort.past, members))
        if self._by_sample:
            self._ended_samples.append((self._batch.time_s, group.number, len(members)))
        if len(members) < len(lengths):
            group.left -= len(members)
            if group.left:
                return
        del self._groups[group.number]
        self._ended_tokens += sum(lengths)
        self._done.append(GroupDone(group.number, self._batch.time_s, lengths, ended))

    def _retract(self) -> None:
        """Make room: preempt sequences with the fewest tokens, to the end of the queue."""
        batch = self._batch
        while True:
            cohort, member, closed = batch.retract()
            done = batch.step - cohort.start_step
            alone = (cohort.epoch, cohort.start_step, cohort.past, (0,))
            (past,) = segments((alone,), (done,))
            self._queue.append(Queued(cohort.group, [member], done, past))
            self.preemptions += 1
            if closed and cohort.members:
                self._finish(cohort)
            free = self.cache_tokens - batch.cached_tokens
            if batch.sequences == 1 or free >= RETRACT_STEPS * batch.sequences:
                return

    # --- inspection ------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self._batch.check()
        waiting: dict[GroupId, list[int]] = {}
        for item in self._queue:
            waiting.setdefault(item.group.number, []).extend(item.members)
        for group in self._groups.values():
            places = [member for *_, members in group.ended for member in members]
            places += waiting.pop(group.number, [])
            mine = [cohort for cohort in self._batch.cohorts if cohort.group is group]
            places += [member for cohort in mine for member in cohort.members]
            assert sorted(places) == list(range(len(group.lengths))), "a response got lost"
        assert not waiting, "an unknown group waits"
        assert self.running <= self.max_running
        assert 0 <= self.cache_used_tokens <= self.cache_tokens
        at_work = self._paused or self._batch.sequences or self._reading or self._admission_due
        assert at_work or not self._queue, "idle while responses wait"
        assert math.isclose(sum(self.activity_s.values()), max(self._now_s, self._activity.since_s))

    def _look(self) -> tuple[int, int, int]:
        """Step, running sequences and cached tokens at the latest call."""
        self._run(self._now_s)
        batch = self._batch
        return batch.at(batch.time_s if self._paused else self._now_s)

    def _unfinished_tokens(self, step: int) -> int:
        """Tokens generated until `step` for groups that are not done."""
        ended = [
            group.lengths[member]
            for group in self._groups.values()
            for *_, members in group.ended
            for member in members
        ]
        running = [
            min(cohort.group.lengths[member], step - cohort.start_step)
            for cohort in self._batch.cohorts
            for member in cohort.members
        ]
        waiting = [item.done for item in self._queue]
        return sum(ended) + sum(running) + sum(waiting)

    def _check(self, group: GroupId, prompt_tokens: int, lengths: Sequence[int]) -> None:
        if group in self._groups:
            raise ValueError(f"group {group} is already on this engine; use a new number")
        if not lengths or min(lengths) < 1 or prompt_tokens < 0:
            raise ValueError(
                f"group {group} has prompt_tokens={prompt_tokens} and lengths={list(lengths)}; "
                "need prompt_tokens >= 0 and at least one length, all lengths >= 1"
            )
        self._check_fits(group, prompt_tokens, lengths)

    def _check_fits(self, group: GroupId, prompt_tokens: int, lengths: Sequence[int]) -> None:
        longest = prompt_tokens + max(lengths)
        if longest > self.cache_tokens:
            raise ValueError(
                f"group {group} has a sequence of {longest} tokens, but the cache holds "
                f"{self.cache_tokens}; use GPUs with more memory, more GPUs per engine "
                "(tensor_parallel), or shorter responses (max_tokens)"
            )
