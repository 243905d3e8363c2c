"""Systems small enough to compute by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.limits import Limits
from areal_lab.control.order import BatchOrder, oldest_finished_first
from areal_lab.control.schedule import Schedule
from areal_lab.runlog.records import Log, Record, RunHeader
from simulator.config.schema import LengthConfig, WorkloadConfig
from simulator.run.one_seed import run_system
from simulator.run.result import SimulationResult
from simulator.run.system import System
from tests.simulator.engine.toy_engine import toy_engines


@dataclass
class Drawn:
    """Lengths by any function of a generator and a shape."""

    of: Callable[[np.random.Generator, tuple[int, int]], NDArray[Any]]

    def draw(
        self, generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> NDArray[np.int64]:
        assert step >= 0
        return np.maximum(1, np.asarray(self.of(generator, (groups, samples)), dtype=np.int64))


def constant(tokens: int) -> Drawn:
    return Drawn(lambda _, shape: np.full(shape, tokens))


def lognormal(mean: float, sigma: float = 0.7, most: int = 10**9) -> Drawn:
    mu = np.log(mean) - sigma**2 / 2
    return Drawn(lambda g, shape: np.minimum(most, g.lognormal(mu, sigma, shape).astype(np.int64)))


@dataclass
class Latencies:
    """Latencies by any function of a generator and a size."""

    of: Callable[[np.random.Generator, int], NDArray[Any]]

    def draw(self, generator: np.random.Generator, size: int, /) -> NDArray[np.float64]:
        return np.asarray(self.of(generator, size), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """A training step that takes the same time for every batch."""

    seconds: float
    name: str = "train"

    @property
    def parts(self) -> Mapping[str, float]:
        return {self.name: self.seconds}

    # Part of the protocol; constant seconds do not depend on it.
    def step(self, lengths: Any, *, minibatches: int) -> Seconds:  # noqa: ARG002
        return self


@dataclass
class PerToken:
    """Training that takes `token_s` seconds per token."""

    token_s: float
    steps: list[tuple[int, ...]] = field(default_factory=list)

    def step(self, lengths: Any, *, minibatches: int) -> Seconds:
        assert minibatches >= 1
        self.steps.append(tuple(lengths))
        return Seconds(seconds=self.token_s * sum(lengths))


def toy_system(
    schedule: Schedule,
    *,
    batch: int = 4,
    parts: int = 1,
    hybrid: int = 0,
    in_flight: int | None = None,
    group_slots: int = 1,
    steps: int = 12,
    samples: int = 2,
    complete: bool = False,
    order: BatchOrder | None = None,
    token_s: float = 1.0,
    slots: int | None = None,
    train_s: float = 50.0,
    **fields: Any,
) -> System:
    """By default 100 tokens of 1 s on engines without a limit, and 50 s of training.

    Args:
        fields: of the workload or of the system.
    """
    work = {"prompt_tokens": 10, "minibatches": 1, "warmup_steps": 0}
    names = set(WorkloadConfig.model_fields) - {"reward", "tool"}  # the system's parts
    work |= {name: fields.pop(name) for name in names & set(fields)}
    defaults: dict[str, Any] = {
        "engines": 2,
        "lengths": constant(100),
        "make_engine": toy_engines(token_s, slots),
        "training": Seconds(seconds=train_s),
    }
    return System(
        limits=Limits(
            batch_groups=batch,
            batch_parts=parts,
            hybrid_engines=hybrid,
            max_in_flight=batch if in_flight is None else in_flight,
            group_slots=group_slots,
            train_steps=steps if complete else None,
            schedule=schedule,
            order=order or oldest_finished_first(),
        ),
        workload=WorkloadConfig(
            prompts_per_batch=batch,
            samples_per_prompt=samples,
            steps=steps,
            answers=LengthConfig(max_tokens=10**9),
            **work,
        ),
        **{**defaults, **fields},
    )


def run_with_log(system: System, seed: int = 1) -> tuple[SimulationResult, Log]:
    records: list[Record] = []
    result = run_system(system, seed, records.append)
    header = records[0]
    assert isinstance(header, RunHeader)
    return result, Log(header, tuple(records[1:]))
