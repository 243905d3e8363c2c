"""The staleness bound that measured drift permits: eta of the schedule `bounded_drift`.

    TrainStepDone(measured) --next_eta--> Schedule.eta --eq. 3--> groups that may start

The trainer measures on each batch how far the policy has moved from the one that sampled it. The
batch also says over how many versions: its mean lag, and the step itself. Their ratio gives the age
at which the measured values would meet their bounds. Eta falls to that age at once, and rises to it
slowly, because a batch shows the effect of a higher eta only after that many versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

NOT_MEASURED: Final = -1.0
"""Value of a field of `Measured` that the step did not measure: no real value is negative."""
_REACH: Final = 2.0
"""How far beyond the age of a batch its drift is extrapolated: drift need not be proportional."""
_RATE_EXPONENT: Final = 0.92
"""Power of the learning rate with which drift grows; fitted with `DriftLaw`."""
_DIGITS: Final = 2
"""Digits of eta: a hundredth of a version is less than a group of a batch below 100."""


class Measured(NamedTuple):
    """What a training step measured on the tokens of its batch, each before it is bounded."""

    drift: float = NOT_MEASURED
    """Mean |log pi_theta - log pi_behav|, in nats."""
    weight_deviation: float = NOT_MEASURED
    """Mean |min(w, 2) - 1| of the weights w = pi_prox / pi_behav."""
    effective_share: float = NOT_MEASURED
    """Effective sample size of these weights, as a share of the tokens."""


def measured(metrics: Mapping[str, float]) -> Measured:
    """What a training step measured, from its metrics."""
    names = ("drift", "weight_deviation", "effective_share")
    return Measured(*(metrics.get(name, NOT_MEASURED) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLaw:
    """Drift of a batch by its lag and the learning rate, for runs without a policy.

        drift = drift_at_one * age^age_exponent * (learning_rate / 1e-4)^rate_exponent
              * minibatches^minibatch_exponent,   age = lag + (minibatches - 1) / (2 minibatches)

    The second part of the age is the mean way through the minibatches of the step. The defaults are
    a least-squares fit of the logarithms over 144 runs of `where_staleness_hurts` with eta up to 8
    (Adder-102K and Sorter-102K, rates 3e-5 to 3e-4); their residuals have a standard
    deviation of 0.33, a factor of 1.4. Fit `drift_at_one` to your own logs.
    """

    learning_rate: float = 1e-4
    minibatches: int = 1
    drift_at_one: float = 0.0078
    """In nats, after one version at a learning rate of 1e-4 with one minibatch."""
    age_exponent: float = 0.64
    rate_exponent: float = _RATE_EXPONENT
    minibatch_exponent: float = 0.62

    def at(self, lag: float) -> float:
        """Drift of a batch in nats.

        Args:
            lag: mean over its tokens, in versions.
        """
        count = self.minibatches
        age = lag + (count - 1) / (2 * count)
        factors = (
            math.pow(age, self.age_exponent),
            math.pow(self.learning_rate / 1e-4, self.rate_exponent),
            math.pow(count, self.minibatch_exponent),
        )
        return self.drift_at_one * math.prod(factors)


class LagAdvice(NamedTuple):
    """What a logged drift says about staleness, for a run without the schedule."""

    hurts: bool
    """Whether the logged drift is beyond its bound: the run is expected to lose reward."""
    permitted_lag: float
    """Largest mean lag, in versions, whose drift stays within the bound; 0 if none does."""
    rate_factor: float
    """Factor on the learning rate with which the logged lag has a drift at the bound."""


def advise_on_lag(
    drift: float, lag: float, *, max_drift: float, minibatches: int = 1, age_exponent: float = 0.4
) -> LagAdvice:
    """Rule for the log of any framework: which lag, or which learning rate, its drift permits.

        age = lag + (minibatches - 1) / (2 minibatches),   drift ~ age^age_exponent

    Measure on some tens of steps after the first. The exponent is that of one setting at several
    lags: 0.41 over the cells of `where_staleness_hurts` with decoupled PPO (addition, lags from 2
    to 40 versions, rates 3e-5 to 3e-4, 1 to 16 minibatches); with naive PPO drift grows less, and
    the same exponent finds as many losing cells. The bounds there are 0.08 nats with decoupled and
    0.05 with naive PPO. `python -m reproductions.bounded_drift` prints how often it is right
    about cells that it was not made from. The models are small: for a large one the direction
    should hold, the bound need not.

    Args:
        drift: logged mean |log pi_theta - log pi_behav| of trained tokens, in nats. A gap between
            the numbers of trainer and engine adds to it.
        lag: logged mean lag of the same tokens, in versions.
        max_drift: bound on drift, in nats.
        minibatches: optimizer steps per batch.
        age_exponent: power of the age with which drift grows.

    Raises:
        ValueError: a number is out of range.
    """
    for name, value, least in (
        ("drift", drift, 0.0),
        ("max_drift", max_drift, 0.0),
        ("age_exponent", age_exponent, 0.0),
        ("minibatches", minibatches, 0.0),
    ):
        if not least < value < math.inf:
            raise ValueError(f"{name} is {value:g}, but must be finite and > {least:g}")
    if not 0 <= lag < math.inf:
        raise ValueError(f"lag is {lag:g}, but must be finite and >= 0")
    part = (minibatches - 1) / (2 * minibatches)
    if lag + part == 0:
        raise ValueError("lag is 0 with one minibatch: nothing is stale; log a run with eta >= 1")
    share = max_drift / drift
    return LagAdvice(
        hurts=drift > max_drift,
        permitted_lag=max(0.0, (lag + part) * share ** (1 / age_exponent) - part),
        rate_factor=share ** (1 / _RATE_EXPONENT),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBound:
    """Bounds on what staleness does to the policy, and on eta."""

    max_drift: float
    """Largest mean |log pi_theta - log pi_behav|, in nats; inf has no bound."""
    max_weight_deviation: float = math.inf
    """Largest mean |w - 1|; inf has no bound."""
    min_effective_share: float = 0.0
    """Smallest effective sample size, as a share of the tokens; 0 has no bound."""
    min_eta: float = 0.0
    """Smallest eta, with which a run starts."""
    max_eta: float = math.inf
    """Largest eta."""

    def __post_init__(self) -> None:
        for name in ("max_drift", "max_weight_deviation"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be > 0")
        if not 0 <= self.min_effective_share < 1:
            raise ValueError(
                f"min_effective_share is {self.min_effective_share}, but must be in [0, 1)"
            )
        if not 0 <= self.min_eta <= self.max_eta or math.isinf(self.min_eta):
            raise ValueError(
                f"bounded_drift.min_eta is {self.min_eta:g}, but must be finite, and from 0 to eta "
                f"({self.max_eta:g}), the largest one"
            )

    def pressure(self, measured: Measured) -> float | None:
        """Largest of the measured values as a share of its bound; above 1 one is exceeded.

        None if no bounded value was measured. NaN counts as infinite: the policy is broken.
        """
        room = 1.0 - self.min_effective_share
        shares = [
            measured.drift / self.max_drift,
            measured.weight_deviation / self.max_weight_deviation,
            (1.0 - measured.effective_share) / room if room < 1.0 else NOT_MEASURED,
        ]
        known = [
            math.inf if math.isnan(share) else share
            for value, share in zip(measured, shares, strict=True)
            if value != NOT_MEASURED and not share < 0
        ]
        return max(known, default=None)


def next_eta(bound: DriftBound, eta: float, lag: float, measured: Measured) -> float:
    """Staleness bound after a training step, in versions.

    A batch of age a = lag + 1 (the step is a version, too) with pressure p permits the age a / p.
    Eta + 1 falls to it at once. It rises to it, but at most to 2 a, by the power 1 / (a + 1) of the
    ratio: in about a steps, after which a batch shows what the rise did. A step that measured
    nothing leaves eta as it is: neither does it open the gate, nor does a batch without a gradient,
    which moves nothing, close it.

    Args:
        bound: the bounds.
        eta: staleness bound in force, in versions.
        lag: mean over the groups of the batch: versions between a group's start and this step.
        measured: by the step.
    """
    pressure = bound.pressure(measured)
    if pressure is None:
        return eta
    age, now = lag + 1.0, eta + 1.0
    permitted = age / pressure if pressure > 0 else math.inf
    if permitted > now:
        permitted = max(now, min(permitted, _REACH * age))
        permitted = now * (permitted / now) ** (1.0 / (age + 1.0))
    return min(max(round(permitted - 1.0, _DIGITS), bound.min_eta), bound.max_eta)
