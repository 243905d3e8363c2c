"""Duration of weight updates: measured, or fitted to published measurements.

    export      the trainer writes or gathers the weights; generation continues
    delay       the weights wait on disk until an engine polls; generation continues
    load        engines are paused and load the weights

    seconds = start + bytes of the weights / effective rate         per backend, dense or mixture
    seconds = bytes / (rate engine nodes^0.8)                       broadcasts of mixtures

Effective rates are 2 to 15 GB/s a node, at most a tenth of the wire rate, because of gathering,
converting names and many small tensors. Interrupting sequences and recomputing their cache is not
included: the engines account for it (`simulator.engine.replica`). Rates are those of the measured
servers (mostly H100s with 400 Gb/s each) for every GPU; a measured `weights.update_s` is better.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.config.schema import SimulationConfig, WeightsConfig
from simulator.costs.coefficients import DATA, PublishedTime, read_table
from simulator.costs.communication import NODE_PAIR_EFFICIENCY
from simulator.costs.weight_bytes import BF16, Sent, sent_weights

OTHER_NETWORK = "network is not stated"
"""In the reason why a row is not fitted: an update like the fitted ones, on other servers. It
counts in the error, which otherwise is that of one system alone."""

NODE_GPUS = 8
"""GPUs of a server in all published rows. Racks and smaller servers count by their GPUs, too."""

NODES_EXPONENT = 0.8
"""The rate of a mixture's broadcast grows with the engine nodes to this power.

