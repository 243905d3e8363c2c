"""Statistics of a simulated run (time by state, token lag, losses), kept without an event log.

Groups are forgotten once they are trained on; a row per step and a few counters stay.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from areal_lab.control.events import (
    Event,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrainPartDone,
    TrainStepDone,
    Version,
    WeightsPushed,
)
from areal_lab.control.ledger import LagCounts, Ledger
from areal_lab.runlog.activity import (
    NOTHING_ADMITTED,
    NOTHING_LEFT,
    PAUSED,
    PAUSED_BY_HAND,
    PAUSED_FOR_TRAINING,
    TRAINERS_TURN,
    WAIT_BATCH,
    WAIT_CONTROLLER,
    WAIT_RANKS,
    WAIT_REWARDS,
    WAIT_WEIGHTS,
)
from simulator.costs.switch import TO_TRAINING
from simulator.costs.training_timing import OUTSIDE
from simulator.engine.clock import UNCOUNTED, Clock
from simulator.engine.replica import NOT_WORK
from simulator.engine.sequences import Tally
from simulator.run.flights import BATCHES, REPLIES, ControllerQueue, Slot
from simulator.run.pools import EXPORT, GENERATE
from simulator.run.system import System, Timing

COLUMNS = {
    "end_s": "end of the training step, seconds since the start of the run",
    "step_s": "since the end of the step before",
    "train_s": "of these, the trainer worked on the batch",
    "export_s": "of these, the trainer exported weights or switched the GPUs",
    "outside_s": "of these, data, logs, validation and checkpoints",
    "wait_s": "of these, the trainer waited",
    "update_s": "of these, new weights were on their way to the engines",
    "generate_s": "of these, an engine generated, on average",
    "tokens": "generated tokens that were trained on",
    "sequences": "samples that were trained on",
    "token_lag": "mean lag of the trained tokens, in versions",
    "head_lag": "mean lag of the first tokens of samples",
    "lag_before_queue": "of these, versions that passed until their groups entered the queue",
    "lag_in_queue": "of these, versions that passed while their groups waited for training",
    "lag_offered": "mean lag before the queue of all samples that entered it, trained on or not",
    "tail_lag": "mean lag of the last tokens of samples",
    "max_lag": "largest lag of any token",
    "in_flight": "groups between their start and the queue, on average",
    "several_versions": "share of samples with tokens of two or more versions",
    "micro_batches": "micro-batches of the step, over all ranks; nan if not modeled",
    "train_flops": "useful floating point operations of the step; nan if not modeled",
}
"""The columns of the table of steps, with what they mean."""
CONTROLLER_COLUMNS = {
    "controller_s": "the controller handled replies and batches",
    "controller_received_bytes": "the controller received from engines and agents",
    "controller_sent_bytes": "the controller sent to the trainer",
    "fetched_bytes": "the trainer fetched from the hosts of engines",
    "reply_s": "from the end of a prompt's responses until they were handled, on average",
}
"""Further columns of a system with `controller`, for the time since the step before."""
_UNEXPLAINED = (WAIT_CONTROLLER, WAIT_RANKS)
"""Causes of idle engines that do not follow from events."""
WaitedFor: TypeAlias = Callable[[Slot, str, float, float], None]
"""Called with an engine, the cause, begin and end of a wait that events do not explain."""


@dataclass(slots=True)
class Moment:
    """All counters at one time, counted from the start of the run."""

    at_s: float = 0.0
    engines: dict[str, float] = field(default_factory=dict)
    """Seconds by state, over all engines."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds of decode, prefill and recomputation, as engines count them."""
    hybrid: dict[str, float] = field(default_factory=dict)
    """Seconds of those of `engines` whose GPUs also train."""
    hybrid_work: dict[str, float] = field(default_factory=dict)
    trainer: dict[str, float] = field(default_factory=dict)
    controller: dict[str, float] = field(default_factory=dict)
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    interruptions: int = 0

    def since(self, before: Moment) -> Moment:
        """The difference to an earlier moment."""
        return Moment(
            self.at_s - before.at_s,
            _difference(self.engines, before.engines),
            _difference(self.work, before.work),
            _difference(self.hybrid, before.hybrid),
            _difference(self.hybrid_work, before.hybrid_work),
            _difference(self.trainer, before.trainer),
            _difference(self.controller, before.controller),
            self.generated_tokens - before.generated_tokens,
            self.recomputed_tokens - before.recomputed_tokens,
            self.preemptions - before.preemptions,
            self.interruptions - before.interruptions,
        )


