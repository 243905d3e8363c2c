"""OpenAI's client is served as by OpenAI; what it was sampled is trained."""

from __future__ import annotations

import pytest

from tests.real_clients.lab import SUMS, TOGETHER, Done, adds, run

pytestmark = pytest.mark.agents
TWO_TURNS = ("chat", "chat_stream", "responses", "responses_stream", "responses_stored")
TASKS = (*TWO_TURNS, "several", "impatient", "refused")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    tasks = dict.fromkeys(TASKS, adds)
    return run("openai", tasks, tmp_path_factory.mktemp("openai"), held="impatient")


@pytest.mark.parametrize("task", TASKS)
def test_what_was_sampled_is_trained_once(done: Done, task: str) -> None:
    done[task].check()


@pytest.mark.parametrize("task", TWO_TURNS)
def test_a_tool_and_a_second_turn_are_one_row(done: Done, task: str) -> None:
    assert done[task].said == [SUMS, TOGETHER]
    assert done[task].forks == {}
    assert done[task].matches == {"exact": 2}
    assert [len(row["turns"]) for row in done[task].rows] == [3]


def test_several_replies_are_rows_and_the_turn_before_them_is_trained_in_one(done: Done) -> None:
    assert done["several"].said == [TOGETHER] * 3
    assert len({tuple(row["prompt_tokens"]) for row in done["several"].rows}) == 1
    assert [len(row["turns"]) for row in done["several"].rows] == [2, 1, 1]


def test_a_client_that_gives_up_and_asks_again_gets_the_one_answer(done: Done) -> None:
    assert done["impatient"].said == [TOGETHER]
    assert len(done["impatient"].model.answers) == 1
    assert done.counts["sent_again"] >= 1


def test_errors_are_of_its_own_classes_and_sample_nothing(done: Done) -> None:
    classes = ["AuthenticationError", "BadRequestError", "BadRequestError", "BadRequestError"]
    assert done["refused"].said == classes
    assert len(done["refused"].model.answers) == 1
    assert "failed" not in done.counts
