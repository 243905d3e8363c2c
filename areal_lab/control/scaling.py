r"""Number of engines that a run should have: a rule on how generation and training wait.

    event --note--> ScalingWatch --some steps--> Window --engines_wanted--> number, what was learned

With n engines, a window of some training steps has

    w  share of the time in which the trainer waited for groups: generation is the bottleneck
    h  share in which eq. 3 kept engines from starting groups that they had room for, so that
       groups wait for the trainer instead
    d  groups by which those that wait for training became fewer, over the groups trained on
    L  mean tokens of a group: the work

With u the share that more engines did not change (0 until they were tried) and x = w - u, the
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
needed: it approaches the number from below.

**Why u.** Where few groups may run at once, the trainer waits for the longest response, and engines
with fewer responses each are hardly faster. One attempt is compared with the expected gain.

**Why a quarter.** If eq. 3 holds engines back, w is 0 whether one engine or half of them could
leave: the slowdown of fewer engines is unknown before an attempt. A number that turned out
to be too few is remembered, and the next attempts halve the distance to it.

**Why it converges.** While L changes by less than a tenth, a number that made the
trainer wait is not tried again, each growth that helps raises this number, each one that does not
raises u by at least 3/4 e, and between two growths the number of engines only falls: there are
finitely many changes.

**Time.** The first steps of a run are not measured, nor are those after a change in which the
groups that started under another number of engines end, and `cooldown_steps` more. Nothing
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
"""Share of a window in which eq. 3 blocks engines, from which on there may be too many engines."""
_LARGEST_GROWTH: Final = 2
"""Largest factor of growth: a window without training gives no number."""
_LEAST_GAIN: Final = 0.25
"""Share of the expected gain that a growth must bring."""
_ALL_BUT_NOTHING: Final = 0.999
_CLOSE: Final = 8
"""Distance between tried numbers, as one of this many engines, below which another attempt would
cost more than it saves."""
_FIRST_SHRINK: Final = 4
"""One of this many engines leaves while no number is known to be too few."""
_OTHER_WORK: Final = 0.1
"""Relative change of the tokens of a group after which earlier results no longer apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """Constants of the rule."""

    min_engines: int
    max_engines: int
    window_steps: int = 4
    """Training steps over which one decision is computed."""
    cooldown_steps: int = 1
    """Training steps that are not measured after a change, once the groups in flight have ended."""
    tolerance: float = 0.05
    """Share of the time that the trainer may wait for groups."""
    startup_s: float = 0.0
    """Seconds from the decision until a new engine works."""

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
    """Measurements over some training steps; see the module docstring."""

    waiting: float
    """Share w."""
    held_back: float
    """Share h."""
    drained: float = 0.0
    """Share d; negative if more groups wait for training than before."""
    group_tokens: float = 1.0
    """Tokens L."""
    remaining_s: float = math.inf
    """Seconds until the end of the run, at the speed of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Results of earlier windows, for groups of about `group_tokens`."""

    too_few: int = 0
    """Largest number of engines that made the trainer wait; 0 if no number did."""
    unavoidable: float = 0.0
    """Share u."""
    group_tokens: float = 0.0
    fell: bool = False
    """True if the last change removed engines. Groups that waited for training then hide a shortage
    for a while, and a first window does not measure the gain of more engines."""
    tried: Growth | None = None
    """Growth whose effect the next window shows."""

    def under(self, group_tokens: float) -> Learned:
        """Return the results that still apply to groups of this many tokens."""
        change = abs(group_tokens - self.group_tokens)
        if change <= _OTHER_WORK * self.group_tokens:
            return self
        return Learned(group_tokens=group_tokens)


@dataclass(frozen=True, slots=True)
class Growth:
    """Decision to add engines."""

    before: int
    waiting: float
    """Share w before."""
    excess: float
    """Share x before."""
    too_few: int
    """`Learned.too_few` before."""

    def was_useless(self, engines: int, waiting: float) -> bool:
        """Return whether the trainer waits hardly less with the current engines.

        The growth promised that groups come in proportion to the engines.
        """
        faster = min(engines / self.before, 1 / (1 - min(self.excess, _ALL_BUT_NOTHING)))
        promised = (1 - self.waiting) * (faster - 1)
        return engines > self.before and self.waiting - waiting < _LEAST_GAIN * promised


def engines_wanted(
    rule: ScalingRule, engines: int, window: Window, learned: Learned
) -> tuple[int, Learned]:
    """Number of engines after this window, and the results to keep."""
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
    """Properties of a coordinator that the watch reads."""

    @property
    def limits(self) -> Limits:
        """Limits of the run."""
        ...

    @property
    def counts(self) -> Counts:
        """Counts of groups."""
        ...

    @property
    def trainer_waits(self) -> bool:
        """True if the trainer waits for groups."""
        ...

    @property
    def held_back(self) -> bool:
        """True if eq. 3 keeps engines from starting groups."""
        ...


class ScalingWatch:
    """Measure windows of one run, and apply the rule at their ends."""

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
        """Count the time since the last call; call it before the coordinator handles an event."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if self._measures:
            self._waiting_s += passed_s * self._run.trainer_waits
            self._held_back_s += passed_s * self._run.held_back

    def step_done(self, now_s: float, *, engines: int, changing: bool, tokens: int) -> int:
        """Return the wanted number of engines; call it after each training step."""
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
