"""Activity of each process over time, and the causes of idle time.

Spans are busy time (the innermost one where they nest). Time without a span is idle, and its cause
follows from the events and actions around it; a span with a `cause` overrides it. A paused engine
does not report why: between `PauseRequested` and `ResumeRequested` (or `StopRequested`) the pause
is manual (`paused by hand`).

    process   idle cause                           while it has no span, and
    trainer   waiting for weights                  PushWeights .. WeightsPushed
              waiting for a batch                  otherwise: too few groups finished
              request on its way                   Train .. TrainPartDone, TrainStepDone,
                                                   Save .. CheckpointCopied, CheckpointDone
              paused by hand                       PauseRequested .. ResumeRequested, otherwise
              nothing left to do                   the last step is done
    engine i  paused by hand                       PauseRequested .. ResumeRequested
              paused for weights                   Interrupt .. Resume, new weights are ready
              paused for training                  Interrupt .. Resume, before they are
              request on its way or at a tool      groups on it are not yet generated
              trainer's turn                       it gave its memory to the trainer, in a span
              waiting for rewards                  all groups on it are generated
              nothing left to do                   no group on it, the last group was started
              waiting for weights                  no group on it, TrainStepDone .. WeightsPushed
              nothing admitted (staleness bound)   no group on it, otherwise
              lost                                 EngineLost .. EngineJoined
              retired                              EngineRetired .. EngineJoined
              not yet joined                       .. EngineJoined, for an engine added later
    rewards   nothing to judge                     no group is between generation and its end
    pipeline  waiting for events                   always
    any       before training, after training      outside RunStarted .. Finish

A process without any span is busy according to its actions: an engine generates while one of its
groups is not yet generated, the trainer trains from Train to TrainPartDone or TrainStepDone and
saves from Save to CheckpointCopied or CheckpointDone, rewards are computed ("judge") while a group
is generated and has not ended. Names of activities and causes are keys in summary.json; `label`
returns the displayed text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from areal_lab.control import events as ev
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.records import (
    IMPORTED,
    PIPELINE,
    REWARDS,
    TRAINER,
    ActionRecord,
    EventRecord,
    Log,
    SpanRecord,
    engine_process,
)

PAUSED = "paused for weights"
PAUSED_FOR_TRAINING = "paused for training"
PAUSED_BY_HAND = "paused by hand"
TRAINERS_TURN = "trainer's turn"
NOTHING_ADMITTED = "nothing admitted (staleness bound)"
WAIT_BATCH = "waiting for a batch"
WAIT_WEIGHTS = "waiting for weights"
WAIT_REWARDS = "waiting for rewards"
WAIT_CONTROLLER = "waiting for the controller"
WAIT_RANKS = "waiting for other ranks"
ON_ITS_WAY = "request on its way or at a tool"
TRAIN_ON_ITS_WAY = "request on its way"
NOTHING_LEFT = "nothing left to do"
LOST = "lost"
NOT_JOINED = "not yet joined"
RETIRED = "retired"
NOTHING_TO_SCORE = "nothing to judge"
WAIT_EVENTS = "waiting for events"
BEFORE = "before training"
NOT_IN_THE_LOG = "not in the log"
AFTER = "after training"


_LABELS = {
    "judge": "score",
    NOTHING_TO_SCORE: "nothing to score",
    ON_ITS_WAY: "request in transit or at a tool",
    TRAIN_ON_ITS_WAY: "request in transit",
}


def label(name: str) -> str:
    """Displayed name of an activity or idle cause."""
    return _LABELS.get(name, name)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A period of one activity, or of one cause of idleness, of a process."""

    start_s: float
    end_s: float
    name: str
    """Activity, or cause of idleness."""
    busy: bool


