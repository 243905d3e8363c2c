"""Tools: exact results, bounded work, and errors that the model can read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.tools import Calculator, ToolBox, ToolResult, calculate


@given(st.integers(-(10**40), 10**40), st.integers(-(10**40), 10**40), st.sampled_from("+-*"))
def test_integers_are_exact(left: int, right: int, sign: str) -> None:
    assert calculate(f"({left}) {sign} ({right})") == str(eval(f"({left}) {sign} ({right})"))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("34 * 27", "918"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("7 // 2 + 7 % 4", "6"),
        ("0.1 + 0.2", "0.3"),
        ("2^10", "1024"),
        ("-(3 - 5) * 2", "4"),
        ("1 / 3", "0.333333333333"),
        ("2 ** -2", "0.25"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("2 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("(" * 500 + "1" + ")" * 500, "not an arithmetic expression"),
        ("*".join(["9" * 200] * 3), "digits"),
        ("1e400", "no|too|Invalid|digits"),
        ("1 if 1 else 2", "only numbers"),
        ("(10 ** 299) * (10 ** 60) / 7", "too large"),
    ],
)
def test_what_is_refused(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        calculate(expression)
    assert "\n" not in str(raised.value)


class Waits:
    """Never returns."""

    name, description, parameters = "waits", "", {}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        del arguments
        await asyncio.Event().wait()
        raise AssertionError


class Talks:
    """Returns more than a model can read."""

    name, description, parameters = "talks", "", {}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return "x" * int(arguments["count"])


def call(box: ToolBox, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(box.call(name, arguments))


def test_every_failure_is_a_text_and_an_outcome() -> None:
    box = ToolBox(Calculator(), Waits(), Talks(), timeout_s=0.01, most_characters=20)
    assert call(box, "calculator", expression="3 * 4") == ToolResult("12")
    assert call(box, "calculator", expression="3 *").outcome == "error"
    assert call(box, "calculator").text == "error: the argument 'expression' is missing"
    assert call(box, "search", query="x") == ToolResult(
        "error: there is no tool 'search', only calculator, waits, talks", "unknown"
    )
    assert call(box, "waits").outcome == "timeout"
    assert call(box, "talks", count=20).text == "x" * 20
    assert call(box, "talks", count=21).text == "x" * 20 + "... (cut)"


def test_a_box_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        ToolBox(Calculator(), Calculator())
    with pytest.raises(ValueError, match="timeout_s is 0"):
        ToolBox(timeout_s=0)
    with pytest.raises(ValueError, match="most_characters is 0"):
        ToolBox(most_characters=0)
