"""Pydantic AI: arguments of calls come back in other spaces."""

from __future__ import annotations

import pytest

from tests.real_clients.lab import SUMS, TOGETHER, Done, adds, run

pytestmark = pytest.mark.agents
TASKS = ("chat", "chat_stream", "responses", "responses_stream")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run("pydantic-ai", dict.fromkeys(TASKS, adds), tmp_path_factory.mktemp("pydantic_ai"))


@pytest.mark.parametrize("task", TASKS)
def test_what_was_sampled_is_trained_once(done: Done, task: str) -> None:
    done[task].check()


@pytest.mark.parametrize("task", TASKS)
def test_a_tool_and_a_second_turn_are_one_row(done: Done, task: str) -> None:
    assert done[task].said == [SUMS, TOGETHER]
    assert done[task].forks == {}
    assert done[task].matches == {"exact": 2}
    assert [len(row["turns"]) for row in done[task].rows] == [3]
