"""OpenAI's Agents SDK: tools, second turns, and a hand-off, which begins a new row."""

from __future__ import annotations

import pytest

from tests.agents.scripted_model import Said
from tests.real_clients.lab import ADD, SUMS, TOGETHER, Done, adds, run

pytestmark = pytest.mark.agents
TWO_TURNS = ("chat", "chat_stream", "responses", "responses_stream")
TASKS = (*TWO_TURNS, "hand_off")
HAND_OFF = '<tool_call>{"name": "transfer_to_adder", "arguments": {}}</tool_call>'


def hands_off(said: list[Said]) -> str:
    """Hands off if there is a tool for that; whom it is handed to adds."""
    if "transfer_to_adder" in said[0].text:
        return HAND_OFF
    # What the hand-off says is a result of a tool, too.
    return ADD if "assistant" in said[-1].text else adds(said)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    tasks = {**dict.fromkeys(TWO_TURNS, adds), "hand_off": hands_off}
    return run("openai-agents", tasks, tmp_path_factory.mktemp("agents"))


@pytest.mark.parametrize("task", TASKS)
def test_what_was_sampled_is_trained_once(done: Done, task: str) -> None:
    done[task].check()


@pytest.mark.parametrize("task", TWO_TURNS)
def test_a_tool_and_a_second_turn_are_one_row(done: Done, task: str) -> None:
    assert done[task].said == [SUMS, TOGETHER]
    assert done[task].forks == {}
    assert done[task].matches == {"exact": 2}
    assert [len(row["turns"]) for row in done[task].rows] == [3]


def test_a_hand_off_changes_the_instructions_and_begins_a_row(done: Done) -> None:
    outcome = done["hand_off"]
    assert outcome.said == [SUMS, "adder"]
    assert outcome.forks == {"system_changed": 1}
    assert [len(row["turns"]) for row in outcome.rows] == [1, 2]
    assert outcome.conversation.tree.follows == (None, 0, 1)
