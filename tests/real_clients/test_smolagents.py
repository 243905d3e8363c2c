"""smolagents rewrites its history: each request begins a row, and none of them loses a token."""

from __future__ import annotations

import pytest

from tests.agents.scripted_model import Said
from tests.real_clients.lab import ADD, AGAIN, Done, run

pytestmark = pytest.mark.agents
CALLING = ("tools", "tools_stream")
TASKS = (*CALLING, "code")
ANSWERS = ["5 and 9", "14"]


def calls(said: list[Said]) -> str:
    """Its agents end with a call, too."""
    answer = '<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{}"}}}}</tool_call>'
    return ADD if (found := _answer(said)) is None else answer.format(found)


def codes(said: list[Said]) -> str:
    answer = _answer(said)
    code = "print(add(a=2, b=3), add(a=4, b=5))" if answer is None else f"final_answer({answer!r})"
    return f"Thought: once more.\n<code>\n{code}\n</code>\n"


def _answer(said: list[Said]) -> str | None:
    """What to answer, if there is enough to answer it."""
    last = said[-1].text
    if AGAIN in last:
        return ANSWERS[1]
    done = last.startswith("Observation:\n") and "5" in last and "9" in last
    return ANSWERS[0] if done else None


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    tasks = {**dict.fromkeys(CALLING, calls), "code": codes}
    return run("smolagents", tasks, tmp_path_factory.mktemp("smolagents"))


@pytest.mark.parametrize("task", TASKS)
def test_what_was_sampled_is_trained_once(done: Done, task: str) -> None:
    done[task].check()


@pytest.mark.parametrize("task", TASKS)
def test_a_history_that_is_written_anew_begins_a_row_and_keeps_its_order(
    done: Done, task: str
) -> None:
    """Calls come back as the text of a Python list, answers in code with that behind them."""
    outcome = done[task]
    assert outcome.said == ANSWERS
    assert outcome.forks == {"assistant_rewritten": 2}
    assert [len(row["turns"]) for row in outcome.rows] == [1, 1, 1]
    # A reward at the end reaches the turns that were rewritten.
    assert outcome.conversation.tree.follows == (None, 0, 1)
    assert [row["turns"][0]["return"] for row in outcome.rows] == [1.0, 1.0, 1.0]


def test_a_call_that_is_required_is_asked_for_and_counted(done: Done) -> None:
    assert done.counts["tool_choice required is not enforced"] == 6
