"""Weight updates: published times, overrides, and refused input."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import WeightsConfig
from simulator.costs.weight_sync import (
    NODES_EXPONENT,
    OTHER_NETWORK,
    SyncMeasurement,
    WeightSync,
    fit_broadcast,
    fit_speed,
    measurements,
    sync_speed,
    weight_sync,
    weight_update,
)

H100 = find_gpu("H100")
BACKENDS = ("disk", "nccl", "delta")
MODELS = ("R1-Distill-Qwen-1.5B", "R1-Distill-Qwen-7B", "R1-Distill-Qwen-32B")


def seconds(backend: str, name: str, **config: float) -> float:
    return weight_sync(WeightsConfig(backend=backend, **config), find_model(name), H100).seconds


FITTED = [row for row in measurements() if not row.why_not]
BROADCAST = [row for row in FITTED if row.backend == "nccl" and row.mixture]
"""Broadcasts of mixtures, whose rate grows with the engine nodes."""
WAYS = sorted(
    {
        (row.backend, row.mixture)
        for row in FITTED
        if not row.backend.startswith("disk") and row not in BROADCAST
    }
)


@pytest.mark.parametrize("row", FITTED, ids=lambda row: f"{row.backend} {row.model} {row.low_s}")
def test_published_times_are_reached_within_50_percent(row) -> None:
    speed = sync_speed(row.backend, mixture=row.mixture)
    predicted = speed.seconds(row.weight_bytes, row.engine_nodes or 1)
    # What a step leaves beside its generation is derived, and less certain; verl's 235B too fast.
    near = 0.72 if "derived: a" in row.source else 0.49
    assert predicted == pytest.approx(row.seconds, rel=near)


@pytest.mark.parametrize(("backend", "mixture"), WAYS)
def test_stated_errors_equal_those_of_the_rows(backend: str, mixture: bool) -> None:
    speed = sync_speed(backend, mixture=mixture)
    rows = [row for row in FITTED if (row.backend, row.mixture) == (backend, mixture)]
    if speed.error is None:
        assert len(rows) <= 2
    else:
        errors = [speed.seconds(row.weight_bytes) / row.seconds - 1 for row in rows]
        own = np.abs(errors).mean()
        # Those of a broadcast contain updates on other servers.
        assert speed.error > 4 * own if backend == "nccl" else speed.error == pytest.approx(own)
        assert fit_speed(rows).error == pytest.approx(own)


def test_the_error_of_each_backend_is_known() -> None:
    assert 0.3 < sync_speed("nccl", mixture=False).error < 0.5
    assert 0.3 < sync_speed("nccl", mixture=True).error < 0.4
    assert sync_speed("delta", mixture=False).error < 0.16
    assert sync_speed("disk export", mixture=False).error < 0.08
    assert sync_speed("disk", mixture=False).error is None
    with pytest.raises(ValueError, match="no published time of 'pigeon'"):
        sync_speed("pigeon", mixture=False)


def test_every_row_names_its_source_and_date() -> None:
    for row in measurements():
        assert row.source
        assert row.date[:2] == "20"
        assert 0 <= row.low_s <= row.high_s


def test_weight_bytes_equal_those_of_the_catalogue() -> None:
    for row in measurements():
        try:
            model = find_model(row.model)
        except ValueError:
            continue
        assert row.weight_bytes == pytest.approx(model.weight_bytes(), rel=0.03), row.model


def test_a_fit_finds_start_and_rate() -> None:
    row = measurements()[0]
    rows = [
        dataclasses.replace(row, weight_bytes=size, low_s=2 + size / 5e9, high_s=2 + size / 5e9)
        for size in (1e9, 1e10, 5e10)
    ]
    speed = fit_speed(rows)
    assert (speed.start_s, speed.bytes_per_s) == pytest.approx((2, 5e9))
    assert speed.error == pytest.approx(0, abs=1e-9)
    assert fit_speed(rows[:1]).start_s == 0
    assert fit_speed(rows[:2]).error is None


def test_the_error_of_a_dense_broadcast_contains_an_update_on_other_servers() -> None:
    (elsewhere,) = [row for row in measurements() if OTHER_NETWORK in row.why_not]
    found = sync_speed("nccl", mixture=False)
    assert elsewhere.seconds > 5 * found.seconds(elsewhere.weight_bytes)
    rows = [row for row in FITTED if row.backend == "nccl" and not row.mixture]
    assert found.error > 4 * (fit_speed(rows).error or 0) > 0


# --- broadcasts of mixtures ----------------------------------------------------------------------

LogSeconds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""ln(seconds) of bytes at engine nodes, but for a constant that is fitted."""


