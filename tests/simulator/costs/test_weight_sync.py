"""Weight updates: published times, overrides, and refused input."""

import dataclasses

import numpy as np
import pytest

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import WeightsConfig
from simulator.costs.weight_sync import (
    OTHER_NETWORK,
    WeightSync,
    fit_speed,
    measurements,
    sync_speed,
    weight_sync,
)

H100 = find_gpu("H100")
BACKENDS = ("disk", "nccl", "delta")
MODELS = ("R1-Distill-Qwen-1.5B", "R1-Distill-Qwen-7B", "R1-Distill-Qwen-32B")


def seconds(backend: str, name: str, **config: float) -> float:
    return weight_sync(WeightsConfig(backend=backend, **config), find_model(name), H100).seconds


FITTED = [row for row in measurements() if not row.why_not]
WAYS = sorted({(row.backend, row.mixture) for row in FITTED if not row.backend.startswith("disk")})


@pytest.mark.parametrize("row", FITTED, ids=lambda row: f"{row.backend} {row.model} {row.low_s}")
def test_published_times_are_reached_within_50_percent(row) -> None:
    speed = sync_speed(row.backend, mixture=row.mixture)
    assert speed.seconds(row.weight_bytes) == pytest.approx(row.seconds, rel=0.45)


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
    assert 0.5 < sync_speed("nccl", mixture=True).error < 0.6
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


def test_the_error_of_a_broadcast_contains_updates_on_other_servers() -> None:
    """Two mixtures of one system are fitted exactly; elsewhere they take a half and a quarter."""
    found = sync_speed("nccl", mixture=True)
    elsewhere = [row for row in measurements() if OTHER_NETWORK in row.why_not and row.mixture]
    quotients = [found.seconds(row.weight_bytes) / row.seconds for row in elsewhere]
    assert [round(one, 1) for one in quotients] == [2.1, 4.3]
    assert found.error > 0.5
    assert sync_speed("delta", mixture=False).error < 0.2


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
