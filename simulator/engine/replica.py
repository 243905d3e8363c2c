"""One rollout server as a state machine: continuous batching, a bounded KV cache, interruptions.

    submit --> queue --admission--> prefill --> decode --> GroupDone
                 ^                                |
                 +---- preempted: cache full -----+      pause / resume: kept, and read again

    when                                        then
    a decode step, or a prefill, is over        what waits is admitted first, then decode goes on
    the cache is full                           sequences with the fewest tokens go back
    pause, drop, fail, work for a free place    the step that runs comes to its end first
    pause or fail during a prefill              it stops at once
    resume after new weights                    every context is read again (recompute), or not

Time is an argument: the owner asks `next_s`, and calls `advance` then. A step of the batch costs no
event, only a change of its composition does (`simulator.engine.decode_batch`).

As SGLang 0.5 schedules: first come, first served; prefill before decode; room is kept for sequences
that run and for those that are admitted; those with the fewest generated tokens are retracted until
there is room for 20 steps, and queue up behind the others; a step that is interrupted ends, and its
tokens count. Four things are simpler. A prefill generates no token, it only fills the cache. A
prefill that is interrupted stops within its chunk, not after it (under 0.1 s). What ran when the
engine was paused goes on before what waited; SGLang puts it behind. And the room that is kept for
running sequences does not grow after a retraction.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from areal_lab.control.events import GroupId, Version
from simulator.costs.prefill import causal_pairs
from simulator.engine.decode_batch import DecodeBatch, StepCost
from simulator.engine.sequences import Cohort, Group, Queued
from simulator.engine.timesheet import RecordSpan, Timesheet
from simulator.engine.versions import Decoded, Ended, Epoch, Segments, decoded, segments

IDLE = "idle"
DECODE = "decode"
PREFILL = "prefill"
RECOMPUTE = "recompute"
PAUSED = "paused"
ACTIVITIES = (IDLE, DECODE, PREFILL, RECOMPUTE, PAUSED)
NOT_WORK = frozenset({IDLE, PAUSED})
"""Activities in which an engine does no work; the cause follows from the state of the run."""

RESERVE_RUNNING_TOKENS = 401
"""Room of the cache kept for a sequence that runs, when others are admitted.

SGLang keeps `new_token_ratio` times what it may still generate, at most 4,096 tokens; the ratio
falls from 0.7 to 0.7 * 0.14 within 600 steps (SGLang 0.5, `schedule_policy.py`, `environ.py`).
"""
RESERVE_NEW_TOKENS = 4096
"""The same for each sequence that is admitted now: SGLang's clip of `max_new_tokens`."""
RETRACT_STEPS = 20
"""Steps that there must be room for after sequences were retracted (SGLang 0.5, `environ.py`)."""

_CLOCK_ROUNDING = 1e-9
"""Share by which the clock may seem to go back: timers are set by differences of times."""


class PrefillSeconds(Protocol):
    """What a prefill costs; `simulator.costs.prefill.PrefillCost` is the real one."""

    def seconds(self, new_tokens: int, pairs: float, /) -> float:
        """Of so many new tokens and (query, key) pairs of attention, over all sequences."""
        ...


class GroupDone(NamedTuple):
    """A group whose answers all ended."""

    group: GroupId
    time_s: float
    lengths: Sequence[int]
    ended: Sequence[Ended]

    @property
    def segments(self) -> tuple[Segments, ...]:
        """(version, tokens) of each answer, in the order of the lengths."""
        return segments(self.ended, self.lengths)

    @property
    def decoded(self) -> list[Decoded]:
        """The same, of answers that decoded together at once."""
        return decoded(self.ended, self.lengths)