def powers(exponents: Sequence[float]) -> list[LogSeconds]:
    return [lambda size, nodes, at=at: np.log(size) - at * np.log(nodes) for at in exponents]


def shares(serial: Sequence[float]) -> list[LogSeconds]:
    """A serial part, and one that the nodes share."""
    return [lambda size, nodes, s=s: np.log(size * (s + (1 - s) / nodes)) for s in serial]


def starts(seconds_of_gb: Sequence[float]) -> list[LogSeconds]:
    """A start that takes as long as this many GB, and no nodes."""
    return [lambda size, _, gb=gb: np.log(gb * 1e9 + size) for gb in seconds_of_gb]


def left_out_errors(forms: list[LogSeconds], rows: Sequence[SyncMeasurement]) -> list[float]:
    """|ln(predicted / published)| of each row by the form and constant that fit the others best."""
    size, seconds, nodes = (
        np.array([getattr(row, name) for row in rows])
        for name in ("weight_bytes", "seconds", "engine_nodes")
    )
    found = []
    for out in range(len(rows)):
        kept = np.arange(len(rows)) != out
        left = [np.log(seconds) - form(size, nodes) for form in forms]
        best = min(left, key=lambda one: one[kept].var())
        found.append(abs(best[kept].mean() - best[out]))
    return found


def test_the_error_of_a_broadcast_is_that_of_rows_left_out() -> None:
    """No other form with one or two numbers predicts left out rows better."""
    stated = sync_speed("nccl", mixture=True).error
    assert stated == pytest.approx(np.mean(left_out_errors(powers([NODES_EXPONENT]), BROADCAST)))
    fine = np.linspace(0, 1.5, 301)
    others = {
        "constant": powers([0.0]),
        "start": starts([*np.linspace(0, 2000, 401)]),
        "nodes share all": powers([1.0]),
        "nodes share a part": shares([*np.linspace(0, 1, 401)]),
        "fitted exponent": powers([*fine]),
    }
    errors = {name: np.mean(left_out_errors(forms, BROADCAST)) for name, forms in others.items()}
    assert min(errors.values()) > stated, errors
    assert errors["constant"] == pytest.approx(1.16, abs=0.01)
    assert errors["fitted exponent"] == pytest.approx(0.39, abs=0.01)
    assert errors["nodes share a part"] == pytest.approx(0.40, abs=0.01)
    root = np.mean(left_out_errors(powers([0.5]), BROADCAST))
    assert root == pytest.approx(0.54, abs=0.01)


def slope(rows: Sequence[SyncMeasurement]) -> float:
    nodes = np.log([row.engine_nodes for row in rows])
    rates = np.log([row.weight_bytes / row.seconds for row in rows])
    return float(np.polyfit(nodes, rates, 1)[0])


def test_the_exponent_is_the_slope_of_all_rows_and_hangs_on_the_largest() -> None:
    assert slope(BROADCAST) == pytest.approx(NODES_EXPONENT, abs=0.03)
    smaller = [row for row in BROADCAST if row.model != "DeepSeek-V3"]
    assert slope(smaller) == pytest.approx(0.54, abs=0.01)


def test_the_largest_weights_move_as_fast_as_measured() -> None:
    """A step of 64.1 s (NeMo-RL 0.6, DeepSeek-V3, 256 + 256 H100) leaves 39 s for 1.3 TB."""
    found = sync_speed("nccl", mixture=True)
    assert 1342e9 / found.seconds(1342e9, 32) == pytest.approx(34e9, rel=0.1)


