"""Trajectories are checked at construction, and derive their properties from their parts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from areal_lab.control.events import PROMPT_VERSION
from areal_lab.data.trajectory import Observation, Segment, Trajectory


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "group": 4,
        "sample": 2,
        "prompt_tokens": (1, 2),
        "parts": (
            Segment((3, 4), (-0.5, -0.25), 6),
            Observation((5, 6, 7)),
            Segment((8,), (-1.0,), 7),
        ),
        "finish_reason": "stop",
        "reward": 1.0,
    }
    return Trajectory(**{**fields, **changes})


def test_response_is_the_parts_joined_and_observations_are_not_the_policys() -> None:
    one = trajectory()
    assert one.response_tokens == (3, 4, 5, 6, 7, 8)
    assert one.response_mask == (True, True, False, False, False, True)
    assert one.behavior_logprobs == (-0.5, -0.25, 0.0, 0.0, 0.0, -1.0)
    assert one.versions == (6, 6, PROMPT_VERSION, PROMPT_VERSION, PROMPT_VERSION, 7)
    assert one.generated_tokens == 3


def test_head_and_tail_are_the_first_and_last_generated_version() -> None:
    one = trajectory()
    assert (one.head_version, one.tail_version) == (6, 7)
    assert [segment.version for segment in one.segments] == [6, 7]
    after = trajectory(parts=(Observation((5,)), Segment((3,), (-1.0,), 2), Observation((6,))))
    assert (after.head_version, after.tail_version) == (2, 2)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "version", "message"),
    [
        ((1, 2), (-1.0,), 0, "2 tokens but 1 log-probs"),
        ((), (), 0, "must have at least one"),
        ((1,), (-1.0,), PROMPT_VERSION, "version is -1"),
        ((1,), (0.5,), 0, "log-prob is 0.5"),
        ((1, 2), (-1.0, math.nan), 0, "log-prob is nan"),
        ((1,), (-math.inf,), 0, "log-prob is -inf"),
    ],
)
def test_a_segment_that_cannot_be_is_refused(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], version: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(tokens, logprobs, version)


def test_a_logprob_may_exceed_zero_by_rounding_only() -> None:
    assert Segment((1,), (5e-5,), 0).logprobs == (5e-5,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": ()}, "4/2 has an empty prompt"),
        ({"parts": ()}, "4/2 has no generated token"),
        ({"parts": (Observation((1,)),)}, "4/2 has no generated token"),
        ({"reward": math.nan}, "4/2 has reward nan"),
        ({"reward": math.inf}, "4/2 has reward inf"),
    ],
)
def test_a_trajectory_that_cannot_be_trained_on_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory(**change)
