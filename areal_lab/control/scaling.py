r"""How many engines a run should have: a rule on how generation and training wait for each other.

    event --note--> ScalingWatch --some steps--> Window --engines_wanted--> number, what was learned

With n engines, a window of some training steps has

    w  share of the time in which the trainer waited for groups: generation is the bottleneck
    h  share in which eq. 3 kept engines from starting groups that they had room for, so that
       groups wait for the trainer instead
    d  groups by which those that wait for training became fewer, over the groups trained on
    L  mean tokens of a group: the work

and, with u the share that more engines did not change (0 until they were tried) and x = w - u, the
rule is, within [min, max] and with a tolerance e (5 %):

    go back  more came since the last window, and w fell by less than a quarter of what they
             promised: u becomes w
    grow     x > e                              to ceil(n / (1 - x)), from n + 1 to 2 n
    shrink   x <= e / 2, d <= e, h >= 1/2 or    by a quarter, or half of the way to a number that
             u > 0                              was too few
    else     n

**Why n / (1 - x).** The trainer worked for 1 - w of the time, so groups have to come 1 / (1 - w)
times as fast. The tokens per second of n engines with a fixed number of groups in flight are
concave in n, since an engine with a smaller batch is slower, so this never asks for more than are
needed: it comes near from below.

**Why u.** Where few groups may run at once, the trainer waits for the longest response, and engines
with fewer responses each are hardly faster. What they promised is known, so one attempt tells.

**Why a quarter.** If eq. 3 holds engines back, w is 0 whether one engine or half of them could
leave: how much slower fewer engines are is not known before it is tried. A number that turned out
to be too few is remembered, and the next attempts halve the distance to it.

**Why it comes to rest.** While L stays within a tenth of what it was, a number that made the
trainer wait is not tried again, each growth that helps raises this number, each one that does not
raises u by 3/4 e at least, and between two growths the engines only become fewer: there are
finitely many changes, whatever the windows say.

**Time.** The first steps of a run are not measured, nor are those after a change in which the
groups in flight end that began under another number of engines, and `cooldown_steps` more. Nothing
is decided while an engine is starting, and none is started that would come after the end of the run
(`startup_s`).

Times are arguments; the same rule is used by the pipeline and by the simulator. The proportional
step is that of autoscalers of services (Kubernetes: desired = ceil(current * metric / target)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Protocol

from areal_lab.control.coordinator import Counts
from areal_lab.control.limits import Limits

_HELD_BACK: Final = 0.5
"""Share of a window in which eq. 3 holds engines back, from which on there may be too many."""
_LARGEST_GROWTH: Final = 2
"""Times as many engines as there are: a window in which nothing was trained on says no number."""
_LEAST_GAIN: Final = 0.25
"""Share of what a growth promises that it has to bring."""
_ALL_BUT_NOTHING: Final = 0.999
_CLOSE: Final = 8
"""Of this many engines, one stays if fewer by as many are too few: the next attempt would cost
more than it saves."""
_FIRST_SHRINK: Final = 4
"""Of this many engines, one leaves while no number is known to be too few."""
_OTHER_WORK: Final = 0.1
"""Relative change of the tokens of a group after which what was too few may be enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """Constants of the rule."""

    min_engines: int
    max_engines: int
    window_steps: int = 4
    """Training steps that one decision looks at."""
    cooldown_steps: int = 1
    """Training steps that are not measured after a change, once the groups have ended that were in
    flight."""
    tolerance: float = 0.05
    """Share of the time that the trainer may wait for groups."""
    startup_s: float = 0.0
    """From the decision until a new engine works."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_engines <= self.max_engines:
            raise ValueError(
                f"min_engines is {self.min_engines} and max_engines {self.max_engines}, but "
                "1 <= min_engines <= max_engines must hold"
            )
        if self.window_steps < 1 or self.cooldown_steps < 0:
            raise ValueError(
                f"window_steps is {self.window_steps} and cooldown_steps {self.cooldown_steps}, "
                "but they must be >= 1 and >= 0"
            )
        if not 0 < self.tolerance < 1 or not 0 <= self.startup_s < math.inf:
            raise ValueError(
                f"tolerance is {self.tolerance} and startup_s {self.startup_s}, but they must be "
                "between 0 and 1, and finite and >= 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened in some training steps; see the module docstring."""

    waiting: float
    """w."""
    held_back: float
    """h."""
    drained: float = 0.0
    """d; negative if more groups wait for training than before."""
    group_tokens: float = 1.0
    """L."""
    remaining_s: float = math.inf
    """Until the end of the run, at the speed of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What earlier windows showed, for groups of about `group_tokens`."""

    too_few: int = 0
    """Largest number of engines that made the trainer wait; 0 if none did."""
    unavoidable: float = 0.0
    """u."""
    group_tokens: float = 0.0
    fell: bool = False
    """Whether engines left last: then groups that waited for training hide for a while that there
    are too few, and a first window is no measure of what more of them bring."""
    tried: Growth | None = None
    """The growth that the next window is to show the effect of."""

    def under(self, group_tokens: float) -> Learned:
        """What is still known for groups of this many tokens."""
        change = abs(group_tokens - self.group_tokens)
        if change <= _OTHER_WORK * self.group_tokens:
            return self
        return Learned(group_tokens=group_tokens)