def test_a_published_update_that_the_fit_left_out() -> None:
    """64 + 64 H20 took 58.57 s for 235B-A22B; without nodes it would be 3.4 times as much."""
    *rows, published = [row for row in BROADCAST if "derived: a" not in row.source]
    assert (published.seconds, published.engine_nodes) == (58.57, 8)
    fit = fit_broadcast(rows)
    predicted = fit.seconds(published.weight_bytes, published.engine_nodes)
    assert predicted == pytest.approx(published.seconds, rel=0.52)
    flat = np.exp(np.mean([np.log(row.weight_bytes / row.seconds) for row in rows]))
    assert published.weight_bytes / flat > 3.3 * published.seconds


def test_updates_of_a_mixture_get_faster_with_its_engine_nodes_until_the_network() -> None:
    changes = ["model=Qwen3-30B-A3B", "weights.backend=nccl", "weights.update_s=null", "gpus=4096"]

    def update_s(gpus: int, *more: str) -> float:
        config = load_simulation("small", [*changes, f"cluster.rollout_gpus={gpus}", *more])
        return weight_update(config, find_model(config.model), H100).seconds

    assert update_s(4) == update_s(8) == pytest.approx(4**NODES_EXPONENT * update_s(32))
    assert update_s(8) == pytest.approx(32.2, rel=0.1)  # published
    assert update_s(40, "cluster.hybrid_gpus=8") == update_s(32)
    wire_s = find_model("Qwen3-30B-A3B").weight_bytes() / (0.72 * H100.network_bytes_per_s)
    assert update_s(4000) == pytest.approx(wire_s)
    assert update_s(8, "model=Qwen3-32B") == update_s(32, "model=Qwen3-32B")
    assert update_s(8, "weights.backend=delta") == update_s(32, "weights.backend=delta")


def test_a_broadcast_is_not_fitted_to_rows_without_nodes() -> None:
    unknown = dataclasses.replace(BROADCAST[0], engine_nodes=None)
    for rows in (BROADCAST[:1], [*BROADCAST, unknown]):
        with pytest.raises(ValueError, match="all with their engine nodes"):
            fit_broadcast(rows)


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_larger_models_take_longer(backend: str) -> None:
    times = [seconds(backend, name) for name in MODELS]
    assert times == sorted(times)


def test_weights_on_disk_wait_half_a_polling_period_on_average() -> None:
    sync = weight_sync(WeightsConfig(), find_model(MODELS[0]), H100)
    assert sync.delay_s == 2.5  # of 5 s
    assert sync.export_s > 0
    assert sync.load_s > 0


def test_pipeline_stages_write_their_layers_at_the_same_time() -> None:
    model = find_model(MODELS[1])
    one, four = (weight_sync(WeightsConfig(), model, H100, writers=n) for n in (1, 4))
    assert four.export_s == pytest.approx(one.export_s / 4)
    assert (four.delay_s, four.load_s) == (one.delay_s, one.load_s)


def test_other_backends_notify_engines_which_pause_for_the_whole_update() -> None:
    for backend in ("nccl", "delta"):
        sync = weight_sync(WeightsConfig(backend=backend), find_model(MODELS[1]), H100)
        assert (sync.export_s, sync.delay_s) == (0, 0)
        assert sync.load_s == sync.seconds


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_measured_update_keeps_the_proportions(backend: str) -> None:
    model = find_model(MODELS[1])
    plain = weight_sync(WeightsConfig(backend=backend), model, H100)
    measured = weight_sync(WeightsConfig(backend=backend, update_s=30.0), model, H100)
    assert measured.seconds == pytest.approx(30)
    assert measured.load_s / measured.seconds == pytest.approx(plain.load_s / plain.seconds)
    assert measured.error == 0


def test_full_weights_arrive_no_faster_than_the_network() -> None:
    model, slow = find_model(MODELS[1]), find_gpu("RTX-4090")
    sync = weight_sync(WeightsConfig(backend="nccl"), model, slow)
    assert sync.load_s == pytest.approx(model.weight_bytes() / (0.72 * slow.network_bytes_per_s))
    assert weight_sync(WeightsConfig(backend="delta"), model, slow).load_s < sync.load_s


def test_times_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="load_s of a weight update"):
        WeightSync(export_s=0, delay_s=0, load_s=-1)
