"""Trajectories return from their arrays exactly, also of some of the rows."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from areal_lab.data.arrays import (
    Jagged,
    concat_rows,
    pack_samples,
    row_count,
    slice_rows,
    unpack_samples,
)
from areal_lab.data.images import PlacedImage, image_of_picture
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Trajectory

LOGPROBS = st.floats(-80, 0, width=32)
SEGMENTS = st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS), min_size=1, max_size=5).flatmap(
    lambda pairs: st.builds(
        Segment,
        st.just(tuple(token for token, _ in pairs)),
        st.just(tuple(logprob for _, logprob in pairs)),
        st.integers(0, 10**6),
    )
)
OBSERVATIONS = st.builds(Observation, st.lists(st.integers(0, 200_000), max_size=4).map(tuple))
PARTS = st.lists(SEGMENTS | OBSERVATIONS, max_size=5).flatmap(
    lambda parts: SEGMENTS.map(lambda segment: (*parts, segment))
)
IMAGES = [
    image_of_picture(Image.new("RGB", (28, 14 * (number + 1)), (number, 0, 0)))
    for number in range(3)
]
ENDS = st.sampled_from(["stop", "length", "abort", "context", "turns"])
REWARDS = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def placed(draw: st.DrawFn) -> tuple[PlacedImage, ...]:
    """No image, mostly; else one in the place of the first token."""
    if draw(st.integers(0, 3)):
        return ()
    return (PlacedImage(draw(st.sampled_from(IMAGES)), 0, 1, 1),)


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    """Samples of one or several rows, with and without components and returns of turns."""
    found = []
    for index in range(draw(st.integers(1, 5))):
        reward = draw(REWARDS)
        components = draw(st.dictionaries(st.text(max_size=3), REWARDS, max_size=2))
        end: SampleEnd = draw(ENDS)
        for row in range(draw(st.sampled_from([1, 1, 2, 3]))):
            one = Trajectory(
                group=draw(st.integers(0, 2**40)) if not row else found[-1].group,
                sample=index,
                row=row,
                prompt_tokens=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))),
                parts=draw(PARTS),
                finish_reason=end,
                reward=reward,
                rewards=components,
                images=draw(placed()),
            )
            turns = len(one.turns)
            if draw(st.booleans()):
                returns = st.lists(REWARDS, min_size=turns, max_size=turns)
                one = with_returns(one, tuple(draw(returns)))
            found.append(one)
    return found


def with_returns(one: Trajectory, returns: tuple[float, ...]) -> Trajectory:
    return Trajectory(
        **{
            name: getattr(one, name)
            for name in Trajectory.__slots__
            if name not in ("turn_returns",)
        },
        turn_returns=returns,
    )


def samples_of(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    return [list(rows) for _, rows in groupby(trajectories, lambda one: (one.group, one.sample))]


@settings(max_examples=15)
@given(batches())
def test_trajectories_return_exactly(trajectories: list[Trajectory]) -> None:
    fields = pack_samples(trajectories)
    assert unpack_samples(fields) == trajectories
    assert row_count(fields) == len(samples_of(trajectories))


@settings(max_examples=15)
@given(batches(), st.data())
def test_some_rows_are_those_samples(trajectories: list[Trajectory], data: st.DataObject) -> None:
    samples = samples_of(trajectories)
    start = data.draw(st.integers(0, len(samples) - 1))
    stop = data.draw(st.integers(start + 1, len(samples)))
    some = slice_rows(pack_samples(trajectories), start, stop)
    assert unpack_samples(some) == [row for sample in samples[start:stop] for row in sample]


@settings(max_examples=15)
@given(batches(), batches())
def test_rows_of_two_batches_follow_each_other(
    first: list[Trajectory], second: list[Trajectory]
) -> None:
    both = concat_rows([pack_samples(first), pack_samples(second)])
    assert unpack_samples(both) == first + second


def trajectory(**changes: Any) -> Trajectory:
    """Three tokens of a prompt and 1,000 of a response in two versions."""
    half = Segment((5,) * 500, (-1.5,) * 500, 3), Segment((6,) * 500, (-2.5,) * 500, 4)
    known: dict[str, Any] = {
        "group": 1,
        "sample": 0,
        "prompt_tokens": (1, 2, 3),
        "parts": half,
        "finish_reason": "stop",
        "reward": 1.0,
    }
    return Trajectory(**{**known, **changes})


def test_a_generated_token_takes_8_bytes_and_a_segment_8() -> None:
    fields = pack_samples([trajectory()])
    sizes = {
        name: (one.values if isinstance(one, Jagged) else one).nbytes
        for name, one in fields.items()
    }
    assert sizes["tokens"] == 4 * 1003
    assert sizes["logprobs"] == 4 * 1000
    assert sizes["spans"] == 2 * 8
    assert sum(sizes.values()) < 8 * 1003 + 100


def test_log_probs_are_rounded_to_float32_once() -> None:
    one = trajectory(parts=(Segment((5,), (-0.1,), 3),))
    once = unpack_samples(pack_samples([one]))
    assert once[0].behavior_logprobs == (float(np.float32(-0.1)),)
    assert unpack_samples(pack_samples(once)) == once


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a value of tokens does not fit into int32"):
        pack_samples([trajectory(prompt_tokens=(2**31,))])
    with pytest.raises(ValueError, match="log-prob -1e\\+39 does not fit into float32"):
        pack_samples([trajectory(parts=(Segment((5,), (-1e39,), 3),))])
    with pytest.raises(ValueError, match="no trajectories"):
        pack_samples([])


@pytest.mark.parametrize("name", ["tokens", "logprobs", "spans", "rows", "reward", "turn_returns"])
def test_arrays_that_contradict_each_other_are_refused(name: str) -> None:
    fields = pack_samples([trajectory(turn_returns=(0.5,)), trajectory(sample=1)])
    field = fields[name]
    assert isinstance(field, Jagged)
    for lengths in ([field.lengths[0] - 1, *field.lengths[1:]], [field.lengths[0] + 1, 0]):
        size = sum(lengths)
        values = np.resize(field.values, (size, *field.values.shape[1:]))
        wrong = {**fields, name: Jagged(values, np.array(lengths, np.int64))}
        with pytest.raises(
            ValueError, match=r"the arrays of sample \d are damaged: |trajectory 1/1 has"
        ):
            unpack_samples(wrong)


def test_a_missing_field_is_named() -> None:
    fields = pack_samples([trajectory()])
    with pytest.raises(ValueError, match="no field 'spans'"):
        unpack_samples({name: one for name, one in fields.items() if name != "spans"})
    with pytest.raises(
        ValueError, match="field 'tokens' of packed samples must have rows of int32"
    ):
        unpack_samples({**fields, "tokens": np.zeros(1)})
