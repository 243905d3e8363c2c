"""Filters: which samples are trained on, by reward, difficulty and length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.filters import (
    difficulty_band,
    keep_samples,
    overlong_mask,
    zero_variance_groups,
)
from areal_lab.functional.advantages.named import dr_grpo_advantages
from areal_lab.functional.segments import packed_sequences
from tests.reference import filters as reference

BATCHES = st.lists(
    st.tuples(st.integers(-2, 3), st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0])), max_size=20
)
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5])
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 3])


@settings(max_examples=30)
@given(BATCHES, st.sampled_from([0.0, 0.15, 0.6]))
def test_zero_variance_equals_the_reference(samples, tolerance):
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    ours = zero_variance_groups(
        torch.tensor(rewards, dtype=torch.double),
        torch.tensor(groups, dtype=torch.long),
        tolerance=tolerance,
    )
    assert ours.tolist() == reference.zero_variance(rewards, groups, tolerance)


@settings(max_examples=30)
@given(BATCHES)
def test_a_group_without_variance_is_one_without_advantage(samples):
    groups = torch.tensor([group for group, _ in samples], dtype=torch.long)
    rewards = torch.tensor([reward for _, reward in samples], dtype=torch.float)
    silent = zero_variance_groups(rewards, groups)
    advantages = dr_grpo_advantages(rewards, groups)
    assert (advantages[silent] == 0).all()
    for group in groups[~silent].unique():
        assert (advantages[groups == group] != 0).any()


def test_all_right_all_wrong_and_alone_have_no_variance():
    ours = zero_variance_groups(REWARDS, GROUPS)
    assert ours.tolist() == [False, False, True, True, True, True, True]
    assert zero_variance_groups(REWARDS[:2], GROUPS[:2], tolerance=1.0).all()


QUARTERS = st.tuples(st.integers(-2, 3), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))


@settings(max_examples=30)
@given(st.lists(QUARTERS, max_size=20), st.sampled_from([(0.0, 1.0), (0.25, 0.75), (-1.0, 0.4)]))
def test_difficulty_band_equals_the_reference(samples, band):
    groups, rewards = [group for group, _ in samples], [reward for _, reward in samples]
    low, high = band
    ours = difficulty_band(
        torch.tensor(rewards, dtype=torch.double),
        torch.tensor(groups, dtype=torch.long),
        low=low,
        high=high,
    )
    assert ours.tolist() == reference.in_band(rewards, groups, low, high)


def test_bounds_of_the_band_are_outside():
    assert difficulty_band(REWARDS, GROUPS).tolist() == [True] * 2 + [False] * 4 + [True]
    # Ten times 0.1 sums to 0.9999...: equal rewards have exactly their own mean.
    equal = torch.full((10,), 0.1)
    assert not difficulty_band(equal, torch.zeros(10).long(), low=0.1).any()
    assert not difficulty_band(equal, torch.zeros(10).long(), high=equal[0].item()).any()


def test_answers_at_the_limit_count_if_they_ended_there():
    lengths = torch.tensor([5, 10, 10, 12])
    finished = torch.tensor([True, True, False, False])
    assert overlong_mask(lengths, max_length_tokens=10).tolist() == [True, False, False, False]
    ours = overlong_mask(lengths, max_length_tokens=10, finished=finished)
    assert ours.tolist() == [True, True, False, False]
    pairs = zip(lengths.tolist(), finished.tolist(), strict=True)
    assert ours.tolist() == [reference.counts(n, ended, 10) for n, ended in pairs]


def test_dropped_samples_lose_all_their_tokens():
    mask = torch.tensor([[True, False, True], [True, True, True]])
    keep = torch.tensor([False, True])
    assert keep_samples(mask, keep).tolist() == [[False] * 3, [True] * 3]
    packed = packed_sequences(torch.tensor([0, 2, 5]), 5)
    ours = keep_samples(torch.ones(5).bool(), keep, sequences=packed)
    assert ours.tolist() == [False, False, True, True, True]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zero_variance_groups(REWARDS, GROUPS, tolerance=-1.0), "tolerance is -1.0"),
        (lambda: zero_variance_groups(REWARDS / 0, GROUPS), "NaN or infinite"),
        (lambda: zero_variance_groups(REWARDS, GROUPS[:2]), r"groups has shape \(2,\)"),
        (lambda: difficulty_band(REWARDS / 0, GROUPS), "NaN or infinite"),
        (lambda: difficulty_band(REWARDS, GROUPS, low=0.5, high=0.5), "low is 0.5 and high 0.5"),
        (
            lambda: overlong_mask(REWARDS, max_length_tokens=9),
            "length_tokens has dtype torch.float32",
        ),
        (lambda: overlong_mask(GROUPS, max_length_tokens=0), "max_length_tokens is 0"),
        (
            lambda: overlong_mask(GROUPS, max_length_tokens=9, finished=GROUPS[:2] > 0),
            r"finished has shape \(2,\) and length_tokens \(7,\)",
        ),
        (
            lambda: overlong_mask(GROUPS, max_length_tokens=9, finished=GROUPS),
            "finished has dtype torch.int64",
        ),
        (lambda: keep_samples(GROUPS > 0, GROUPS[:1]), "keep has dtype torch.int64"),
        (lambda: keep_samples(GROUPS, GROUPS > 0), "mask has dtype torch.int64"),
        (
            lambda: keep_samples((GROUPS > 0)[None], GROUPS > 0),
            r"keep has shape \(7,\), but mask \(shape \(1, 7\)\) has 1 sequences",
        ),
    ],
)
def test_bad_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
