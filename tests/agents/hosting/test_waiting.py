"""Which waiting sample the next session gets."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.hosting.waiting import WaitingSamples


def waiting(*samples: tuple[str, int]) -> tuple[WaitingSamples[tuple[str, int]], ExitStack]:
    found: WaitingSamples[tuple[str, int]] = WaitingSamples()
    stack = ExitStack()
    for sample in samples:
        stack.enter_context(found.member(sample[0]))
        found.add(sample[0], sample)
    return found, stack


def test_sessions_without_a_task_get_the_oldest_samples() -> None:
    found, _ = waiting(("a", 0), ("a", 1), ("b", 0))
    assert [found.take("") for _ in range(3)] == [("a", 0), ("a", 1), ("b", 0)]
    assert found.next("") is None
    with pytest.raises(LookupError, match="no sample waits for a session on ''"):
        found.take("")


def test_a_group_is_of_one_task() -> None:
    found, _ = waiting(*((group, index) for group in "abc" for index in range(2)))
    order = ["x", "y", "x", "", "y", ""]
    assert [found.take(task)[0] for task in order] == ["a", "b", "a", "c", "b", "c"]


def test_a_task_with_a_full_group_begins_another() -> None:
    found, _ = waiting(("a", 0), ("b", 0), ("b", 1))
    assert [found.take("x"), found.take("x")] == [("a", 0), ("b", 0)]
    assert found.unfilled() == {"x": 1}
    assert found.next("y") is None, "the sample that waits is in a group of x"
    assert found.next("") is None


def test_a_sample_that_waits_again_comes_before_younger_groups() -> None:
    found, _ = waiting(("a", 0), ("b", 0))
    assert found.take("") == ("a", 0)
    found.add("a", ("a", 0))
    assert found.next("") == ("a", 0)


def test_a_group_is_forgotten_when_its_last_sample_ends() -> None:
    found, stack = waiting(("a", 0), ("a", 1))
    found.take("x")
    assert "a" in found
    stack.close()
    assert "a" not in found
    assert len(found) == 0
    assert found.of_group("a") == ()
    again = found.member("a")
    with again:
        found.add("a", ("a", 0))
        assert found.next("y") == ("a", 0), "it is of no task any more"


@given(st.lists(st.sampled_from(["", "x", "y", "z"]), max_size=30), st.integers(1, 4))
def test_no_group_has_sessions_of_two_tasks_and_no_sample_two_sessions(
    tasks: list[str], samples: int
) -> None:
    found, _ = waiting(*((str(group), index) for group in range(6) for index in range(samples)))
    taken: dict[tuple[str, int], str] = {}
    for task in tasks:
        expected = found.next(task)
        if expected is None:
            continue
        assert found.take(task) == expected
        assert expected not in taken
        taken[expected] = task
    for group in range(6):
        assert len({task for (name, _), task in taken.items() if name == str(group)}) <= 1
    assert len(found) == 6 * samples - len(taken)
    # Nobody waits in vain: a session is refused only if each group with a waiting sample is taken.
    if any(found.next(task) is None for task in tasks):
        groups = {name for name, _ in taken}
        free = [str(group) for group in range(6) if found.of_group(str(group))]
        assert set(free) <= groups
