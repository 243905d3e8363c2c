"""Alarms of a run: a rule for each reads a step, and steps in a row raise or end the alarm.

    beyond beyond beyond ... begun ... within within within ... ended

A rule returns None where its metric is missing (a batch without fresh tokens has no
`sampler_gap_mean`) or has no meaning; such a step counts neither for nor against an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from areal_lab.config.sections import AlarmsConfig
from areal_lab.metrics.alarm import (
    MEASUREMENTS,
    WINDOW,
    Alarm,
    AlarmName,
    Change,
    Facts,
    History,
    Reading,
)


@dataclass(slots=True)
class _Row:
    """Readings in a row that contradict the state of an alarm."""

    steps: int = 0
    first_step: int = 0


class Alarms:
    """Follows the metrics of a run, step by step.

    Args:
        config: the bounds, and the alarms that are never raised.
    """

    def __init__(self, config: AlarmsConfig) -> None:
        self._bounds = config
        self._rules = {name: rule for name, rule in RULES.items() if name not in config.off}
        self._history = History()
        self._rows = {name: _Row() for name in self._rules}
        self._standing: dict[AlarmName, Alarm] = {}
        self.past: list[Alarm] = []
        """Alarms that have ended, in that order."""

    @property
    def standing(self) -> list[Alarm]:
        """Active alarms, the oldest first."""
        return list(self._standing.values())

    def add(self, metrics: Mapping[str, float], facts: Facts) -> list[Change]:
        """Add the metrics of the next step; return the alarms that start or end with it."""
        step = int(metrics["step"])
        self._history.add(metrics, facts)
        changes: list[Change] = []
        for name, rule in self._rules.items():
            reading = rule(self._history, self._bounds)
            if reading is not None and (change := self._weigh(name, step, reading)) is not None:
                changes.append(change)
        return changes

    def _weigh(self, name: AlarmName, step: int, reading: Reading) -> Change | None:
        row, standing = self._rows[name], self._standing.get(name)
        if reading.beyond == (standing is not None):
            row.steps = 0
            return None
        row.first_step = row.first_step if row.steps else step
        row.steps += 1
        if row.steps < self._bounds.steps:
            return None
        row.steps = 0
        if standing is not None:
            over = replace(standing, ended_step=step)
            del self._standing[name]
            self.past.append(over)
            return Change("ended", over)
        alarm = Alarm(
            name=name,
            since_step=row.first_step,
            raised_step=step,
            metric=reading.metric,
            value=reading.value,
            bound=reading.bound,
            what=reading.what,
            cause=reading.cause,
            remedy=reading.remedy,
        )
        self._standing[name] = alarm
        return Change("begun", alarm)


def changes_of(
    lines: Iterable[Mapping[str, float]], facts: Facts, config: AlarmsConfig
) -> list[Change]:
    """Return all changes in the metrics of a run, in order."""
    alarms = Alarms(config)
    return [change for line in lines for change in alarms.add(line, facts)]


def alarms_of(changes: Iterable[Change]) -> list[Alarm]:
    """Return the alarms of a run in the order in which they were raised, ended ones with their
    end.
    """
    found: dict[tuple[str, int], Alarm] = {}
    for change in changes:
        found[change.alarm.name, change.alarm.since_step] = change.alarm
    return list(found.values())


Rule: TypeAlias = Callable[[History, AlarmsConfig], Reading | None]
LAG_WITHOUT_ETA: Final = 16.0
"""Bound of the lag if eta is infinite, in versions: the largest eta of the paper's Table 2."""


