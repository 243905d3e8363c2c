"""Rewards that compare text."""

from __future__ import annotations

import pytest

from areal_lab.rewards.exact import answer_line, exact_first_line, gsm8k, last_number
from areal_lab.rewards.worker import reward_of


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" 13\n", 1.0),
        ("13", 1.0),
        (" 13\n4 + 4 = 8", 1.0),
        (" 13 ", 1.0),
        (" 1", 0.0),
        (" 131", 0.0),
        (" 13.", 0.0),
        ("\n13", 0.0),
        ("", 0.0),
    ],
)
def test_exact_first_line(completion: str, reward: float) -> None:
    assert exact_first_line(completion, {"answer": "13"}) == reward


def test_an_empty_gold_answer_is_an_error_and_not_right_for_silence() -> None:
    for completion, function in (("\nhello", exact_first_line), ("Answer:", answer_line)):
        with pytest.raises(ValueError, match="gold answer of the problem is empty"):
            function(completion, {"answer": " "})


def test_what_became_of_a_sample_is_in_no_sum() -> None:
    parts = {"answer": 0.5, "form": 0.25, "no_answer": 1.0, "timed_out": 1}
    assert reward_of(parts)[0] == 0.75
    assert reward_of(parts, {"form": 2.0})[0] == 1.0
    assert reward_of(parts, {"no_answer": -1.0})[0] == -0.25, "unless it has a weight of its own"


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12 eggs, so $24.00.", "24", 1.0),
        ("it is 1,234,567", "1234567", 1.0),
        ("it is -5", "-5", 1.0),
        ("-$5", "-5", 1.0),
        ("2 and 3", "2", 0.0),
        ("24 in 7 days", "24", 0.0),
        ("0.5", ".50", 1.0),
        ("no number", "3", 0.0),
        ("no number", "none", 0.0),
        ("", "0", 0.0),
    ],
)
def test_last_number(completion: str, answer: str, reward: float) -> None:
    assert last_number(completion, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("7 * 9 = 63\n#### 63", "63", 1.0),
        ("#### 1,200\nand 5 more words", "1200", 1.0),
        ("#### 5\n#### 63", "63", 1.0),
        ("so it is 63", "63", 1.0),
        ("63, that is\n####", "63", 0.0),
        ("#### 62", "63", 0.0),
        ("#### $18.00", "18", 1.0),
    ],
)
def test_gsm8k(completion: str, answer: str, reward: float) -> None:
    assert gsm8k(completion, {"answer": answer}) == reward


def test_an_answer_may_be_a_number() -> None:
    assert exact_first_line(" 13\n", {"answer": 13}) == 1.0
    assert last_number("13", {"answer": 13}) == 1.0
