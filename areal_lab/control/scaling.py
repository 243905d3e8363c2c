r"""How many engines a run should have: a rule on how generation and training wait for each other.

    event --note--> ScalingWatch --each step--> Window --engines_wanted--> number, and what it learned

With n engines, a window of some training steps has

    w  share of the time in which the trainer waited for groups: generation is the bottleneck
    h  share in which eq. 3 kept engines from starting groups that they had room for, so that
       groups wait for the trainer instead
    d  groups by which those that wait for training became fewer, over the groups trained on
    L  mean tokens of a group: the work

and the rule, within [min, max], with a tolerance e (5 %):

    grow     w > e                         to ceil(n / (1 - w)), at least n + 1, at most 2 n
    shrink   w <= e / 2, h >= 1/2, d <= e  by a quarter, or half of the way to a number that was
                                           too few
    else     n

**Why n / (1 - w).** The trainer worked for (1 - w) of the time, so groups have to come 1 / (1 - w)
times as fast. The tokens per second of n engines with a fixed number of groups in flight are
concave in n, since an engine with a smaller batch is slower, so this never asks for more than are
needed: it comes near from below.

**Why a quarter.** If eq. 3 holds engines back, w is 0 whether one engine or half of them could
leave: how much slower fewer engines are is not known before it is tried. A number that turned out
to be too few is remembered, and the next attempts halve the distance to it.

**Why it comes to rest.** A number that made the trainer wait is never tried again while L stays
within a tenth of what it was then. Each growth raises that number, and between two growths the
engines only become fewer, so that there are finitely many changes, whatever the windows say.

**Time.** What engines do in the first steps of a run, and in `cooldown_steps` after a change, is not
measured: the groups in flight began under another number of engines. Nothing is decided while an
engine is starting, and none is started that would come after the end of the run (`startup_s`).

Times are arguments; the same rule is used by the pipeline and by the simulator. The proportional
step is that of autoscalers of services (Kubernetes: desired = ceil(current * metric / target)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from areal_lab.control.coordinator import Counts
from areal_lab.control.limits import Limits

_HELD_BACK: Final = 0.5
"""Share of a window in which eq. 3 holds engines back, from which on there may be too many."""
_LARGEST_GROWTH: Final = 2
"""Times as many engines as there are: a window in which nothing was trained on says no number."""
_FIRST_SHRINK: Final = 4
"""One of so many engines leaves while no number is known to be too few."""
_OTHER_WORK: Final = 0.1
"""Relative change of the tokens of a group after which what was too few may be enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """Constants of the rule."""

    min_engines: int
    max_engines: int
    window_steps: int = 4
    """Training steps that one decision looks at."""
    cooldown_steps: int = 2
    """Training steps after a change that are not measured."""
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


@dataclass(frozen=True, slots=True)
class TooFew:
    """The largest number of engines that made the trainer wait, and the work at that time."""

    engines: int = 0
    group_tokens: float = 0.0

    def under(self, group_tokens: float) -> TooFew:
        """What is still known of it for groups of so many tokens."""
        change = abs(group_tokens - self.group_tokens)
        return self if change <= _OTHER_WORK * self.group_tokens else TooFew()


def engines_wanted(
    rule: ScalingRule, engines: int, window: Window, too_few: TooFew
) -> tuple[int, TooFew]:
    """Engines that the run should have after this window, and what is too few from now on.

    Args:
        rule: its constants.
        engines: there were during the window.
        window: what they and the trainer did.
        too_few: as an earlier call returned it; `TooFew()` at first.
    """
    too_few = too_few.under(window.group_tokens)
    if window.waiting > rule.tolerance:
        known = TooFew(max(engines, too_few.engines), window.group_tokens)
        if window.remaining_s <= rule.startup_s:
            return engines, known
        needed = math.ceil(engines / max(1 - window.waiting, 1 / _LARGEST_GROWTH))
        return _within(rule, max(needed, engines + 1)), known
    too_many = (
        window.waiting <= rule.tolerance / 2
        and window.held_back >= _HELD_BACK
        and window.drained <= rule.tolerance
    )
    if not too_many or engines <= too_few.engines + 1:
        return _within(rule, engines), too_few
    fewer = engines - max(1, engines // _FIRST_SHRINK)
    if too_few.engines:
        fewer = (engines + too_few.engines) // 2
    return _within(rule, fewer), too_few


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
        self._too_few = TooFew()
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
            self._measures, self._skipped = False, self.rule.cooldown_steps
            return engines
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
        wanted, self._too_few = engines_wanted(self.rule, engines, window, self._too_few)
        if wanted != engines:
            return self._changed(wanted)
        self._begin(now_s, tokens)
        return engines

    def _changed(self, wanted: int) -> int:
        self._measures, self._skipped = False, self.rule.cooldown_steps
        return wanted

    def _begin(self, now_s: float, tokens: int) -> None:
        self._measures, self._steps = True, 0
        self._waiting_s = self._held_back_s = 0.0
        self._began_s, self._began, self._began_tokens = now_s, self._run.counts, tokens

    def _window(self, now_s: float, tokens: int) -> Window:
        before, counts, limits = self._began, self._run.counts, self._run.limits
        seconds = max(now_s - self._began_s, 1e-9)
        ended = _ended(counts) - _ended(before)
        left = math.inf if limits.train_steps is None else limits.train_steps - counts.trained_version
        return Window(
            waiting=self._waiting_s / seconds,
            held_back=self._held_back_s / seconds,
            drained=(before.finished - counts.finished) / (self._steps * limits.batch_groups),
            group_tokens=(tokens - self._began_tokens) / max(1, ended),
            remaining_s=left * seconds / self._steps,
        )


def _ended(counts: Counts) -> int:
    return counts.finished + counts.trained + counts.filtered