@dataclass(slots=True)
class StepLags:
    """Lags of the samples and tokens of one training step, in versions."""

    heads: Counter[int] = field(default_factory=Counter)
    tails: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    several: int = 0
    """Samples with tokens of two or more versions."""

    def add(
        self,
        heads: Mapping[int, int],
        tails: Mapping[int, int],
        tokens: Mapping[int, int],
        several: int,
    ) -> None:
        """Count a part of the batch, or all of it."""
        self.heads.update(heads)
        self.tails.update(tails)
        self.tokens.update(tokens)
        self.several += several

    def columns(self) -> dict[str, float]:
        """The columns of the table of steps that follow from them."""
        samples = self.heads.total()
        return {
            "tokens": self.tokens.total(),
            "sequences": samples,
            "head_lag": _mean(self.heads),
            "tail_lag": _mean(self.tails),
            "token_lag": _mean(self.tokens),
            "max_lag": max(self.tokens, default=0),
            "several_versions": self.several / samples,
        }


class Accounting:
    """Follows what every process is doing; the event loop reports every change."""

    def __init__(
        self,
        system: System,
        slots: Sequence[Slot],
        controller: ControllerQueue | None,
        waited: WaitedFor,
        ledger: Ledger,
    ) -> None:
        self._system = system
        self._slots = slots
        self._controller = controller
        self._waited = waited
        self._ledger = ledger
        self._clocks = [Clock(slot.away if slot.dead else NOTHING_ADMITTED) for slot in slots]
        self._scoring = [0] * len(slots)
        self._reading = [0] * len(slots)
        self._at_barrier: Collection[int] = frozenset()
        self._waited_before_s = [0.0] * system.limits.ranks
        self.trainer_clock = Clock(WAIT_BATCH)
        # The state of the run, as `areal_lab.runlog.activity` reads it from a log.
        self._behind = self._pushing = self._interrupted = False
        self._loading = [""] * len(slots)
        self._all_started = self._all_trained = self._training = self._held = False
        self._push_began_s = 0.0
        # Counters.
        self.interruptions = 0
        self.engine_losses = 0
        self.trainer_restarts = 0
        self.dropped_tokens = 0
        self.filtered_tokens = 0
        # Steps.
        named = COLUMNS if controller is None else COLUMNS | CONTROLLER_COLUMNS
        self.columns = {name: array("d") for name in named}
        self._row = dict.fromkeys(named, 0.0)
        self._passed: dict[str, float] = {}
        self._step = StepLags()
        self._update_s = 0.0
        self._export_s = 0.0
        self._outside_s = 0.0
        self._generate_s = 0.0
        self._there_s = 0.0
        self.groups_in_flight = 0
        """Number of groups that were started and have not entered the queue."""
        self.in_flight_since_s = 0.0
        """Time of the latest change of `groups_in_flight`."""
        self.in_flight_group_s = 0.0
        """Group-seconds in flight from the end of the step before until then."""
        self.engines: list[float] = []
        """Mean number of engines in each step, where it changes."""
        self.token_lags: Counter[int] = Counter()
        self.head_lags: Counter[int] = Counter()
        self.tail_lags: Counter[int] = Counter()
        self.lag_parts = LagCounts()
        """After warm-up."""
        self.begin = Moment()
        self.end = Moment()

    # --- what every process is doing -------------------------------------------------------------

    def event(self, now_s: float, event: Event) -> None:
        """Count an event, before the coordinator handles it."""
        match event:
            case TrainPartDone():
                self._training = False
                self._trainer_waits(now_s)
            case TrainStepDone(version):
                self._behind = True
                self._step_done(now_s, version)
                self._all_trained = version == self._system.limits.train_steps
                self._training = False
                self._trainer_waits(now_s)
                self._update_all(now_s)
            case WeightsPushed():
                self._update_s += now_s - self._push_began_s
                self._behind = self._pushing = False
                self._loading = [""] * len(self._slots)
                self._trainer_waits(now_s)
                self._update_all(now_s)
            case PauseRequested() | ResumeRequested() | StopRequested():
                self._held = isinstance(event, PauseRequested)
                self._trainer_waits(now_s)
                self._update_all(now_s)
            case _:
                pass

    def push_began(self, now_s: float) -> None:
        """A transfer of new weights has started."""
        self._pushing, self._push_began_s = True, now_s
        self._trainer_waits(now_s)

    def interrupted(self, now_s: float) -> None:
        """The coordinator wants engines to pause."""
        self._interrupted = True
        self._update_all(now_s)

    def paused(self, now_s: float) -> None:
        """Engines have paused."""
        self._update_all(now_s)

    def loading(self, now_s: float, name: str, slots: Sequence[Slot]) -> None:
        """Note that engines load new weights, or do what `name` says for it; "" ends it."""
        for slot in slots:
            self._loading[slot.number] = name
            self.engine_changed(now_s, slot)

    def resumed(self, now_s: float) -> None:
        """Engines continue."""
        self._interrupted = False
        self._update_all(now_s)

    def nothing_left(self, now_s: float) -> None:
        """The last group of the run was started."""
        if not self._all_started:
            self._all_started = True
            self._update_all(now_s)

    def scoring(self, now_s: float, slot: Slot, change: int) -> None:
        """One more (+1) or one less (-1) of the engine's groups is being scored."""
        self._scoring[slot.number] += change
        self.engine_changed(now_s, slot)

    def reading(self, now_s: float, slot: Slot, change: int) -> None:
        """One more (+1) or one less (-1) of the engine's groups is with a reader or the controller,
        or waits for them."""
        self._reading[slot.number] += change
        self.engine_changed(now_s, slot)

    def at_barrier(self, now_s: float, ranks: Collection[int]) -> None:
        """Note the ranks that have their part of the next batch and wait for the others.

        Once no rank waits, the time that they waited, averaged over all ranks, moves from the
        trainer's wait for a batch to that for other ranks.
        """
        if ranks == self._at_barrier:
            return
        clock = self.trainer_clock
        waited_s = clock.of(now_s, WAIT_BATCH)
        for rank in ranks:
            if rank not in self._at_barrier:
                self._waited_before_s[rank] = waited_s
        if not ranks:
            since_s = [self._waited_before_s[rank] for rank in self._at_barrier]
            mean_s = (waited_s * len(since_s) - sum(since_s)) / self._system.limits.ranks
            clock.seconds[WAIT_BATCH] -= mean_s
            clock.add(WAIT_RANKS, mean_s)
        self._at_barrier = ranks
        self._update_all(now_s)

    def engine_changed(self, now_s: float, slot: Slot) -> None:
        """The engine got its first group, finished its last one, failed, or came back."""
        clock = self._clocks[slot.number]
        before, since_s = clock.state, clock.since_s
        clock.set(now_s, self._state(slot))
        if before in _UNEXPLAINED and clock.state != before:
            self._waited(slot, before, since_s, now_s)

    def _trainer_waits(self, now_s: float) -> None:
        if self._held and not self._training:
            self.trainer_clock.set(now_s, PAUSED_BY_HAND)
        elif not self._training:
            cause = WAIT_WEIGHTS if self._pushing else WAIT_BATCH
            self.trainer_clock.set(now_s, NOTHING_LEFT if self._all_trained else cause)

    def _update_all(self, now_s: float) -> None:
        for slot, clock in zip(self._slots, self._clocks, strict=True):
            if self._state(slot) != clock.state:
                self.engine_changed(now_s, slot)

    def _state(self, slot: Slot) -> str:  # noqa: PLR0911 - one per state
        if slot.dead:
            return slot.away
        if loading := self._loading[slot.number]:
            return loading
        if slot.trains:
            return TRAINERS_TURN
        if slot.flights and not slot.paused:
            return GENERATE
        if self._held:
            return PAUSED_BY_HAND
        if self._interrupted:
            return PAUSED if self._behind else PAUSED_FOR_TRAINING
        if self._scoring[slot.number]:
            return WAIT_REWARDS
        if self._reading[slot.number]:
            return WAIT_CONTROLLER
        if slot.number * self._system.limits.ranks // len(self._slots) in self._at_barrier:
            return WAIT_RANKS
        if self._all_started:
            return NOTHING_LEFT
        return WAIT_WEIGHTS if self._behind else NOTHING_ADMITTED

    # --- steps -----------------------------------------------------------------------------------

    def in_flight(self, now_s: float, groups: int) -> None:
        """Note a new value of `groups_in_flight`."""
        self.in_flight_group_s += self.groups_in_flight * (now_s - self.in_flight_since_s)
        self.groups_in_flight, self.in_flight_since_s = groups, now_s

    def batch(self, now_s: float, version: Version, counts: Tally) -> None:
        """The trainer, at `version`, starts on a batch, which fixes the lags of its tokens.

        A batch in parts comes part by part.
        """
        self._training = True
        self.trainer_clock.set(now_s, UNCOUNTED)
        head_lags, tail_lags, token_lags = (
            {version - of: count for of, count in by_version.items()}
            for by_version in (counts.heads, counts.tails, counts.tokens)
        )
        self._step.add(head_lags, tail_lags, token_lags, counts.several)
        if version >= self._system.workload.warmup_steps:
            self.head_lags.update(head_lags)
            self.tail_lags.update(tail_lags)
            self.token_lags.update(token_lags)

    @property
    def step_lag(self) -> float:
        """Mean lag in versions of the tokens of the batch that is trained on."""
        return _mean(self._step.tokens)

    def trained(self, timing: Timing) -> None:
        """The work on the batch, or a part of it, is done."""
        self._row["train_s"] += timing.seconds
        self._row["micro_batches"] += getattr(timing, "micro_batches", math.nan)
        self._row["train_flops"] += getattr(timing, "flops", math.nan)

    def _step_done(self, now_s: float, version: Version) -> None:
        row = self._row
        row["step_s"] = now_s - row["end_s"]
        row["end_s"] = now_s
        row |= self._step.columns()
        self._step = StepLags()
        group_s = self.in_flight_group_s + self.groups_in_flight * (now_s - self.in_flight_since_s)
        row["in_flight"] = (
            group_s / row["step_s"] if row["step_s"] else float(self.groups_in_flight)
        )
        self.in_flight_group_s, self.in_flight_since_s = 0.0, now_s
        parts = self._ledger.step
        row |= {f"lag_{part}": mean for part, mean in parts.means.items()}
        if version > self._system.workload.warmup_steps:
            self.lag_parts.add(parts)
        seconds = self.trainer_clock.seconds
        export_s = sum(seconds.get(name, 0.0) for name in (EXPORT, *TO_TRAINING))
        row["export_s"], self._export_s = export_s - self._export_s, export_s
        outside_s = sum(seconds.get(name, 0.0) for name in OUTSIDE)
        row["outside_s"], self._outside_s = outside_s - self._outside_s, outside_s
        known_s = row["train_s"] + row["export_s"] + row["outside_s"]
        row["wait_s"] = max(0.0, row["step_s"] - known_s)
        row["update_s"], self._update_s = self._update_s, 0.0
        generate_s = sum(clock.of(now_s, GENERATE) for clock in self._clocks) / len(self._clocks)
        row["generate_s"], self._generate_s = generate_s - self._generate_s, generate_s
        if self._controller is not None:
            row |= self._since_step_before(self._controller, now_s)
        if self._system.scaling is not None:
            there_s = sum(sum(clock.read(now_s).values()) for clock in self._clocks)
            engines, self._there_s = (there_s - self._there_s) / row["step_s"], there_s
            row["generate_s"] *= len(self._clocks) / engines
            self.engines.append(engines)
        for name, column in self.columns.items():
            column.append(row[name])
        row["train_s"] = row["micro_batches"] = row["train_flops"] = 0.0
        if version == self._system.workload.warmup_steps:
            self.begin = self._moment(now_s)
        if version == self._system.workload.steps:
            self.end = self._moment(now_s)

    def _since_step_before(self, controller: ControllerQueue, now_s: float) -> dict[str, float]:
        busy = (controller.clock.of(now_s, name) for name in (REPLIES, BATCHES))
        passed = {
            "controller_s": sum(busy),
            "controller_received_bytes": controller.received_bytes,
            "controller_sent_bytes": controller.sent_bytes,
            "fetched_bytes": controller.fetched_bytes,
            "reply_s": controller.reply_s,
            "replies": controller.replies,
        }
        new = _difference(passed, self._passed)
        self._passed = passed
        new["reply_s"] /= max(1, new.pop("replies"))
        return new

    def _moment(self, now_s: float) -> Moment:
        engines: dict[str, float] = {}
        work: dict[str, float] = {}
        hybrid: dict[str, float] = {}
        hybrid_work: dict[str, float] = {}
        generated = recomputed = preemptions = 0
        for clock, slot in zip(self._clocks, self._slots, strict=True):
            engine = slot.engine
            if engine.next_s() > now_s:
                engine.advance(now_s)  # so that its counters are up to date
            states = clock.read(now_s)
            done = {n: s for n, s in engine.activity_s.items() if n not in NOT_WORK}
            add_up(engines, states)
            add_up(work, done)
            if slot.number < self._system.limits.hybrid_engines:
                add_up(hybrid, states)
                add_up(hybrid_work, done)
            generated += engine.generated_tokens
            recomputed += engine.recomputed_tokens
            preemptions += engine.preemptions
        controller_s = {} if self._controller is None else self._controller.clock.read(now_s)
        return Moment(
            at_s=now_s,
            engines=engines,
            work=work,
            hybrid=hybrid,
            hybrid_work=hybrid_work,
            trainer=self.trainer_clock.read(now_s),
            controller=controller_s,
            generated_tokens=generated,
            recomputed_tokens=recomputed,
            preemptions=preemptions,
            interruptions=self.interruptions,
        )


def add_up(total: dict[str, float], more: Mapping[str, float]) -> None:
    """Add `more` to `total`, name by name."""
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


def _mean(lags: Mapping[int, int]) -> float:
    count = sum(lags.values())
    return sum(lag * times for lag, times in lags.items()) / count if count else 0.0


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
