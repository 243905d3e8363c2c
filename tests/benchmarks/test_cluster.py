"""The benchmark of the data plane moves real samples and a whole folder, by every way."""

from __future__ import annotations

import numpy as np
import pytest

from areal_lab.data.arrays.jagged import Jagged, row_count
from areal_lab.data.arrays.samples import pack_samples, unpack_samples
from benchmarks.cluster import data_plane, receiving
from benchmarks.cluster.receiver import WAYS


def test_the_batch_is_one_of_packed_samples() -> None:
    fields = data_plane.packed(100_000, np.random.default_rng(0))
    again = pack_samples(unpack_samples(fields))
    assert row_count(again) == row_count(fields) == 12
    assert list(fields) == list(again)
    for name, one in fields.items():
        other = again[name]
        if isinstance(one, Jagged) and isinstance(other, Jagged):
            np.testing.assert_array_equal(one.values, other.values)
            np.testing.assert_array_equal(one.lengths, other.lengths)
        elif name == "group":
            np.testing.assert_array_equal(one, other)
    tokens = fields["tokens"]
    assert isinstance(tokens, Jagged)
    assert 90_000 < len(tokens.values) < 110_000


def test_every_way_moves_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "TOKENS", 5_000_000)
    monkeypatch.setattr(data_plane, "WEIGHT_BYTES", 50_000_000)
    figures = data_plane.measure(quick=True, repeats=1)
    assert {(row["what"], row["receivers"], row["way"]) for row in figures["rows"]} == {
        (what, count, way)
        for what in ("trajectories", "weights")
        for count in (1, 2)
        for way in WAYS
    }
    for row in figures["rows"]:
        moved = row["gb_per_s"] * row["seconds"] * 1e9
        if row["what"] == "weights":
            assert moved == pytest.approx(row["receivers"] * figures["weight_bytes"])
        else:
            assert figures["trajectory_bytes"] - moved < 100_000  # headers
    assert set(figures["httpx_to_readinto"]) == {
        *("trajectories 1", "trajectories 2", "weights 1", "weights 2")
    }


def test_every_response_is_received_whole_at_every_interval() -> None:
    figures = receiving.measure(quick=True, repeats=1)
    assert [row["stream_interval"] for row in figures["rows"]] == list(receiving.INTERVALS)
