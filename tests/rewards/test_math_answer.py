"""Mathematical answers, and what is said without the extra."""

from __future__ import annotations

import importlib.util
import random
import sys

import pytest

from areal_lab.extras import MissingExtra
from areal_lab.rewards import math_answer as module
from areal_lab.rewards.exact import last_number
from tests.fuzz import mutations


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so $\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"so $\boxed{\dfrac12}$", r"\frac{1}{2}", 1),
        (r"so $\boxed{(3, \frac{\pi}{2})}$", r"\left( 3, \frac{\pi}{2} \right)", 1),
        (r"first $\boxed{2}$, no: $\boxed{3}$", "2", 0),
        ("that makes 1,200 eggs", "1200", 1),
        ("no answer at all", "1200", 0),
    ],
)
def test_answers_are_compared_as_mathematics(completion: str, answer: str, reward: float) -> None:
    assert module.math_answer(completion, {"answer": answer}) == reward


BOXES = [
    # The last box counts; boxes that only `and`, `or` or a comma joins are one answer.
    (r"first $\boxed{2}$, no: $\boxed{3}$", "3", 1),
    (r"\boxed{2} \boxed{3}", "3", 1),
    (r"\boxed{2}. Wait, \boxed{2}, no: \fbox{3}", "3", 1),
    (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1,2", 1),
    (r"\boxed{1} and \boxed{2}", r"\{1,2\}", 1),
    (r"\boxed{1} and \boxed{2}", "2", 0),
    # One that is cut off is no answer, and one without content is no box.
    (r"so \boxed{4}. Wait: \boxed{5", "4", 0),
    (r"so \boxed{4}. Wait: \boxed", "4", 0),
    (r"so \boxed{\frac{1}{2}", "0.5", 0),
    (r"it goes into \boxed{}. Answer: 7", "7", 1),
    (r"\boxed 5$", "5", 1),
    (r"\boxed{\text{a \} b}}", r"\text{a \} b}", 1),
]
FORMS = [
    # Powers of ten as programs write them; minus signs, digits and fractions of Unicode.
    (r"\boxed{0.001}", "1e-3", 1),
    (r"\boxed{1e-3}", "0.001", 1),
    ("it is 1e-3", "0.001", 1),
    (r"\boxed{2.5e3}", "2500", 1),
    (r"\boxed{1.2\times 10^{3}}", "1200", 1),
    ("\\boxed{\u22125}", "-5", 1),
    ("\\boxed{\u22125}", "5", 0),
    ("it is \u22125", "-5", 1),
    (r"\boxed{-5}", "\u22125", 1),
    (r"\boxed{- 5}", "-5", 1),
    ("\\boxed{\u00bd}", "1/2", 1),
    ("\\boxed{\u0665}", "5", 1),
    # Thousands, mixed fractions, a full stop.
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{1\,234}", "1234", 1),
    (r"\boxed{1 234}", "1234", 1),
    (r"\boxed{3 1/2}", "3.5", 1),
    (r"\boxed{3\frac{1}{2}}", "3.5", 1),
    (r"\boxed{5.}", "5", 1),
    # As math-verify decides: percent, units, equations, order, intervals, ratios, precision.
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{50}", r"50\%", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{1,2}", "2,1", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{(1,2)}", "[1,2]", 0),
    (r"\boxed{4:3}", "3:4", 0),
    (r"\boxed{3:4}", "0.75", 1),
    (r"\boxed{0.333}", "1/3", 0),
    (r"\boxed{2/2}", "1/2", 0),
    (r"\boxed{-5}", "5-10", 1),
]
LOST = [
    # Bases, times, ratios of three numbers and words are compared as texts.
    (r"\boxed{101_2}", "101_{2}", 1),
    (r"\boxed{(101)_{2}}", "101_2", 1),
    (r"\boxed{101_3}", "101_2", 0),
    (r"\boxed{5}", "101_2", 0),
    ("so it is 101_2.", "101_2", 1),
    (r"\boxed{2:30}", "2:30", 1),
    (r"\boxed{02:30 \text{ p.m.}}", "2:30", 1),
    (r"\boxed{2:30 \text{ a.m.}}", r"2:30 \text{ PM}", 0),
    (r"\boxed{1:15}", "2:30", 0),
    ("so it is 1:15.", "2:30", 0),
    (r"\boxed{1:2:3}", "1:2:3", 1),
    (r"\boxed{1/6}", "1:2:3", 0),
    (r"\boxed{\text{Monday}}", "Monday", 1),
    (r"\boxed{Mondya}", "Monday", 0),
    ("It was a Monday.", "Monday", 1),
    # Both cases of a letter are two variables; of one case, case is ignored.
    (r"\boxed{-r + R}", "R - r", 1),
    (r"\boxed{0}", "R - r", 0),
    (r"\boxed{r - R}", "R - r", 0),
    (r"\boxed{\pi(R^2-r^2)}", r"\pi R^2 - \pi r^2", 1),
    (r"\boxed{R_1 - r_1}", "R_1 - r_1", 1),
    (r"\boxed{0}", "R_1 - r_1", 0),
    (r"\boxed{2r}", "2R", 1),
    # Small numbers have six digits, too; large ones are no integers because they have no point.
    (r"\boxed{1e-7}", "2e-7", 0),
    (r"\boxed{0.0000002}", "10^{-7}", 0),
    (r"\boxed{0.0000001}", "10^{-7}", 1),
    (r"\boxed{1e-7}", "0", 0),
    (r"\boxed{0.333333}", "1/3", 1),
    (r"\boxed{0.00001}", str(1e-05), 1),
    (r"\boxed{1e-05}", str(1e-05), 1),
    (r"\boxed{2e-05}", str(1e-05), 0),
    (r"\boxed{6.02 \times 10^{23}}", str(6.02e23), 1),
    (r"\boxed{6.03 \times 10^{23}}", str(6.02e23), 0),
    # A gold answer is often a whole solution.
    (r"\boxed{5}", r"So it is \boxed{4}. No: \boxed{5}.", 1),
    (r"\boxed{4}", r"So it is \boxed{4}. No: \boxed{5}.", 0),
]


def test_what_the_library_loses_is_kept() -> None:
    for completion, answer, reward in LOST:
        assert module.math_answer(completion, {"answer": answer}) == reward, (completion, answer)


def test_numbers_of_any_size_can_be_compared() -> None:
    huge = "1" + "0" * 400
    assert module.math_answer(rf"\boxed{{{huge}}}", {"answer": huge}) == 1
    assert module.math_answer(rf"\boxed{{{huge}1}}", {"answer": huge}) == 0
    assert module.math_answer(r"\boxed{3+4i}", {"answer": "4i+3"}) == 1


def test_the_last_box_has_the_answer() -> None:
    for completion, answer, reward in BOXES:
        assert module.math_answer(completion, {"answer": answer}) == reward, completion


def test_equal_values_in_different_forms_are_equal() -> None:
    for completion, answer, reward in FORMS:
        assert module.math_answer(completion, {"answer": answer}) == reward, completion


def test_an_unreadable_gold_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the gold answer ''"):
        module.math_answer("1", {"answer": ""})
    for date in ("2024-01-05", "1/5/2024"):
        with pytest.raises(ValueError, match="is a date, which mathematics subtracts"):
            module.math_answer("2018", {"answer": date})


def test_what_a_model_writes_is_no_error_and_does_not_take_long() -> None:
    for completion in (
        r"\boxed{" * 3000,
        r"\boxed{}" * 3000,
        r"\boxed{" + "(" * 3000 + "}",
        r"\boxed{\frac{1}{" * 100,
        "\\boxed{\x00\ud800}",
        r"\boxed{9/0}",
    ):
        assert module.math_answer(completion, {"answer": "5"}) == 0


@mutations
def test_any_completion_has_a_reward(count: int) -> None:
    rng = random.Random(5)
    parts = ("\\boxed{", "}", "{", "$", "\\frac", "1", "2.5", "e-3", "-", "\u2212", "/", ",", " ")
    parts += (
        "and",
        "(",
        ")",
        "[",
        "^",
        "_",
        "=",
        "x",
        "\\text{",
        "\\sqrt",
        "%",
        "\u00bd",
        ".",
        "\n",
    )
    for _ in range(count):
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        found = module.boxed_answer(text)
        assert found is None or isinstance(found, str)
        assert last_number(text, {"answer": "1/2"}) in (0, 1)
        if rng.randrange(20) == 0:  # sympy takes milliseconds
            assert module.math_answer(text, {"answer": "1/2"}) in (0, 1)


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setattr(
        "areal_lab.extras.find_spec", lambda name: None if name == "math_verify" else real(name)
    )
    with pytest.raises(MissingExtra, match=r"pip install 'areal_lab\[math\]'"):
        importlib.import_module(module.__name__)
