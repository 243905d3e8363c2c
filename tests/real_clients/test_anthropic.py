"""Anthropic's client: messages, its tool runner, which sends only what is new, and its errors."""

from __future__ import annotations

import pytest

from tests.real_clients.lab import SUMS, TOGETHER, Done, adds, run

pytestmark = pytest.mark.agents
TWO_TURNS = ("messages", "messages_stream")
RUNNERS = ("runner", "runner_stream")
TASKS = (*TWO_TURNS, *RUNNERS, "impatient", "refused")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    tasks = dict.fromkeys(TASKS, adds)
    return run("anthropic", tasks, tmp_path_factory.mktemp("anthropic"), held="impatient")


@pytest.mark.parametrize("task", TASKS)
def test_what_was_sampled_is_trained_once(done: Done, task: str) -> None:
    done[task].check()


@pytest.mark.parametrize("task", TWO_TURNS)
def test_a_tool_and_a_second_turn_are_one_row(done: Done, task: str) -> None:
    """Its protocol has arguments as an object, so that their spaces are gone."""
    assert done[task].said == [SUMS, TOGETHER]
    assert done[task].forks == {}
    assert done[task].matches == {"exact": 2}
    assert [len(row["turns"]) for row in done[task].rows] == [3]


@pytest.mark.parametrize("task", RUNNERS)
def test_its_tool_runner_continues_a_thread_at_the_gateway(done: Done, task: str) -> None:
    outcome = done[task]
    assert outcome.said == [SUMS]
    assert outcome.forks == {}
    assert [len(row["turns"]) for row in outcome.rows] == [2]
    assert all(each.turn is not None for each in outcome.session.interactions.values())


def test_a_client_that_gives_up_and_asks_again_gets_the_one_answer(done: Done) -> None:
    assert done["impatient"].said == [TOGETHER]
    assert len(done["impatient"].model.answers) == 1
    assert done.counts["sent_again"] >= 1


def test_errors_are_of_its_own_classes_and_sample_nothing(done: Done) -> None:
    assert done["refused"].said == ["AuthenticationError", "BadRequestError", "BadRequestError"]
    assert len(done["refused"].model.answers) == 1
    assert "failed" not in done.counts
