"""What the drift of an imported log says about its lag: `control.drift.advise_on_lag`, in words.

steps with a lag    --medians--> drift, lag --rule, by objective--> permitted lag, or rate
steps without a lag --median---> gap between engine and trainer, which the rule takes off
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from areal_lab.control.drift import LagAdvice, advise_on_lag
from areal_lab.control.schedule import SAFE_DRIFT
from areal_lab.foreign.record import ImportedRun

NEEDED: Final = ("drift_logp_abs_mean", "lag_mean")
"""Quantities of a log that the rule reads."""
ERROR: Final = (
    "The rule comes from models of 102,000 parameters. Of cells that it was not made from, it "
    "finds 164 of 215 pairs that lose reward, with 0 false alarms among 41 (python -m "
    "reproductions.bounded_drift)."
)
"""What the rule was made from, and how often it is right."""
_LARGEST_LAG: Final = 40.0
"""Versions of the cells that the rule was made from."""
_LEAST_DRIFT: Final = 1e-6
"""In nats; less is the rounding of log-probs."""
_OBJECTIVES: Final[Mapping[str, str]] = {
    "decoupled": "decoupled PPO",
    "naive": "PPO around the sampler",
}


@dataclass(frozen=True, slots=True)
class LoggedDrift:
    """Drift and lag of a log, and what the rule says about them."""

    steps: int
    """Number of steps with a lag."""
    lag: float
    """Median of their mean lags, in versions."""
    drift: float
    """Median of their drifts, less `gap`, in nats."""
    gap: float | None
    """Median drift of steps without a lag, in nats; None if there are none."""
    learning_rate: float | None
    advice: Mapping[str, LagAdvice]
    """By objective. A permitted lag is at most 40 versions, or the logged lag."""

    def lines(self) -> Iterator[str]:
        """Sentences for a report."""
        gap = "the gap between engine and trainer"
        gap = f"with {gap}" if self.gap is None else f"without {gap}, {self.gap:.3g} nats"
        told = "; ".join(
            f"with {_OBJECTIVES[name]} (bound {SAFE_DRIFT[name]:g} nats) {self._clause(one)}"
            for name, one in self.advice.items()
        )
        yield (
            f"drift {self.drift:.3g} nats at a mean lag of {self.lag:.3g} versions (medians of "
            f"{self.steps} step{'s' * (self.steps > 1)}, {gap}): {told}."
        )
        yield ERROR

    def _clause(self, one: LagAdvice) -> str:
        if not one.hurts:
            more = "more than " if one.permitted_lag >= _LARGEST_LAG else ""
            return f"it permits a lag of {more}{one.permitted_lag:.2g}"
        rate = f"{one.rate_factor:.2f} times"
        if self.learning_rate:
            rate = f"{self.learning_rate * one.rate_factor:.2g} ({rate})"
        return (
            f"it is expected to cost reward: lower the lag to {one.permitted_lag:.2g}, or the "
            f"learning rate to {rate}"
        )

    def as_json(self) -> dict[str, Any]:
        """Its fields with the sentences, for `--json`."""
        advice = {name: one._asdict() for name, one in self.advice.items()}
        return {**asdict(self), "advice": advice, "text": list(self.lines())}


def logged_drift(run: ImportedRun) -> LoggedDrift | None:
    """Apply the rule to a log; None without both quantities, and without a step that has a lag.

    Frameworks compare log-probs of the start of a step, so no minibatch adds to the age.
    """
    pairs: dict[int, dict[str, float]] = {}
    rates = []
    for one in run.steps:
        for name in NEEDED:
            if (value := one.number(name)) is not None:
                pairs.setdefault(one.step, {})[name] = value
        if (rate := one.number("learning_rate")) is not None:
            rates.append(rate)
    both = [(own[NEEDED[1]], own[NEEDED[0]]) for own in pairs.values() if len(own) == len(NEEDED)]
    stale = [(lag, drift) for lag, drift in both if lag > 0]
    if not stale:
        return None
    fresh = [drift for lag, drift in both if lag == 0]
    gap = median(fresh) if fresh else None
    lag = median(lag for lag, _ in stale)
    drift = max(median(drift for _, drift in stale) - (gap or 0.0), _LEAST_DRIFT)
    advice = {}
    for name, bound in SAFE_DRIFT.items():
        found = advise_on_lag(drift, lag, max_drift=bound)
        permitted = min(found.permitted_lag, max(lag, _LARGEST_LAG))
        advice[name] = found._replace(permitted_lag=permitted)
    return LoggedDrift(
        steps=len(stale),
        lag=lag,
        drift=drift,
        gap=gap,
        learning_rate=median(rates) if rates else None,
        advice=advice,
    )


def lag_lines(run: ImportedRun) -> list[str]:
    """Advice on the lag of a run, or what its log lacks in one line; empty if it is synchronous."""
    if (found := logged_drift(run)) is not None:
        return list(found.lines())
    known = {name for one in run.steps for name in NEEDED if one.number(name) is not None}
    missing = [name for name in NEEDED if name not in known]
    if not run.steps or run.mode == "synchronous" or not missing:
        return []
    return [f"no advice on lag: the log has no {' and no '.join(missing)}"]
