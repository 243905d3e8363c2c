"""Tasks of Reasoning Gym whose scores run the model's text; the others need the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.resolve.functions import check_functions
from areal_lab.rewards import reasoning_gym
from areal_lab.rewards.reasoning_gym import ReasoningGym, refuse_evaluated
from areal_lab.rewards.sandbox import levels
from areal_lab.rewards.usable import check
from areal_lab.rewards.worker import bound

FN = "areal_lab.rewards.reasoning_gym:ReasoningGym"
COMBINED = "areal_lab.rewards.combined:Combined"
REFUSED = "scores of countdown, n_queens evaluate the model's text as Python, outside of a sandbox"


class Scores:
    """A task that accepts everything."""

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        return float(bool(answer) and not entry)


@pytest.fixture
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "require", lambda *_: None)
    monkeypatch.setattr(reasoning_gym, "_task", lambda *_: Scores())


def test_tasks_that_evaluate_are_refused_in_one_line() -> None:
    tasks = ["leg_counting", "n_queens", "countdown"]
    with pytest.raises(ValueError, match=REFUSED) as raised:
        refuse_evaluated(tasks, "auto")
    assert "\n" not in str(raised.value)
    assert "write reward.sandbox=unsafe" in str(raised.value)
    refuse_evaluated(tasks, "unsafe")
    refuse_evaluated(["leg_counting"], "auto")


@pytest.mark.usefixtures("_package")
@pytest.mark.parametrize(
    ("reward", "refused"),
    [
        ({"fn": FN}, True),
        ({"fn": FN, "sandbox": "namespaces"}, True),
        ({"fn": FN, "sandbox": "unsafe"}, False),
        ({"fn": FN, "kwargs": {"sandbox": "unsafe"}}, False),
        ({"fn": COMBINED, "kwargs": {"parts": {"answer": FN}}}, True),
        ({"fn": COMBINED, "kwargs": {"parts": {"a": {"fn": FN, "pattern": ""}}}}, True),
        ({"fn": COMBINED, "kwargs": {"parts": {"a": {"fn": FN, "sandbox": "unsafe"}}}}, False),
        ({"fn": "areal_lab.rewards.exact:gsm8k"}, False),
    ],
)
def test_resolve_refuses_tasks_that_evaluate(reward: Mapping[str, Any], refused: bool) -> None:
    settings = {f"reward.{name}": value for name, value in reward.items()}
    tasks: dict[str, Any] = {"n_queens": {}, "countdown": {}, "leg_counting": {}}
    data = {"dataset.type": "reasoning_gym", "dataset.tasks": tasks}
    found = [str(one) for one in check_functions(load_config("tiny", {**data, **settings}))]
    if refused:
        (line,) = found
        assert f"dataset.tasks: {REFUSED}" in line
    else:
        assert not found


@pytest.mark.usefixtures("_package")
def test_a_completion_of_such_a_task_is_not_scored() -> None:
    """Whatever the data set is: this is what is called in a reward process."""
    example = {"task": "countdown", "options": {}, "entry": {}}
    text = "<answer>1</answer>"
    with pytest.raises(ValueError, match="scores of countdown evaluate"):
        bound(ReasoningGym, {}, "auto")(text, example)
    assert bound(ReasoningGym, {}, "unsafe")(text, example)["reward"] == 1.0
    fine = {**example, "task": "leg_counting"}
    assert bound(ReasoningGym, {}, "auto")(text, fine)["reward"] == 1.0


class Raises(Scores):
    """A task that raises for some answers, changes its problem, and may fail for all."""

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        if entry["broken"]:
            raise KeyError("grid")
        entry["seen"].append(answer)
        if answer is None:
            return 0.0
        return float(int(answer) == int(entry["answer"] or 7) and len(entry["seen"]) == 1)


@pytest.mark.parametrize("gold", ["7", None])
def test_an_answer_that_makes_the_rule_raise_gets_0_and_is_named(
    monkeypatch: pytest.MonkeyPatch, gold: str | None
) -> None:
    monkeypatch.setattr(reasoning_gym, "require", lambda *_: None)
    monkeypatch.setattr(reasoning_gym, "_task", lambda *_: Raises())
    entry = {"answer": gold, "broken": False, "seen": []}
    example = {"task": "leg_counting", "options": {}, "entry": entry}
    found = [ReasoningGym("")(text, example) for text in ("7", "8", "x", "7")]
    assert [one["reward"] for one in found] == [1.0, 0.0, 0.0, 1.0], "the problem is not changed"
    assert [one["unreadable"] for one in found] == [0.0, 0.0, 1.0, 0.0]
    entry["broken"] = True
    with pytest.raises(KeyError, match="grid"):
        ReasoningGym("")("7", example)


class Near(Scores):
    """Pays by distance: 1 for `nan`, since min(1, nan) is 1."""

    def score_answer(self, answer: str, entry: Mapping[str, Any]) -> float:
        if answer == "much":
            return float("inf")
        if answer == "nan" == entry["answer"]:
            return 1.0
        return min(1.0, 1.0 - abs(complex(answer) - complex(entry["answer"])))


def test_text_and_scores_that_are_no_numbers_are_unreadable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reasoning_gym, "require", lambda *_: None)
    monkeypatch.setattr(reasoning_gym, "_task", lambda *_: Near())
    example = {"task": "leg_counting", "options": {}, "entry": {"answer": "1"}}
    for text in ("nan", "NaN + 2j", "(inf)", "-Infinity", "nan+nanj", "x", "much"):
        found = ReasoningGym("")(text, example)
        assert found == {"reward": 0.0, "no_answer": 0.0, "unreadable": 1.0}, text
    assert ReasoningGym("")("1", example)["reward"] == 1.0
    word = {**example, "entry": {"answer": "nan"}}
    assert ReasoningGym("")("nan", word)["reward"] == 1.0, "it is the gold answer"


@pytest.mark.usefixtures("_package")
def test_other_tasks_need_no_sandbox_that_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "refusal", lambda _: "not here")
    check(FN, "auto")
    bound(ReasoningGym, {}, "auto")
    data = {"dataset.type": "reasoning_gym", "dataset.tasks": {"leg_counting": {}}}
    assert not list(check_functions(load_config("tiny", {**data, "reward.fn": FN})))
