"""Packing all lanes at once equals packing each with `control`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.control.microbatch import balanced_parts, dynamic_batches
from simulator.costs.micro_batching import cut_within_budget
from simulator.costs.packing import FEWEST_LANES, balanced_ranks, lane_batches

LENGTHS = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=60),
    st.lists(st.integers(400, 512), min_size=1, max_size=60),
    st.lists(st.sampled_from([1, 2, 250, 256, 257, 511, 512]), min_size=1, max_size=50),
)


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.integers(1, 9))
@settings(max_examples=200)
def test_ranks_equal_those_of_balanced_parts(minibatches: list[list[int]], ranks: int) -> None:
    fewest = min(map(len, minibatches))
    minibatches, ranks = [sorted(one[:fewest])[::-1] for one in minibatches], min(ranks, fewest)
    rank_of_each = balanced_ranks(np.array(minibatches), ranks)
    for mine, lengths in zip(rank_of_each, minibatches, strict=True):
        parts = [np.flatnonzero(mine == rank).tolist() for rank in range(ranks)]
        assert parts == balanced_parts(lengths, ranks)


@given(
    st.lists(LENGTHS, min_size=1, max_size=8),
    st.integers(0, 100),
    st.integers(1, 9),
    st.sampled_from([1, 1 << 23]),  # so large numbers do not fit in 32 bits
)
@settings(max_examples=200)
def test_micro_batches_equal_those_of_each_lane_alone(
    lanes: list[list[int]], spare: int, min_batches: int, unit: int
) -> None:
    max_tokens = (max(map(max, lanes)) + spare) * unit
    lanes = [sorted([length * unit for length in lane], reverse=True) for lane in lanes]
    table = np.zeros((max(map(len, lanes)), len(lanes)), np.int64)
    for place, lane in enumerate(lanes):
        table[: len(lane), place] = lane
    batches = lane_batches(table, max_tokens=max_tokens, min_batches=min_batches)
    for place, lane in enumerate(lanes):
        mine = batches[: len(lane), place]
        members = [np.flatnonzero(mine == one).tolist() for one in range(mine.max() + 1)]
        assert members == dynamic_batches(lane, max_tokens=max_tokens, min_batches=min_batches)


@pytest.mark.parametrize("ranks", [1, FEWEST_LANES // 2, FEWEST_LANES])
def test_a_batch_is_cut_equally_with_many_lanes_and_with_few(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(5).integers(100, 20_000, 40 * ranks + 3)
    cuts = []
    for fewest in (1, 1_000):
        monkeypatch.setattr("simulator.costs.micro_batching.FEWEST_LANES", fewest)
        cut = cut_within_budget(lengths, ranks=ranks, minibatches=2, max_tokens=32768, least=2)
        cuts.append(cut.parts())
    assert cuts[0] == cuts[1]
