"""Cost and energy of a run, by pool of GPUs.

A pool is paid for from the first second to the last; its power depends on its utilization. Dollars
are low, typical and high, where prices are published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.catalogue.gpu import GPU, Price

HOUR_S = 3600.0
OVERHEAD = "overhead"
_MOST_EXPONENT = 700.0
"""Above it, `math.exp` overflows."""


def interruption_factor(*, per_h: float, checkpoint_h: float, restart_h: float) -> float:
    r"""Expected time of a run that is interrupted, over its time without interruptions.

    $$ e^{\lambda R} \, \frac{e^{\lambda \tau} - 1}{\lambda \tau}
    = 1 + \lambda \left(\frac{\tau}{2} + R\right) + O(\lambda^2) $$

    Rare interruptions each cost half a checkpoint interval and a restart. Work after a checkpoint
    that is lost is done again, and can be lost again, so that the factor of frequent ones grows
    faster. With exponential gaps, an interval ends without an interruption with probability
    $p = e^{-\lambda \tau}$; its first try takes $(1 - p) / \lambda$ on average, and with
    probability $1 - p$ a restart and the interval follow, $(e^{\lambda (R + \tau)} - 1) / \lambda$.

    Source: Daly, Future Generation Computer Systems 22 (2006), without the time of writing a
    checkpoint, which the simulated step contains.

    Args:
        per_h: lambda, interruptions per hour of the whole cluster; each stops all of it.
        checkpoint_h: tau, hours from one checkpoint to the next.
        restart_h: R, hours from an interruption until the run continues from its checkpoint.

    Raises:
        ValueError: one of them is negative or not finite.
    """
    for name, value in (("per_h", per_h), ("checkpoint_h", checkpoint_h), ("restart_h", restart_h)):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} is {value}, but must be >= 0 and finite")
    work = per_h * checkpoint_h
    if work + per_h * restart_h > _MOST_EXPONENT:
        return math.inf
    return math.exp(per_h * restart_h) * (math.expm1(work) / work if work else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Use of GPUs of one type over a run."""

    name: str
    gpu: GPU
    gpus: float
    seconds: float
    """Duration of the run."""
    utilization: float
    """Share of the GPU-seconds that the pool computes."""

    def __post_init__(self) -> None:
        if self.gpus < 0 or not math.isfinite(self.seconds) or self.seconds < 0:
            raise ValueError(
                f"pool {self.name} has {self.gpus} GPUs for {self.seconds} s; both must be >= 0"
            )
        # A sum of shares may exceed 1 in its last digits.
        if not 0 <= self.utilization <= 1 + 1e-9:
            raise ValueError(
                f"utilization of pool {self.name} is {self.utilization}, but must be in [0, 1]"
            )

    @property
    def gpu_hours(self) -> float:
        """Paid GPU-hours."""
        return self.gpus * self.seconds / HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Dollars of a run or of a part of it; None if no price is known."""

    dollars: float | None
    """Dollars at typical prices."""
    low: float | None
    high: float | None
    gpu_hours: float
    parts: Mapping[str, float]
    """Dollars by pool, and of `overhead`; their sum is `dollars`. Empty without a price."""
    sources: Mapping[str, str]
    """Source of the price, by GPU."""

    def divided(self, by: float) -> Cost:
        """The cost divided by a number: per step, or per million trained tokens."""
        if not math.isfinite(by) or by <= 0:
            raise ValueError(f"cannot divide a cost by {by}; use a number > 0")
        parts = {name: dollars / by for name, dollars in self.parts.items()}
        return Cost(
            dollars=sum(parts.values()) if parts else None,
            low=None if self.low is None else self.low / by,
            high=None if self.high is None else self.high / by,
            gpu_hours=self.gpu_hours / by,
            parts=parts,
            sources=self.sources,
        )

    def per_million_tokens(self, trained_tokens: float) -> Cost:
        """Cost of a million trained tokens."""
        return self.divided(trained_tokens / 1e6)


def run_cost(
    pools: Sequence[PoolUse], *, price_per_gpu_h: float | None = None, overhead: float = 0.0
) -> Cost:
    """Dollars of a run.

    Args:
        pools: all GPUs, each in one pool; a colocated cluster is one pool.
        price_per_gpu_h: replaces the catalogue's prices for all GPUs.
        overhead: fraction added for storage, network and operation.
    """
    for name, value in (("price_per_gpu_h", price_per_gpu_h), ("overhead", overhead)):
        if value is not None and (not math.isfinite(value) or value < 0):
            raise ValueError(f"cluster.{name} is {value}, but must be >= 0")
    prices = [_price(pool.gpu, price_per_gpu_h) for pool in pools]
    typical = _dollars(pools, [price.typical for price in prices], overhead)
    low = _dollars(pools, [_first(price.low, price.typical) for price in prices], overhead)
    high = _dollars(pools, [_first(price.high, price.typical) for price in prices], overhead)
    return Cost(
        dollars=None if typical is None else sum(typical.values()),
        low=None if low is None else sum(low.values()),
        high=None if high is None else sum(high.values()),
        gpu_hours=sum(pool.gpu_hours for pool in pools),
        parts=typical or {},
        sources={
            pool.gpu.name: f"{price.source} ({price.date})" if price.date else price.source
            for pool, price in zip(pools, prices, strict=True)
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of the GPUs alone: hosts, network and cooling often add 50 %."""

    kwh: float
    parts: Mapping[str, float]
    """Kilowatt-hours by `pool, busy` and `pool, idle`; their sum is `kwh`."""


def run_energy(pools: Sequence[PoolUse]) -> Energy:
    """Energy if a busy GPU draws its power limit and a waiting one its idle power.

    The first is an upper bound: decoding is bound by memory and stays below the limit.
    """
    parts: dict[str, float] = {}
    for pool in pools:
        share = min(pool.utilization, 1.0)
        for state, hours, watts in (
            ("busy", share * pool.gpu_hours, pool.gpu.power_w),
            ("idle", (1 - share) * pool.gpu_hours, pool.gpu.idle_power_w),
        ):
            name = f"{pool.name}, {state}"
            parts[name] = parts.get(name, 0.0) + hours * watts / 1000
    return Energy(kwh=sum(parts.values()), parts=parts)


def _price(gpu: GPU, price_per_gpu_h: float | None) -> Price:
    if price_per_gpu_h is None:
        return gpu.price
    return Price(
        low=price_per_gpu_h,
        typical=price_per_gpu_h,
        high=price_per_gpu_h,
        source="cluster.price_per_gpu_h",
        date="",
    )


def _dollars(
    pools: Sequence[PoolUse], prices: Sequence[float | None], overhead: float
) -> dict[str, float] | None:
    parts: dict[str, float] = {}
    for pool, price in zip(pools, prices, strict=True):
        if price is None:
            return None
        parts[pool.name] = parts.get(pool.name, 0.0) + pool.gpu_hours * price
    if overhead:
        parts[OVERHEAD] = overhead * sum(parts.values())
    return parts


def _first(wanted: float | None, otherwise: float | None) -> float | None:
    return otherwise if wanted is None else wanted
