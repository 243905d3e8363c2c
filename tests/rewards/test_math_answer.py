"""Mathematical answers, and what is said without the extra."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from areal_lab.extras import MissingExtra
from areal_lab.rewards import math_answer as module


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


def test_an_unreadable_gold_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot read the gold answer ''"):
        module.math_answer("1", {"answer": ""})


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.setattr(
        "areal_lab.extras.find_spec", lambda name: None if name == "math_verify" else real(name)
    )
    with pytest.raises(MissingExtra, match=r"pip install 'areal_lab\[math\]'"):
        importlib.import_module(module.__name__)