class Replica:
    """See the module's text.

    Args:
        decode: cost of decode steps.
        prefill: cost of reading prompts, and of reading again what an interruption threw away.
        max_running: sequences that decode at a time.
        cache_tokens: of the KV cache.
        prefix_sharing: the answers to a prompt share its prefill and its place in the cache, from
            the first that is admitted until none is running.
        record_spans: told `name, start_s, end_s` of everything the engine did.
        reserve_running_tokens: room kept for each running sequence when others are admitted.
        reserve_new_tokens: room that each sequence needs beside its context to be admitted.
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
        """Read again after an interruption or a preemption."""
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
        self._timesheet = Timesheet(ACTIVITIES, record_spans)
        self._now_s = 0.0
        self._groups: dict[GroupId, Group] = {}
        self._serial = 0
        self._queue: deque[Queued] = deque()
        self._epoch = Epoch(-1, 0)
        self._done: list[GroupDone] = []
        self._ended_tokens = 0  # of groups that are done, dropped or lost
        self._admission_due = False  # at the batch's time: something has changed
        self._reading = False  # a prefill lasts until the batch's time
        # Who joined last, when, and what is read for them; others may join at the same time.
        self._joined_s = -math.inf
        self._joined = 0
        self._read_tokens = 0
        self._read_pairs = 0
        self._read_again = 0  # tokens, for sequences that were preempted
        self._last_read, self._last_read_s = (0, 0), 0.0  # tokens and pairs of the last prefill
        self._paused = False
        self._stopped: tuple[str, float] | None = None  # what is left of a prefill, while paused

    # --- what there is ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that have a place, those of a prefill included."""
        return self._look()[1]

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return sum([len(queued.members) for queued in self._queue])

    @property
    def decode_steps(self) -> int:
        """Since the start; generated tokens over these is the mean batch."""
        return self._look()[0]

    @property
    def cache_used_tokens(self) -> int:
        """Of the KV cache."""
        return self._look()[2]

    @property
    def generated_tokens(self) -> int:
        """Since the start, those of dropped and lost groups included."""
        return self._ended_tokens + self._unfinished_tokens(self._look()[0])

    @property
    def activity_s(self) -> dict[str, float]:
        """Seconds by activity until the latest call, or until the step ends that runs then."""
        self._run(self._now_s)
        return self._timesheet.until(self._now_s)

    # --- time ------------------------------------------------------------------------------------

    def next_s(self) -> float:
        """When there is something to do for `advance`; infinite if nothing goes on."""
        batch = self._batch
        if (self._admission_due or self._reading) and batch.time_s <= self._now_s:
            self._run(self._now_s)
        if self._done:
            return max(self._done[0].time_s, self._now_s)
        if self._paused:
            return math.inf
        if self._admission_due:
            return batch.time_s
        if not self._queue:
            return batch.next_change_s(any_end=False)
        if self._reading and batch.sequences < self.max_running:
            return batch.time_s  # Less room is kept for those who have been read: more may join.
        return batch.next_change_s(any_end=True)

    def advance(self, now_s: float) -> list[GroupDone]:
        """Let the time become `now_s`; returns the groups that ended until then."""
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

    # --- what the owner asks for -----------------------------------------------------------------

    def submit(
        self,
        now_s: float,
        group: GroupId,
        prompt_tokens: int,
        lengths: Sequence[int],
        version: Version,
    ) -> None:
        """Generate answers of so many tokens to a prompt; also while paused, for later.

        Args:
            now_s: the time.
            group: any number that is not in use here.
            prompt_tokens: of the prompt that all answers share.
            lengths: tokens of each answer. The engine makes no use of them but to end it.
            version: the weights that the engine holds at least. It takes them to be these if it has
                nothing else to do.
        """
        now_s = self._clock(now_s)
        self._check(group, prompt_tokens, lengths)
        self._run(now_s, more_to_come=True)
        epoch = self._epoch
        if version > epoch.version:
            if self._groups:
                raise ValueError(
                    f"version is {version}, but the engine is at work with {epoch.version}; new "
                    "weights come by pause and resume"
                )
            self._epoch = epoch.change(version, self._batch.step)
        one = self._groups[group] = Group(group, self._serial, prompt_tokens, lengths)
        self._serial += 1
        # Behind others that wait it changes nothing.
        if not self._queue and not self._paused:
            batch = self._batch
            if self._joined_s == now_s:
                # It comes in time for the prefill that begins now.
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

    def pause(self, now_s: float) -> None:
        """Stop after the step that runs, and keep what is unfinished. Twice is as good as once."""
        now_s = self._clock(now_s)
        self._run(now_s, more_to_come=True)
        if self._paused:
            return
        batch, timesheet = self._batch, self._timesheet
        if self._reading:
            # It begins later, where a step has to end first.
            stops_s = max(now_s, timesheet.since_s)
            self._stopped = (timesheet.activity, batch.time_s - stops_s)
            batch.time_s = stops_s
            self._reading = False
        else:
            self._end_step(now_s)
        self._paused = True
        timesheet.begin(PAUSED, batch.time_s)

    def resume(self, now_s: float, version: Version, *, recompute: bool = True) -> None:
        """Go on under the weights of `version`.

        Args:
            now_s: the time.
            version: of the weights that the engine now holds.
            recompute: drop the cache, and read every context again under the new weights (SGLang:
                pause mode `retract`, then a flush). False goes on with the old cache (`in_place`).
        """
        now_s = self._clock(now_s)
        if not self._paused:
            raise ValueError("the engine is not paused; resume comes after pause")
        batch = self._batch
        if version != self._epoch.version:
            self._epoch = self._epoch.change(version, batch.step)
        stopped, self._stopped = self._stopped, None
        if recompute:
            stopped = None
            if batch.sequences:
                tokens, pairs = self._contexts()
                self.recomputed_tokens += tokens
                stopped = (RECOMPUTE, self._cost.seconds(tokens, pairs))
        batch.time_s = max(now_s, batch.time_s)
        activity, left_s = stopped or (DECODE if batch.sequences else IDLE, 0.0)
        self._timesheet.begin(activity, batch.time_s)
        batch.time_s += left_s
        self._reading = stopped is not None
        self._paused = False
        self._admission_due = bool(self._queue)
        self._joined_s = -math.inf
        batch.forget_change()

    def drop(self, now_s: float, group: GroupId) -> int:
        """Give a group up; returns the tokens it had, 0 if it is not here (any more)."""
        now_s = self._clock(now_s)
        self._run(now_s, more_to_come=True)
        if group in self._groups and not self._paused:
            self._end_step(now_s)
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
        """Lose everything; returns the groups that were lost. Work may be submitted again.

        The step that runs counts as done, and what it ends is lost as well. What is not lost are
        groups that ended before; `advance` returns them still.
        """
        now_s = self._clock(now_s)
        self._run(now_s, more_to_come=True)
        batch = self._batch
        if self._reading:
            batch.time_s = max(now_s, self._timesheet.since_s)
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
        self._queue.clear()
        self._paused = self._reading = self._admission_due = False
        self._stopped = None
        self._joined_s = -math.inf
        self._timesheet.begin(IDLE, batch.time_s)
        return sorted(lost)

    # --- what happens by itself ------------------------------------------------------------------

    def _clock(self, now_s: float) -> float:
        if now_s >= self._now_s:
            self._now_s = now_s
        elif not self._now_s - now_s <= _CLOCK_ROUNDING * self._now_s:
            raise ValueError(f"the time is {now_s} s, but it was {self._now_s} s already")
        return self._now_s

    def _run(self, now_s: float, *, more_to_come: bool = False) -> None:
        """Let everything happen that happens until then.

        Args:
            now_s: the time.
            more_to_come: the owner wants something else at this very time, so admission waits.
        """
        batch = self._batch
        while batch.time_s <= now_s and not self._paused:
            if self._reading:
                self._reading = False
                self._timesheet.begin(DECODE if batch.sequences else IDLE, batch.time_s)
                if self._queue:
                    self._admission_due = True
                    self._joined_s = -math.inf
            if self._admission_due:
                if more_to_come and batch.time_s == now_s != self._joined_s:
                    return
                self._admit()
            elif batch.time_s == now_s and batch.nothing_known:
                return  # Work may come at this very time: it is too early to look ahead.
            elif batch.next_change_s(any_end=bool(self._queue)) > now_s:
                return
            else:
                ended, full = batch.go_to_change()
                for cohort in ended:
                    self._finish(cohort)
                if full:
                    self._retract()
                else:
                    self._after_change()

    def _end_step(self, now_s: float) -> None:
        """The batch is to change: the step that runs comes to its end first."""
        batch = self._batch
        if batch.ends:
            for cohort in batch.end_step(now_s):
                self._finish(cohort)
            self._after_change()
        elif batch.time_s < now_s:
            batch.time_s = now_s

    def _after_change(self) -> None:
        """Sequences have left the batch."""
        if self._queue:
            self._admission_due = True
        elif not self._batch.sequences and not self._reading:
            self._timesheet.begin(IDLE, self._batch.time_s)

    def _admit(self) -> None:
        """Let those in the queue join, first come first served, and begin to read their prompts."""
        batch, queue, reserve = self._batch, self._queue, self._reserve_new
        time_s, sequences = batch.time_s, batch.sequences
        joined = self._joined if time_s == self._joined_s else 0
        free = self.cache_tokens - batch.cached_tokens
        free -= self._reserve_running * (sequences - joined) + reserve * joined
        self._admission_due = False
        while queue and sequences < self.max_running:
            item = queue[0]
            group, done = item.group, item.done
            # Tokens to read once for the group, and for each of them.
            once, each, cached = group.prompt_tokens, done, group.prompt_tokens
            if not self._sharing:
                once, each, cached = 0, once + done, 0
            elif group.cohorts:
                once = 0
            count = (free - once) // (each + reserve)
            if count < 1:
                if sequences:
                    break
                count = 1  # Alone it fits: `submit` has seen to it.
            count = min(count, len(item.members), self.max_running - sequences)
            members = item.take(count)
            if not item.members:
                queue.popleft()
            if not joined:
                self._joined_s = time_s
                self._read_tokens = self._read_pairs = self._read_again = 0
            batch.join(group, members, batch.step - done, self._epoch, item.past)
            free -= once + count * (each + reserve)
            sequences += count
            joined += count
            tokens = once + count * each
            if tokens:
                self._read_tokens += tokens
                pairs = count * causal_pairs(each, cached) if each else 0
                self._read_pairs += causal_pairs(once) + pairs
                if done:
                    self._read_again += tokens
                    self.recomputed_tokens += tokens
        if not joined:
            return
        self._joined = joined
        if self._read_tokens:
            again = self._read_again == self._read_tokens
            self._timesheet.begin(RECOMPUTE if again else PREFILL, time_s)
            batch.time_s = time_s + self._reading_s()
            self._reading = True
        elif self._timesheet.activity != DECODE:
            self._timesheet.begin(DECODE, time_s)

    def _reading_s(self) -> float:
        """Of those who joined: most often one prompt, and prompts of one length."""
        read = (self._read_tokens, self._read_pairs)
        if read != self._last_read:
            self._last_read, self._last_read_s = read, self._cost.seconds(*read)
        return self._last_read_s

    def _contexts(self) -> tuple[int, int]:
        """Tokens and pairs of attention of everything that runs."""
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
        """Nothing of it runs any more."""
        group, members, lengths = cohort.group, cohort.members, cohort.group.lengths
        ended = group.ended
        ended.append((cohort.epoch, cohort.start_step, cohort.past, members))
        if len(members) < len(lengths):
            group.left -= len(members)
            if group.left:
                return
        del self._groups[group.number]
        self._ended_tokens += sum(lengths)
        self._done.append(GroupDone(group.number, self._batch.time_s, lengths, ended))

    def _retract(self) -> None:
        """Make room: those with the fewest tokens go back to the queue, behind the others."""
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

    # --- looking ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must always hold; for tests."""
        self._batch.check()
        waiting: dict[GroupId, list[int]] = {}
        for item in self._queue:
            waiting.setdefault(item.group.number, []).extend(item.members)
        for group in self._groups.values():
            places = [member for *_, members in group.ended for member in members]
            places += waiting.pop(group.number, [])
            mine = [cohort for cohort in self._batch.cohorts if cohort.group is group]
            places += [member for cohort in mine for member in cohort.members]
            assert sorted(places) == list(range(len(group.lengths))), "an answer got lost"
        assert not waiting, "a group that is not here waits"
        assert self.running <= self.max_running
        assert 0 <= self.cache_used_tokens <= self.cache_tokens
        at_work = self._paused or self._batch.sequences or self._reading or self._admission_due
        assert at_work or not self._queue, "idle, while answers wait"
        assert math.isclose(
            sum(self.activity_s.values()), max(self._now_s, self._timesheet.since_s)
        )

    def _look(self) -> tuple[int, int, int]:
        """Step, running sequences and cached tokens at the latest call."""
        self._run(self._now_s)
        batch = self._batch
        return batch.at(batch.time_s if self._paused else self._now_s)

    def _unfinished_tokens(self, step: int) -> int:
        """Generated until `step` for groups that are not done."""
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
            raise ValueError(f"group {group} is here already; a new number was expected")
        if not lengths or min(lengths) < 1 or prompt_tokens < 0:
            raise ValueError(
                f"group {group} has prompt_tokens={prompt_tokens} and lengths={list(lengths)}; "
                "need prompt_tokens >= 0, and lengths that are >= 1, at least one"
            )
        longest = prompt_tokens + max(lengths)
        if longest > self.cache_tokens:
            raise ValueError(
                f"group {group} has a sequence of {longest} tokens, but the cache holds "
                f"{self.cache_tokens}; use GPUs with more memory, more of them per engine "
                "(tensor_parallel), or cut answers earlier (max_tokens)"
            )