@dataclass(frozen=True, slots=True)
class Growth:
    """More engines, as they were decided."""

    before: int
    waiting: float
    """w before."""
    excess: float
    """x before."""
    too_few: int
    """`Learned.too_few` before."""

    def was_useless(self, engines: int, waiting: float) -> bool:
        """Whether the trainer waits hardly less with the engines that there are now.

        The growth promised that groups come in proportion to the engines.
        """
        faster = min(engines / self.before, 1 / (1 - min(self.excess, _ALL_BUT_NOTHING)))
        promised = (1 - self.waiting) * (faster - 1)
        return engines > self.before and self.waiting - waiting < _LEAST_GAIN * promised


def engines_wanted(
    rule: ScalingRule, engines: int, window: Window, learned: Learned
) -> tuple[int, Learned]:
    """Engines that the run should have after this window, and what is known from now on.

    Args:
        rule: its constants.
        engines: there were during the window.
        window: what they and the trainer did.
        learned: as an earlier call returned it; `Learned()` at first.
    """
    learned = learned.under(window.group_tokens)
    growth, learned = learned.tried, replace(learned, tried=None)
    if growth is not None and growth.was_useless(engines, window.waiting):
        unavoidable = max(learned.unavoidable, window.waiting)
        return _within(rule, growth.before), replace(
            learned, too_few=growth.too_few, unavoidable=unavoidable, fell=True
        )
    excess = window.waiting - learned.unavoidable
    if excess > rule.tolerance:
        if window.remaining_s <= rule.startup_s:
            return engines, learned
        return _grown(rule, engines, window.waiting, learned)
    too_many = (
        excess <= rule.tolerance / 2
        and window.drained <= rule.tolerance
        and (window.held_back >= _HELD_BACK or learned.unavoidable > 0)
    )
    if not too_many or engines - learned.too_few <= max(1, engines // _CLOSE):
        return _within(rule, engines), learned
    fewer = engines - max(1, engines // _FIRST_SHRINK)
    if learned.too_few:
        fewer = (engines + learned.too_few) // 2
    fewer = _within(rule, fewer)
    return fewer, replace(learned, fell=learned.fell or fewer < engines)


def _grown(
    rule: ScalingRule, engines: int, waiting: float, learned: Learned
) -> tuple[int, Learned]:
    excess = waiting - learned.unavoidable
    needed = math.ceil(engines / max(1 - excess, 1 / _LARGEST_GROWTH))
    wanted = _within(rule, max(needed, engines + 1))
    steady = wanted > engines and not learned.fell
    return wanted, replace(
        learned,
        too_few=max(engines, learned.too_few),
        fell=False,
        tried=Growth(engines, waiting, excess, learned.too_few) if steady else None,
    )


def _within(rule: ScalingRule, engines: int) -> int:
    return min(max(engines, rule.min_engines), rule.max_engines)


class Watched(Protocol):
    """What the watch reads of a coordinator."""

    @property
    def limits(self) -> Limits:
        """Of the run."""
        ...

    @property
    def counts(self) -> Counts:
        """Of groups."""
        ...

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer waits for groups."""
        ...

    @property
    def held_back(self) -> bool:
        """Whether eq. 3 keeps engines from starting groups."""
        ...


class ScalingWatch:
    """Measures windows of one run, and applies the rule at their ends."""

    def __init__(self, rule: ScalingRule, coordinator: Watched) -> None:
        self.rule = rule
        self._run = coordinator
        ahead = coordinator.limits.schedule.eta
        # At first the engines generate what eq. 3 lets them generate ahead, all at once.
        self._skipped = rule.cooldown_steps + 1 + (math.ceil(ahead) if math.isfinite(ahead) else 0)
        self._learned = Learned()
        self._at_s = 0.0
        self._measures = False
        self._steps = 0
        self._waiting_s = self._held_back_s = 0.0
        self._began_s = 0.0
        self._began = coordinator.counts
        self._began_tokens = 0

    def note(self, now_s: float) -> None:
        """Count the time since the last call; before the coordinator handles an event."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if self._measures:
            self._waiting_s += passed_s * self._run.trainer_waits
            self._held_back_s += passed_s * self._run.held_back

    def step_done(self, now_s: float, *, engines: int, changing: bool, tokens: int) -> int:
        """Engines that the run should have; call it after each training step.

        Args:
            now_s: the time of `note`.
            engines: that are there, without those that are starting or leaving.
            changing: whether some are.
            tokens: generated so far, of groups that have ended.
        """
        if changing:
            return self._changed(engines)
        if engines < self.rule.min_engines:  # some were lost
            return self._changed(self.rule.min_engines)
        if not self._measures:
            self._skipped -= 1
            if self._skipped < 0:
                self._begin(now_s, tokens)
            return engines
        self._steps += 1
        if self._steps < self.rule.window_steps:
            return engines
        window = self._window(now_s, tokens)
        wanted, self._learned = engines_wanted(self.rule, engines, window, self._learned)
        if wanted != engines:
            return self._changed(wanted)
        self._begin(now_s, tokens)
        return engines

    def _changed(self, wanted: int) -> int:
        """Measure again once the groups that are in flight now have ended."""
        in_flight_steps = math.ceil(self._run.counts.in_flight / self._run.limits.batch_groups)
        self._measures, self._skipped = False, self.rule.cooldown_steps + in_flight_steps
        return wanted

    def _begin(self, now_s: float, tokens: int) -> None:
        self._measures, self._steps = True, 0
        self._waiting_s = self._held_back_s = 0.0
        self._began_s, self._began, self._began_tokens = now_s, self._run.counts, tokens

    def _window(self, now_s: float, tokens: int) -> Window:
        before, counts, limits = self._began, self._run.counts, self._run.limits
        seconds = max(now_s - self._began_s, 1e-9)
        ended = _ended(counts) - _ended(before)
        steps = math.inf if limits.train_steps is None else limits.train_steps
        return Window(
            waiting=self._waiting_s / seconds,
            held_back=self._held_back_s / seconds,
            drained=(before.finished - counts.finished) / (self._steps * limits.batch_groups),
            group_tokens=(tokens - self._began_tokens) / max(1, ended),
            remaining_s=(steps - counts.trained_version) * seconds / self._steps,
        )


def _ended(counts: Counts) -> int:
    return counts.finished + counts.trained + counts.filtered