@dataclass(slots=True)
class ProcessUse:
    """Time of one process, by activity and by cause of idleness."""

    total_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds by activity, longest first."""
    idle_s: dict[str, float] = field(default_factory=dict)
    """Seconds by cause, longest first."""

    @property
    def busy_share(self) -> float:
        """Busy seconds over all seconds."""
        return sum(self.busy_s.values()) / self.total_s if self.total_s else 0.0

    @property
    def idle_share(self) -> float:
        """Idle seconds over all seconds."""
        return sum(self.idle_s.values()) / self.total_s if self.total_s else 0.0

    def shares(self) -> dict[str, float]:
        """Share of each cause, and of all busy time as `"busy"`; they sum to 1."""
        if not self.total_s:
            return {}
        causes = {cause: seconds / self.total_s for cause, seconds in self.idle_s.items()}
        return {"busy": self.busy_share, **causes}


def training_window(log: Log) -> tuple[float, float]:
    """Time from the first event (`RunStarted`) to `Finish`, or to the end of a truncated log.

    Of an imported log: from its first span to its end.
    """
    if log.header.mode == IMPORTED:
        return (min((span.t_s for span in log.spans), default=0.0), log.end_s)
    starts = [record.t_s for record in log.events if isinstance(record.event, ev.RunStarted)]
    if not starts:
        return (log.end_s, log.end_s)
    ends = [record.t_s for record in log.actions if isinstance(record.action, ev.Finish)]
    return (starts[0], ends[-1] if ends else log.end_s)


def idle_by_cause(log: Log) -> dict[str, ProcessUse]:
    """Seconds of each process by activity and by cause of idleness, during training.

    The module's docstring defines the causes.
    """
    start_s, end_s = training_window(log)
    uses = {}
    for process, stretches in activity(log).items():
        use = ProcessUse(total_s=end_s - start_s)
        for stretch in stretches:
            seconds = min(stretch.end_s, end_s) - max(stretch.start_s, start_s)
            if seconds > 0:
                by_name = use.busy_s if stretch.busy else use.idle_s
                by_name[stretch.name] = by_name.get(stretch.name, 0.0) + seconds
        use.busy_s = dict(sorted(use.busy_s.items(), key=lambda item: -item[1]))
        use.idle_s = dict(sorted(use.idle_s.items(), key=lambda item: -item[1]))
        uses[process] = use
    return uses


def activity(log: Log) -> dict[str, list[Stretch]]:
    """The activity of each process from 0 s to the end of the log, without gaps or overlaps."""
    spans: dict[str, list[SpanRecord]] = defaultdict(list)
    requested = pauses(log)
    for span in log.spans:
        spans[span.process].extend(
            _manual_pauses(span, requested) if span.cause == PAUSED else [span]
        )
    end_s = log.end_s  # looks at every record
    background = _Background(log, end_s, recorded=frozenset(spans))
    return {
        process: _overlay(_innermost(spans[process]), background.of(process), end_s)
        for process in dict.fromkeys([*log.header.processes, *background, *spans])
    }


# --- spans over background -----------------------------------------------------------------------


def _manual_pauses(
    span: SpanRecord, requested: Iterable[tuple[float, float]]
) -> Iterator[SpanRecord]:
    """Parts of an engine's pause inside and outside of the requested pauses."""
    at_s = span.t_s
    for since_s, until_s in requested:
        start_s, end_s = max(since_s, at_s), min(until_s, span.end_s)
        if start_s < end_s:
            yield replace(span, t_s=at_s, end_s=start_s)
            yield replace(span, t_s=start_s, end_s=end_s, cause=PAUSED_BY_HAND)
            at_s = end_s
    yield replace(span, t_s=at_s)


def _innermost(spans: Sequence[SpanRecord]) -> Iterator[Stretch]:
    """Innermost span at each moment: busy ones before waits, then the latest to start."""
    starting = sorted((s for s in spans if s.end_s > s.t_s), key=lambda span: span.t_s)
    moments = sorted({moment for span in starting for moment in (span.t_s, span.end_s)})
    active: list[tuple[bool, float, float, int]] = []
    following = 0
    for number, moment in enumerate(moments[:-1]):
        while following < len(starting) and starting[following].t_s <= moment:
            span = starting[following]
            heappush(active, (bool(span.cause), -span.t_s, span.end_s, following))
            following += 1
        while active and active[0][2] <= moment:
            heappop(active)
        if active:
            span = starting[active[0][3]]
            yield Stretch(moment, moments[number + 1], span.cause or span.name, not span.cause)


