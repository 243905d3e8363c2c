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
        ("no number", "none", 0.0),
        ("24 in 7 days", "24", 0.0),
        ("0.5", ".50", 1.0),
        ("no number", "3", 0.0),
        ("", "0", 0.0),
    ],
)
def test_last_number(completion: str, answer: str, reward: float) -> None:
    assert last_number(completion, {"answer": answer}) == reward


NUMBERS = {
    # A hyphen after a number, a word or a bracket is no sign; spaces belong to a sign after `=`.
    "5-10": 10, "2020-2024": 2024, "5%-10%": 10, "x-5": 5, "COVID-19": 19, "2024-01-05": 5,
    "x = - 5": -5, "- 5": 5, "(-5)": -5, "[2, -3]": -3, "5 -10": -10, "-$5": -5, "$-5": -5,
    # Minus signs, dashes, digits and fractions of Unicode.
    "\u22125": -5, "it is \u22125.": -5, "5\u201310": 10, "\u20135": -5, "\u0665": 5, "\uff15": 5,
    "\u7b54\u6848\u662f-5": -5, "\u00bd": "1/2", "3\u00bd": "7/2", "5 m\u00b2": 5,
    # Fractions are one number, and so are mixed ones.
    "1/2": "1/2", "-1/2": "-1/2", "1/-2": "-1/2", "3 1/2": "7/2", "1 / 2": "1/2", "1/5/2024": 2024,
    r"\frac{1}{2}": "1/2", r"-\frac12": "-1/2", r"3\frac{1}{2}": "7/2", "100 km/h": 100,
    # Thousands.
    "1,234.50": "1234.5", "1,00,000": 100000, "1'234": 1234, "1\u202f234": 1234, r"1{,}234": 1234,
    r"1\,234": 1234, "1_000": 1000, "(3,4)": 4, "3, 14": 14, "1,2,3": 3,
    # Powers; an exponent or a subscript is no number of its own.
    "1e-3": "0.001", "so 1e-3.": "0.001", "2.5E3": 2500, "3 x 10^5": 300000, "10^5": 100000,
    r"3 \times 10^{-2}": "0.03", "5 cm^2": 5, "7 = x_2": 7, "2**10": 1024,
    # Marks, units and versions.
    "**5**": 5, "**-5**": -5, "24.": 24, "$24.00": 24, "50%": 50, "v1.2.3 and 7": 7, "10:30": 30,
    "-\u20b95": -5, "\u00a5500": 500, "1..10": 10, "...5": 5, "1...10": 10, "5...": 5,
}  # fmt: skip


def test_a_number_is_read_as_it_is_written() -> None:
    for text, expected in NUMBERS.items():
        for answer, reward in ((str(expected), 1.0), ("123456.7", 0.0)):
            assert last_number(f"9 and then {text}", {"answer": answer}) == reward, text
            assert last_number(text, {"answer": answer}) == reward, text
    for wrong, answer in (("2/2", "1/2"), ("5-10", "-10"), ("2020-2024", "-2024"), ("2", "1/2")):
        assert last_number(wrong, {"answer": answer}) == 0.0
    # One number or two; a power of a power, or of what is not read, has no certain value.
    uncertain = ("3,14", "#### 3,14", "-0,5", "9^9^9", "2^3^2", "(-2)^2", "2^n", "2**3**2")
    for text in uncertain:
        for answer in ("3", "14", "3.14", "-0.5", "5", "9", "387420489", "64", "-2", "2", "8"):
            assert last_number(text, {"answer": answer}) == gsm8k(text, {"answer": answer}) == 0.0
    for nothing in ("1/0", "1e999999999", "9^999999999", "9" * 5000, "1.2.3", "12.34.5", ""):
        assert last_number(nothing, {"answer": "1"}) == 0.0


def test_a_gold_answer_that_is_not_one_number_is_an_error() -> None:
    for gold in ("3:4", "(3, 4)", "2024-01-05", "5-10", "$5-$10", "3,14", "it is 0,5"):
        for function in (last_number, gsm8k):
            with pytest.raises(ValueError, match="the gold answer"):
                function("5", {"answer": gold})
    for gold in ("none", "", "1.2.3", "1/0"):  # beside other parts of a reward, that is 0
        assert last_number(gold, {"answer": gold}) == gsm8k(gold, {"answer": gold}) == 0.0
    assert last_number("it is 7", {"answer": "3 and 4 make 7"}) == 1.0


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
