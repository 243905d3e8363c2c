"""1F1B: against a pass-by-pass simulation, and by hand."""

import numpy as np
import pytest

from simulator.costs.pipeline_schedule import forward_only_s, one_forward_one_backward_s
from tests.reference import pipeline_oracle


def _ones(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((1, count)), np.ones((1, count), bool)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_equal_micro_batches_leave_a_bubble_of_stages_minus_one(stages: int, count: int) -> None:
    forward, present = _ones(count)
    seconds = one_forward_one_backward_s(
        forward, 2 * forward, present, stages=stages, hop_s=0 * forward
    )
    assert seconds == pytest.approx((count + stages - 1) * 3)


def test_it_equals_a_simulation_of_every_pass() -> None:
    generator = np.random.default_rng(0)
    for _ in range(150):
        lanes, count, stages = (int(generator.integers(1, high)) for high in (4, 9, 7))
        forward, backward, hop = generator.exponential(size=(3, lanes, count))
        counts = generator.integers(1, count + 1, lanes)
        seconds = one_forward_one_backward_s(
            forward, backward, np.arange(count) < counts[:, None], stages=stages, hop_s=hop
        )
        for lane, own in enumerate(counts):
            slow = pipeline_oracle.one_forward_one_backward_s(
                forward[lane, :own], backward[lane, :own], hop[lane, :own], stages
            )
            assert seconds[lane] == pytest.approx(slow, rel=1e-12)


def test_unequal_micro_batches_make_stages_wait_for_each_other() -> None:
    present = np.ones((1, 16), bool)
    even, uneven = np.full((1, 16), 2.0), np.tile([1.0, 3.0], (1, 8))
    assert even.sum() == uneven.sum()
    slow, fast = (
        one_forward_one_backward_s(one, 2 * one, present, stages=4, hop_s=0 * one)
        for one in (uneven, even)
    )
    assert slow > 1.1 * fast


def test_a_longer_micro_batch_never_ends_earlier() -> None:
    generator = np.random.default_rng(1)
    forward = generator.exponential(size=(1, 9))
    present = np.ones_like(forward, bool)
    zero = np.zeros_like(forward)
    before = one_forward_one_backward_s(forward, forward, present, stages=4, hop_s=zero)
    for one in range(9):
        longer = forward.copy()
        longer[0, one] += 0.5
        after = one_forward_one_backward_s(longer, longer, present, stages=4, hop_s=zero)
        assert after >= before


def test_forward_only_queues_behind_the_longest() -> None:
    forward = np.array([[1.0, 3.0, 2.0]])
    present = np.array([[True, True, True]])
    assert forward_only_s(forward, present, stages=4, hop_s=0 * forward) == 6 + 3 * 3
    assert forward_only_s(forward, present, stages=1, hop_s=0 * forward) == 6