def _overlay(
    spans: Iterable[Stretch], background: Sequence[Stretch], end_s: float
) -> list[Stretch]:
    """Spans, and the background between them; equal adjacent stretches are merged."""
    joined: list[Stretch] = []

    def add(start_s: float, end_s: float, like: Stretch) -> None:
        if end_s <= start_s:
            return
        last = joined[-1] if joined else None
        if last and (last.name, last.busy, last.end_s) == (like.name, like.busy, start_s):
            joined[-1] = Stretch(last.start_s, end_s, like.name, like.busy)
        else:
            joined.append(Stretch(start_s, end_s, like.name, like.busy))

    position, covered_s = 0, 0.0

    def fill(until_s: float) -> None:
        nonlocal position, covered_s
        while covered_s < until_s:
            while background[position].end_s <= covered_s:
                position += 1
            piece_end_s = min(until_s, background[position].end_s)
            add(covered_s, piece_end_s, background[position])
            covered_s = piece_end_s

    for span in spans:
        start_s, stop_s = max(span.start_s, 0.0), min(span.end_s, end_s)
        fill(min(start_s, end_s))
        add(start_s, stop_s, span)
        covered_s = max(covered_s, stop_s)
    fill(end_s)
    return joined


# --- from events and actions ---------------------------------------------------------------------


