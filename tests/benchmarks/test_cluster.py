"""The benchmarks of hosts move real samples, and a whole folder by every way."""

from __future__ import annotations

import numpy as np
import pytest

from areal_lab.data.arrays import Jagged, pack_samples, row_count, unpack_samples
from benchmarks.cluster import data_plane, receiving, roads
from benchmarks.cluster.receiver import WAYS


def test_the_batch_is_one_of_packed_samples() -> None:
    fields = roads.packed(12, 8_000, np.random.default_rng(0))
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
    assert 90_000 < len(tokens.values) < 102_000


def test_every_way_moves_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_plane, "WEIGHT_BYTES", 50_000_000)
    figures = data_plane.measure(quick=True, repeats=1)
    assert {(row["what"], row["receivers"], row["way"]) for row in figures["rows"]} == {
        ("weights", count, way) for count in (1, 2) for way in WAYS
    }
    for row in figures["rows"]:
        moved = row["gb_per_s"] * row["seconds"] * 1e9
        assert moved == pytest.approx(row["receivers"] * figures["weight_bytes"])
    assert set(figures["httpx_to_readinto"]) == {"weights 1", "weights 2"}


def test_each_road_brings_a_batch_to_all_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roads, "SIZES", (roads.Size("tiny", 32, 500),))
    figures = roads.measure(quick=True, repeats=1)
    found = {row["road"]: row["mb_through"] for row in figures["rows"]}
    assert list(found) == list(roads.ROADS)
    tokens = 32 * 500
    assert found["arrays"] > 2 * 8 * (tokens - 32 * roads.PROMPT_TOKENS) / 1e6, "in, and out once"
    assert found["trajectories"] > 12 * (tokens - 32 * roads.PROMPT_TOKENS) / 1e6


def test_every_response_is_received_whole_at_every_interval() -> None:
    figures = receiving.measure(quick=True, repeats=1)
    assert [row["stream_interval"] for row in figures["rows"]] == list(receiving.INTERVALS)
