"""Ends of samples: each is sent once, of training groups that run."""

from __future__ import annotations

from areal_lab.control.events import SamplesEnded
from areal_lab.pipeline.rollout.groups import EndedSamples, request_id


def test_each_sample_of_a_running_training_group_is_sent_once() -> None:
    sent: list[SamplesEnded] = []
    ended = EndedSamples(sent.append)
    ended.add_request(request_id("train", 3, 0))  # before it runs
    ended.begin(3)
    ended.begin(4)
    for name in (
        request_id("train", 3, 1),
        request_id("train", 3, 1),
        request_id("held-out", 3, 2),
        request_id("other", 3, 2),
        request_id("train", 3, 2) + "-0a1b2c3d4e5f6071-1",  # a turn of a workflow
        request_id("train", 5, 2),
    ):
        ended.add_request(name)
    assert sent == [SamplesEnded(3, 1)]
    ended.add(3, range(4))
    ended.add(3, range(4))
    ended.add(4, [])
    assert sent == [SamplesEnded(3, 1), SamplesEnded(3, 3)]
    ended.end(3)
    ended.add(3, [0])
    ended.add(4, [2])
    assert sent == [SamplesEnded(3, 1), SamplesEnded(3, 3), SamplesEnded(4, 1)]
