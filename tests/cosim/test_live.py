"""Groups that begin one by one are generated together, and are the same as if they were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.events import GroupId, Version
from areal_lab.control.order import strict_start_order
from areal_lab.control.schedule import asynchronous
from cosim.live import Live
from cosim.load import resolve_cosim
from cosim.policy import Policy
from cosim.sampler import Row
from simulator.run.system import System
from tests.cosim.small import SORTING, small
from tests.simulator.run.toy_system import toy_system

BATCH, STEPS, SAMPLES = 8, 6, 2


def system() -> System:
    return toy_system(
        asynchronous(2),
        batch=BATCH,
        in_flight=3 * BATCH,
        steps=STEPS,
        complete=True,
        order=strict_start_order(),
        samples=SAMPLES,
    )


@dataclass
class Counting:
    """A policy that generates its version, and counts."""

    batches: list[list[GroupId]] = field(default_factory=list)

    def begin(self, group: GroupId) -> list[Row]:
        return [Row(group, sample, (1,), seed=0) for sample in range(SAMPLES)]

    def generate(self, rows: Sequence[Row], version: Version) -> None:
        for row in rows:
            row.tokens, row.logprobs, row.versions = [version], [-1.0], [version]
            row.finish_reason = "stop"
        self.batches.append([row.group for row in rows[::SAMPLES]])


def live_of(policy: Any) -> Live:
    steps: Any = None  # nothing is learned
    return Live(cast(Policy, policy), steps, system(), seed=1, tokens_per_token=10)


def version_of(live: Live, group: GroupId) -> Version:
    (version,) = {row.versions[0] for row in live._rows[group]}
    return version


def test_one_batch_has_the_groups_that_a_step_makes_room_for() -> None:
    live = live_of(policy := Counting())
    for group in range(BATCH):
        live.begin([group], 0)
    assert policy.batches == [list(range(BATCH))]
    live.begin([BATCH], 0)  # more than a batch
    assert policy.batches[1:] == [[8, 9, 10]]


def test_nothing_is_generated_ahead_of_a_whole_batch() -> None:
    live = live_of(policy := Counting())
    for version in range(STEPS):
        live.begin(range(version * BATCH, (version + 1) * BATCH), version)
    assert [len(batch) for batch in policy.batches] == [BATCH] * STEPS


def test_new_weights_generate_again_what_has_not_begun() -> None:
    live = live_of(policy := Counting())
    live.begin([0], 0)
    live.begin([1], 1)
    assert policy.batches == [list(range(8)), list(range(1, 9))]
    assert [version_of(live, group) for group in (0, 1)] == [0, 1]


def test_the_last_groups_of_a_run_have_none_after_them() -> None:
    live = live_of(policy := Counting())
    last = BATCH * STEPS - 1
    live.begin([last - 1], 5)
    live.begin([last], 5)
    live.begin([last + 1], 5)  # in place of a group that was dropped
    assert policy.batches == [[last - 1, last], [last + 1]]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), max_size=40))
def test_each_group_has_the_version_under_which_it_began(
    begun: list[tuple[int, int]],
) -> None:
    live = live_of(policy := Counting())
    version = group = 0
    for newer, count in begun:
        version += newer
        live.begin(range(group, group + count), version)
        assert all(version_of(live, one) == version for one in range(group, group + count))
        group += count
    # Each version generates at most one batch of groups that do not begin.
    versions = 1 + sum(newer for newer, _ in begun)
    assert sum(map(len, policy.batches)) <= group + versions * BATCH


def test_a_group_that_starts_again_is_generated_again() -> None:
    live = live_of(policy := Counting())
    live.begin([0], 0)
    live.begin([0], 1)
    live.begin([0], 1)
    assert policy.batches == [list(range(8)), list(range(8)), [0]]


def test_tokens_are_those_of_groups_that_are_generated_alone(tmp_path: Path) -> None:
    config = small(tmp_path, *SORTING, "gconfig.n_samples=2", "seed=7")
    live = live_of(Policy(resolve_cosim(config)))
    alone = Policy(resolve_cosim(config))
    for group in range(12):
        live.begin([group], 0)
        rows = alone.begin(group)
        alone.generate(rows, 0)
        for row, expected in zip(live._rows[group], rows, strict=True):
            assert row.tokens == expected.tokens
            assert row.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