Between stages that do not get faster with more nodes (0: gathering, the sender's link) and those
that every node has for itself (1: receiving, converting, loading). A line through ln(rate) of seven
updates of five models and three systems has a slope of 0.82: 1.9 GB/s on one node, 8 on eight, 34
on 32. Three of them are what a measured step leaves beside its simulated generation, an upper bound
of the update. With each row left out, mean |ln| is 0.35; with a fitted exponent 0.39, with a serial
part and one that the nodes share 0.40, with the square root of before 0.54, without nodes 1.16.
Without DeepSeek-V3 the slope is 0.54, so the rate beyond 8 nodes has one system as its source.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMeasurement(PublishedTime):
    """Time of a weight update."""

    backend: str
    model: str
    weight_bytes: float
    """bf16."""
    mixture: bool
    engine_nodes: float | None
    """Servers that receive; None if not stated."""


@cache
def measurements() -> tuple[SyncMeasurement, ...]:
    """The measurements of `data/weight_sync.csv`, which lists their sources."""
    return tuple(
        SyncMeasurement(
            backend=row["backend"],
            model=row["model"],
            weight_bytes=float(row["weight_gb"]) * 1e9,
            mixture=row["mixture"] == "yes",
            engine_nodes=float(row["engine_nodes"]) if row["engine_nodes"] else None,
            low_s=float(row["low_s"]),
            high_s=float(row["high_s"]),
            source=row["source"],
            date=row["date"],
            why_not=row["why_not"],
        )
        for row in read_table(DATA / "weight_sync.csv")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSpeed:
    """Start time and rate of one backend, fitted to its measurements."""

    start_s: float
    bytes_per_s: float
    error: float | None
    """Mean absolute relative error on those rows; None if there are too few. For broadcasts the
    mean |ln| of the quotient: of mixtures with each row left out, of dense models with rows of
    other servers."""
    nodes_exponent: float = 0.0
    """The rate is that of one node, and grows with the engine nodes to this power."""

    def seconds(self, weight_bytes: float, engine_nodes: float = 1.0) -> float:
        """Seconds for weights of `weight_bytes` bytes; less than a node counts as one."""
        rate = self.bytes_per_s * math.pow(max(1.0, engine_nodes), self.nodes_exponent)
        return self.start_s + weight_bytes / rate


def fit_speed(rows: Sequence[SyncMeasurement]) -> SyncSpeed:
    """Least squares of the relative error; a start below 0, or of one row, is 0."""
    seconds = np.array([row.seconds for row in rows])
    size = np.array([row.weight_bytes for row in rows])
    columns = np.stack([np.ones_like(size), size], axis=1) / seconds[:, None]
    start, slope, coefficients = 0.0, 0.0, 2
    if len({row.weight_bytes for row in rows}) > 1:
        start, slope = np.linalg.lstsq(columns, np.ones_like(size), rcond=None)[0]
    if start <= 0 or slope <= 0:
        start, coefficients = 0.0, 1
        slope = columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    error = float(np.abs((start + slope * size) / seconds - 1).mean())
    return SyncSpeed(
        start_s=float(start),
        bytes_per_s=float(1 / slope),
        error=error if len(rows) > coefficients else None,
    )


def fit_broadcast(rows: Sequence[SyncMeasurement]) -> SyncSpeed:
    """Broadcast of a mixture: a rate of one node, which grows with the nodes (`NODES_EXPONENT`).

    The least squares of ln(seconds), which is the geometric mean of the rows' rates. The error is
    the mean |ln(predicted / published)| of each row by a fit to the others.
    """
    if len(rows) < 2 or any(row.engine_nodes is None for row in rows):
        raise ValueError(f"{len(rows)} rows, but need two or more, all with their engine nodes")
    rates = np.array(
        [
            row.weight_bytes / (row.seconds * (row.engine_nodes or 1) ** NODES_EXPONENT)
            for row in rows
        ]
    )
    logs = np.log(rates)
    others = (logs.sum() - logs) / (len(rows) - 1)
    return SyncSpeed(
        start_s=0.0,
        bytes_per_s=float(np.exp(logs.mean())),
        error=float(np.abs(others - logs).mean()),
        nodes_exponent=NODES_EXPONENT,
    )


@cache
def sync_speed(backend: str, *, mixture: bool) -> SyncSpeed:
    """Start time and rate of one backend.

    Args:
        backend: `nccl`, `delta`, `disk` (export and load together), or `disk export`.
        mixture: mixture of experts, with more and smaller tensors; no difference for storage.
    """
    rows = [
        row
        for row in measurements()
        if row.backend == backend
        and not row.why_not
        and (row.mixture == mixture or backend.startswith("disk"))
    ]
    if not rows:
        raise ValueError(f"no published time of {backend!r}; set weights.update_s")
    if backend == "nccl" and mixture:
        return fit_broadcast(rows)
    fit = fit_speed(rows)
    elsewhere = [
        row
        for row in measurements()
        if row.backend == backend and row.mixture == mixture and OTHER_NETWORK in row.why_not
    ]
    if not elsewhere:
        return fit
    logs = [abs(math.log(fit.seconds(row.weight_bytes) / row.seconds)) for row in rows + elsewhere]
    return dataclasses.replace(fit, error=sum(logs) / len(logs))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSync:
    """One update of the engines' weights."""

    export_s: float = 0.0
    """The trainer writes; generation continues."""
    delay_s: float = 0.0
    """Mean wait until the engines poll; generation continues."""
    load_s: float = 0.0
    """Engines are paused."""
    error: float | None = 0.0
    """Mean absolute relative error of the fit; None if unknown, 0 if measured."""
    provenance: str = ""

    def __post_init__(self) -> None:
        for name in ("export_s", "delay_s", "load_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} of a weight update is {value}, but must be >= 0")

    @property
    def seconds(self) -> float:
        """Mean time from the end of a training step until every engine has the weights."""
        return self.export_s + self.delay_s + self.load_s


def weight_update(config: SimulationConfig, model: ModelShape, gpu: GPU) -> WeightSync:
    """Weight update of a config's engines; see `weight_sync`."""
    cluster = config.cluster
    return weight_sync(
        config.weights,
        model,
        gpu,
        sent_weights(config),
        writers=config.trainer.pipeline_parallel,
        engine_nodes=(cluster.rollout_gpus - cluster.hybrid_gpus) / NODE_GPUS,
    )


def weight_sync(
    config: WeightsConfig,
    model: ModelShape,
    gpu: GPU,
    sent: Sent = BF16,
    *,
    writers: int = 1,
    engine_nodes: float = 1.0,
) -> WeightSync:
    """Weight update of disaggregated engines.

    A measured `export_s` or `load_s` replaces that part. A measured `update_s` replaces the sum;
    its parts keep their proportions.

    Args:
        model: model whose weights are updated.
        gpu: GPU of the engines, whose network bounds the rate of full weights.
        sent: what travels: weights in a precision, or adapters.
        writers: pipeline stages of the trainer, which write their layers to disk at the same time
            (`save_to_hf` of AReaL's realhf, 2025; the measured trainers have one).
        engine_nodes: GPUs that receive / `NODE_GPUS`; only broadcasts of mixtures depend on it.
    """
    size, mixture = sent.weight_bytes(model), bool(model.experts)
    if config.backend == "disk":
        whole = sync_speed("disk", mixture=mixture)
        export_s = sync_speed("disk export", mixture=mixture).seconds(size)
        by_model = WeightSync(
            export_s=export_s / writers,
            delay_s=config.poll_s / 2,
            load_s=max(0.0, whole.seconds(size) - export_s),
            error=whole.error,
            provenance=(
                "shared storage: prime-rl's benchmark (2026-01), AReaL pull request 324 (2025-09)"
            ),
        )
    else:
        speed = sync_speed(config.backend, mixture=mixture)
        wire_s = size / (gpu.network_bytes_per_s * NODE_PAIR_EFFICIENCY)
        by_model = WeightSync(
            export_s=0.0,
            delay_s=0.0,
            load_s=max(
                speed.seconds(size, engine_nodes), wire_s if config.backend == "nccl" else 0.0
            ),
            error=speed.error,
            provenance=(
                "verl, docs/advance/delta_weight_sync.md (2026-07), H100"
                + (
                    f", and its one-step-off page, H20: {engine_nodes:.3g} engine nodes"
                    if speed.nodes_exponent
                    else ""
                )
            ),
        )
    by_model = _with_measured_parts(by_model, config)
    if config.update_s is None:
        return by_model
    if by_model.seconds == 0:  # both parts were given as 0
        by_model = dataclasses.replace(by_model, load_s=1.0)
    share = config.update_s / by_model.seconds
    return WeightSync(
        export_s=share * by_model.export_s,
        delay_s=share * by_model.delay_s,
        load_s=share * by_model.load_s,
        provenance="weights.update_s, divided into parts as modeled",
    )


def _with_measured_parts(by_model: WeightSync, config: WeightsConfig) -> WeightSync:
    given = {
        name: seconds
        for name in ("export_s", "load_s")
        if (seconds := getattr(config, name)) is not None
    }
    if not given:
        return by_model
    # With both, only the wait for the next poll is modeled.
    known = len(given) == 2
    names = " and ".join(f"weights.{name}" for name in given)
    return dataclasses.replace(
        by_model,
        **given,
        error=0.0 if known else by_model.error,
        provenance=f"{names}, given" if known else f"{names}, given; {by_model.provenance}",
    )