class _Background:
    """Activity of each process, derived from events and actions."""

    def __init__(self, log: Log, end_s: float, recorded: frozenset[str]) -> None:
        self._recorded = recorded
        self._end_s = end_s
        self._changes: dict[str, list[tuple[float, str, bool]]] = {}
        self._generating: dict[int, set[ev.GroupId]] = {}
        self._scoring: dict[int, set[ev.GroupId]] = {}
        self._scored_now = 0
        self._gone: dict[int, str] = {}  # engines, with the cause
        self._engine_of: dict[ev.GroupId, int] = {}
        self._paused = self._training = self._saving = self._pushing = self._behind = False
        self._held = False
        self._last_start_s, self._last_train_s = self._last_work(log)
        at_first = NOT_IN_THE_LOG if log.header.mode == IMPORTED else BEFORE
        for process in log.header.processes:
            self._changes[process] = [(0.0, at_first, False)]
        self._follow(log)

    def __iter__(self) -> Iterator[str]:
        """Processes of the header, and engines that joined."""
        return iter(self._changes)

    def of(self, process: str) -> list[Stretch]:
        """Activity of the process from 0 s to the end of the log."""
        changes = self._changes.get(process, [(0.0, WAIT_EVENTS, False)])
        ends = [*(change[0] for change in changes[1:]), self._end_s]
        return [
            Stretch(start_s, end_s, name, busy)
            for (start_s, name, busy), end_s in zip(changes, ends, strict=True)
            if end_s > start_s
        ]

    def _last_work(self, log: Log) -> tuple[float, float]:
        """Start of the last group and of the last step; infinity if the log has no end."""
        actions = list(log.actions)
        if not any(isinstance(record.action, ev.Finish) for record in actions):
            return (float("inf"), float("inf"))
        starts = [r.t_s for r in actions if isinstance(r.action, ev.StartGroup)]
        trains = [r.t_s for r in actions if isinstance(r.action, ev.Train)]
        return (max(starts, default=0.0), max(trains, default=0.0))

    def _follow(self, log: Log) -> None:
        """Process the log in order of time, and at equal times in order of writing."""
        logged = [(r.t_s, r) for r in log.records if isinstance(r, EventRecord | ActionRecord)]
        generated = [(record.generated_s, record) for record in log.groups]
        for t_s, record in sorted((*logged, *generated), key=lambda item: item[0]):
            match record:
                case EventRecord():
                    touched = self._event(record.event)
                case ActionRecord():
                    touched = self._action(record.action)
                    if isinstance(record.action, ev.Finish):
                        for process in self._changes:
                            self._change(process, t_s, AFTER, False)
                        return
                case _:
                    touched = self._group_generated(record.group)
            self._note(t_s, self._generating if t_s >= self._last_start_s else touched)

    def _event(self, event: ev.Event) -> Iterable[int]:
        """Process an event; returns the engines whose state it may have changed."""
        match event:
            case ev.RunStarted():
                self._begin(event)
            case ev.GroupFinished() | ev.GroupFiltered():
                return self._forget(event.group)
            case ev.TrainPartDone():
                self._training = False
            case ev.TrainStepDone():
                self._training, self._behind = False, True
            case ev.WeightsPushed():
                self._pushing = self._behind = False
            case ev.CheckpointCopied() | ev.CheckpointDone():
                self._saving = False
            case ev.PauseRequested():
                self._held = True
            case ev.ResumeRequested() | ev.StopRequested():
                self._held = False
            case ev.EngineLost() | ev.EngineRetired():
                for group in [g for g, at in self._engine_of.items() if at == event.engine]:
                    self._forget(group)
                self._gone[event.engine] = LOST if isinstance(event, ev.EngineLost) else RETIRED
            case ev.EngineJoined():
                self._gone.pop(event.engine, None)
                self._generating.setdefault(event.engine, set())
                self._scoring.setdefault(event.engine, set())
            case _:
                pass
        return self._generating

    def _begin(self, event: ev.RunStarted) -> None:
        """Start of the run, or its continuation after a kill: nothing runs any more."""
        self._engine_of.clear()
        self._scored_now = 0
        self._paused = self._training = self._saving = self._pushing = self._behind = False
        self._held = False
        self._gone = dict.fromkeys(set(self._generating) - set(event.engines), LOST)
        for engine in {*self._generating, *event.engines}:
            self._generating[engine], self._scoring[engine] = set(), set()

    def _action(self, action: ev.Action) -> Iterable[int]:
        match action:
            case ev.StartGroup():
                self._engine_of[action.group] = action.engine
                self._generating.setdefault(action.engine, set()).add(action.group)
                self._scoring.setdefault(action.engine, set())
                return (action.engine,)
            case ev.Drop():
                return self._forget(action.group)
            case ev.Interrupt():
                self._paused = True
            case ev.Resume():
                self._paused = False
            case ev.PushWeights():
                self._pushing = True
            case ev.Train():
                self._training = True
                return ()
            case ev.Save():
                self._saving = True
                return ()
            case _:
                pass
        return self._generating

    def _group_generated(self, group: ev.GroupId) -> Iterable[int]:
        engine = self._engine_of.get(group)
        if engine is None or group not in self._generating[engine]:
            return ()
        self._generating[engine].remove(group)
        self._scoring[engine].add(group)
        self._scored_now += 1
        return (engine,)

    def _forget(self, group: ev.GroupId) -> Iterable[int]:
        engine = self._engine_of.pop(group, None)
        if engine is None:
            return ()
        self._generating[engine].discard(group)
        if group in self._scoring[engine]:
            self._scoring[engine].remove(group)
            self._scored_now -= 1
        return (engine,)

    def _note(self, t_s: float, engines: Iterable[int]) -> None:
        self._change(TRAINER, t_s, *self._trainer(t_s))
        self._change(PIPELINE, t_s, WAIT_EVENTS, False)
        scoring = self._scored_now > 0 and REWARDS not in self._recorded
        self._change(REWARDS, t_s, "judge" if scoring else NOTHING_TO_SCORE, scoring)
        for engine in engines:
            self._change(engine_process(engine), t_s, *self._engine(engine, t_s))

    def _change(self, process: str, t_s: float, name: str, busy: bool) -> None:
        changes = self._changes.get(process)
        if changes is None:
            if process in (TRAINER, REWARDS, PIPELINE):
                return  # not in the header; only engines may be added later
            changes = self._changes[process] = [(0.0, NOT_JOINED, False)]
        if changes[-1][1:] != (name, busy):
            changes.append((t_s, name, busy))

    def _trainer(self, t_s: float) -> tuple[str, bool]:
        if self._training or self._saving:
            if TRAINER in self._recorded:
                return (TRAIN_ON_ITS_WAY, False)
            return ("train" if self._training else "save", True)
        if self._held:
            return (PAUSED_BY_HAND, False)
        if t_s > self._last_train_s:
            return (NOTHING_LEFT, False)
        return (WAIT_WEIGHTS if self._pushing else WAIT_BATCH, False)

    def _engine(self, engine: int, t_s: float) -> tuple[str, bool]:
        recorded = engine_process(engine) in self._recorded
        if engine in self._gone:
            return (self._gone[engine], False)
        if self._held:
            return (PAUSED_BY_HAND, False)
        if self._paused:
            return (PAUSED if self._behind else PAUSED_FOR_TRAINING, False)
        if self._generating[engine]:
            return (ON_ITS_WAY, False) if recorded else ("generate", True)
        if self._scoring[engine]:
            cause = WAIT_REWARDS
        elif t_s >= self._last_start_s:
            cause = NOTHING_LEFT
        else:
            cause = WAIT_WEIGHTS if self._behind else NOTHING_ADMITTED
        return (cause, False)