def ratio(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Mean ratios of policies; 1 on average if the sampler had the current weights.

    E[pi_new / pi_old] = 1 over tokens sampled from pi_old, for any pi_new.
    """
    found = {
        name: history.newest[name]
        for name in ("ratio_mean", "behavior_weight_mean")
        if name in history.newest
    }
    if not found:
        return None
    name = max(found, key=lambda one: _distance(found[one]))
    value = found[name]
    return Reading(
        metric=name,
        value=value,
        bound=bounds.ratio,
        beyond=not _distance(value) <= bounds.ratio,
        what=f"{name} is {value:.3f}, more than {bounds.ratio:g} away from 1",
        cause=(
            "A few tokens became many times as likely as when they were generated: steps are too "
            f"large for data of this age (lag {_lag(history)})."
        ),
        remedy=(
            "Lower actor.optimizer.lr or eta, or cap the weights "
            "(actor.behav_imp_weight_cap, actor.eps_clip)."
        ),
    )


def drift(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Mean |log pi_theta - log pi_behav| of the trained tokens."""
    value = history.newest.get("drift")
    if value is None:
        return None
    return Reading(
        metric="drift",
        value=value,
        bound=bounds.drift,
        beyond=not value <= bounds.drift,
        what=f"drift is {value:.3f}, above {bounds.drift:g}",
        cause=(
            "The policy has moved far from the one that generated its data "
            f"(lag {_lag(history)}, eta {history.facts.eta:g})."
        ),
        remedy="Lower actor.optimizer.lr (a third), or eta; look at held-out rewards.",
    )


EARLY: Final = 0.6
"""Share of the bound of `weight_deviation` above which a rise towards the bound counts, too. Five
published stable runs stayed at .015 to .023, so that .03 of .05 leaves their noise out."""


def weight_deviation(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Mean |min(w, 2) - 1| of the weights pi_prox / pi_behav, or where its trend leads in 20 steps.

    Four published runs reached .05 some 22 to 41 updates before they collapsed.
    """
    value = history.newest.get("weight_deviation")
    if value is None:
        return None
    bound = bounds.weight_deviation
    now, soon = history.weight_deviation.at(0), history.weight_deviation.at(WINDOW)
    rises = (
        now is not None
        and soon is not None
        and min(now, value) >= EARLY * bound
        and soon > max(now, bound)
    )
    above = not value <= bound
    words = f"above {bound:g}" if above else f"and rises towards {bound:g} within {WINDOW} steps"
    return Reading(
        metric="weight_deviation",
        value=value,
        bound=bound,
        beyond=above or rises,
        what=f"weights pi_prox / pi_behav are {value:.3f} away from 1 on average, {words}",
        cause=(
            "Samples and policy drift apart faster than the weights make up for "
            f"(lag {_lag(history)}, eta {history.facts.eta:g}); runs collapsed soon after."
        ),
        remedy=(
            "Lower eta or actor.optimizer.lr now, set actor.mask_truncated=true or "
            "actor.age_half_life, and keep a checkpoint from before."
        ),
    )


def entropy(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Entropy relative to the first steps; ignored while the task is solved."""
    value, first = history.newest.get("entropy"), history.first_entropy
    if value is None or first is None or first <= 0 or _solved(history, bounds):
        return None
    bound = bounds.entropy * first
    return Reading(
        metric="entropy",
        value=value,
        bound=bound,
        beyond=not value >= bound,
        what=f"entropy is {value:.4f} nats, below {bounds.entropy:.0%} of {first:.4f} at the start",
        cause=(
            "The policy writes nearly the same response each time, and does not solve the task: "
            "it has stopped exploring."
        ),
        remedy=(
            "Start over from an earlier checkpoint with a lower actor.optimizer.lr, a wider "
            "clip above 1, or a higher gconfig.temperature."
        ),
    )


def truncated(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Share of responses that reached the length limit."""
    value = history.newest.get("truncated_share")
    if value is None or _solved(history, bounds):
        return None
    return Reading(
        metric="truncated_share",
        value=value,
        bound=bounds.truncated,
        beyond=not value <= bounds.truncated,
        what=f"{value:.0%} of the responses were cut at their limit, above {bounds.truncated:.0%}",
        cause="Responses that are cut have no final answer, so they teach to be short or nothing.",
        remedy=(
            "Raise gconfig.max_new_tokens, or check gconfig.stop: the model may never write what "
            "ends a response."
        ),
    )


def stale_weights(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Mean lag of trained tokens relative to the bound of the schedule."""
    value = history.newest.get("lag_token_mean")
    if value is None:
        return None
    eta = history.facts.eta
    if math.isfinite(eta):
        # One more than eta: orders that prefer finished groups train some of them a step later.
        bound = bounds.lag or eta + 1
        cause = (
            f"With eta {eta:g} tokens stay younger if new weights reach the engines: pushes fail "
            "or are late, or finished groups wait for too long."
        )
        remedy = "Look at the pushes and engine losses in `areal-lab trace RUN`."
    else:
        bound = bounds.lag or LAG_WITHOUT_ETA
        cause = "Nothing bounds the staleness (eta is inf), and engines outrun the trainer."
        remedy = "Set eta (4 or 8), or use fewer engines."
    return Reading(
        metric="lag_token_mean",
        value=value,
        bound=bound,
        beyond=not value <= bound,
        what=f"tokens are {value:.1f} versions old on average, above {bound:g}",
        cause=cause,
        remedy=remedy,
    )


def sampler_gap(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Mean |log pi_trainer - log pi_engine| of tokens that the current weights generated."""
    value = history.newest.get("sampler_gap_mean")
    if value is None:
        return None
    return Reading(
        metric="sampler_gap_mean",
        value=value,
        bound=bounds.sampler_gap,
        beyond=not value <= bounds.sampler_gap,
        what=(
            f"trainer and engines differ by {value:.3f} nats per token under the same weights, "
            f"above {bounds.sampler_gap:g}"
        ),
        cause=(
            "They compute different probabilities: other types (rollout.dtype, actor.dtype), "
            "sampling that the trainer does not model (top_p, top_k), or other weights than told."
        ),
        remedy=(
            "Set both types to float32 once to see whether the gap vanishes; else set top_p=1 and "
            "top_k=-1, and check the weights of the engines (`version_mismatches` in summary.json)."
        ),
    )


def equal_rewards(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Share of samples whose group has equal rewards; ignored while the task is solved."""
    alike = history.newest.get("zero_advantage_samples")
    samples = history.newest.get("trained_samples")
    if alike is None or not samples or _solved(history, bounds):
        return None
    value, reward = alike / samples, history.newest.get("reward_mean", math.nan)
    return Reading(
        metric="zero_advantage_samples",
        value=value,
        bound=bounds.equal_rewards,
        beyond=not value <= bounds.equal_rewards,
        what=(
            f"{value:.0%} of the samples have an advantage of 0, above {bounds.equal_rewards:.0%}; "
            f"mean reward {reward:.3f}"
        ),
        cause=(
            "All responses to a prompt get the same reward, so there is nothing to learn: problems "
            "are far too hard or too easy, or the reward function always gives the same."
        ),
        remedy=(
            "Score some completions of `trajectories/` by hand, check reward.fn and the answer "
            "field, mix in other problems, or raise gconfig.n_samples."
        ),
    )


def reward_drop(history: History, bounds: AlarmsConfig) -> Reading | None:
    """Held-out reward, or reward of training batches, relative to its best value."""
    measured = history.held_out.best is not None
    rewards = history.held_out if measured else history.reward
    value, best = rewards.mean, rewards.best
    if value is None or best is None or best <= 0:
        return None
    bound = (1 - bounds.reward_drop) * best
    of = f"{MEASUREMENTS} held-out measurements" if measured else f"{WINDOW} steps"
    return Reading(
        metric="held_out_reward" if measured else "reward_mean",
        value=value,
        bound=bound,
        beyond=not value >= bound,
        what=(
            f"the mean reward of {of} is {value:.3f}, below {1 - bounds.reward_drop:.0%} of the "
            f"best, {best:.3f}"
        ),
        cause=(
            "The policy unlearns: steps too large for data of this age "
            f"(lag {_lag(history)}, drift {_shown(history.newest, 'drift')})."
        ),
        remedy=(
            "Go back to a checkpoint from before the drop and lower actor.optimizer.lr or eta."
        ),
    )


RULES: Final[Mapping[AlarmName, Rule]] = MappingProxyType(
    {
        "ratio": ratio,
        "drift": drift,
        "weight_deviation": weight_deviation,
        "entropy": entropy,
        "truncated": truncated,
        "stale_weights": stale_weights,
        "sampler_gap": sampler_gap,
        "equal_rewards": equal_rewards,
        "reward_drop": reward_drop,
    }
)
"""All alarms."""


def _distance(value: float) -> float:
    """Distance from 1; infinite for nan."""
    return math.inf if math.isnan(value) else abs(value - 1)


def _solved(history: History, bounds: AlarmsConfig) -> bool:
    return history.newest.get("reward_mean", -math.inf) >= bounds.solved


def _lag(history: History) -> str:
    return f"{_shown(history.newest, 'lag_token_mean')} versions"


def _shown(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.2g}" if name in metrics else "unknown"
