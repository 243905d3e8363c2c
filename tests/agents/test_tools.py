"""Tools: exact results, bounded work, and errors that the model can read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.tools.box import (
    MOST_LEFT_BEHIND,
    FunctionTool,
    ToolBox,
    ToolBroken,
    ToolFailure,
    ToolResult,
)
from areal_lab.agents.tools.calculator import Calculator, calculate
from areal_lab.agents.tools.catalogue import as_schema, make_tool
from areal_lab.agents.tools.python import Python
from areal_lab.rewards.sandbox.levels import NoSandbox, refusal
from areal_lab.rewards.sandbox.run import Sandbox, SandboxError
from tests.agents import own_tools


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

    name, description = "talks", ""
    parameters: Mapping[str, Any] = {"required": ["count"]}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return "x" * int(arguments["count"])


def call(box: ToolBox, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(box.call(name, arguments))


def test_every_failure_is_a_text_and_an_outcome() -> None:
    box = ToolBox(Calculator(), Waits(), Talks(), timeout_s=0.01, most_characters=20)
    assert call(box, "calculator", expression="3 * 4") == ToolResult("12")
    assert call(box, "calculator", expression="3 *").outcome == "error"
    assert call(box, "calculator").text == "error: the argument 'expression' is missing"
    assert call(box, "talks").text == "error: the argument 'count' is missing"
    assert call(box, "search", query="x") == ToolResult(
        "error: there is no tool 'search', only calculator, waits, talks", "unknown"
    )
    assert call(box, "waits").outcome == "timeout"
    assert call(box, "talks", count=20).text == "x" * 20
    assert call(box, "talks", count=21).text == "x" * 20 + "... (cut)"


def test_a_box_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="their names must differ"):
        ToolBox(Calculator(), Calculator())
    with pytest.raises(ValueError, match="a name without commas"):
        ToolBox(FunctionTool(own_tools.weather, name="a, b"))
    with pytest.raises(ValueError, match="timeout_s is 0"):
        ToolBox(timeout_s=0)
    with pytest.raises(ValueError, match="most_characters is 0"):
        ToolBox(most_characters=0)


OWN = "tests.agents.own_tools:"


@pytest.mark.parametrize(
    ("name", "arguments", "text", "outcome"),
    [
        ("weather", {"city": "Kiel", "days": "2"}, "Kiel: rain Kiel: rain", "ok"),
        (
            "weather",
            {"city": 7},
            "error: the argument 'city': Input should be a valid str",
            "error",
        ),
        ("weather", {}, "error: the argument 'city': Missing required argument", "error"),
        ("distance", {"start": "a", "end": "bc"}, "3", "ok"),
        ("leaves", {}, "error: it ended with SystemExit(3)", "error"),
        ("hangs", {}, "error: no result within 0.05 s", "timeout"),
        ("capital", {"country": "Peru"}, "error: KeyError('Peru')", "error"),
        ("times_out", {}, "error: the server did not answer", "error"),
        ("leaves_later", {}, "error: SystemExit(3)", "error"),
        ("cancels", {}, "error: the tool canceled itself", "error"),
        ("wrapped", {"city": "Kiel"}, "8", "ok"),
    ],
)
def test_a_function_is_a_tool(
    name: str, arguments: dict[str, Any], text: str, outcome: str
) -> None:
    box = ToolBox(make_tool(OWN + name), timeout_s=0.05 if name == "hangs" else 20.0)
    found = call(box, name, **arguments)
    assert found.text.startswith(text)
    assert found.outcome == outcome


def test_the_model_sees_what_a_function_takes() -> None:
    tool = make_tool(f"{OWN}weather")
    assert (tool.name, tool.description) == ("weather", "The weather of a city.")
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"]["days"]["type"] == "integer"


def test_a_class_is_made_with_its_keywords() -> None:
    box = ToolBox(
        make_tool({"name": f"{OWN}Adder", "amount": 5}), make_tool(f"{OWN}Later"), timeout_s=20
    )
    assert call(box, "add", a=2) == ToolResult("7")
    assert call(box, "later", a=2) == ToolResult("3")
    wrapped = make_tool(f"{OWN}Wrapped")
    assert getattr(wrapped, "limits_itself", False)
    assert call(ToolBox(wrapped), "add", a=2) == ToolResult("3")


def test_a_call_that_is_canceled_from_outside_ends() -> None:
    async def main() -> bool:
        task = asyncio.create_task(ToolBox(Waits(), timeout_s=20.0).call("waits", {}))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())


def test_a_function_may_be_described_by_its_setting() -> None:
    schema = {"type": "object", "properties": {"city": {}}, "required": ["city"]}
    setting = {"name": f"{OWN}weather", "called": "look", "description": "Looks out of a window."}
    tool = make_tool({**setting, "parameters": schema})
    assert (tool.name, tool.description, tool.parameters) == (
        "look",
        "Looks out of a window.",
        schema,
    )
    box = ToolBox(tool, timeout_s=20.0)
    assert call(box, "look", city="Kiel") == ToolResult("Kiel: rain")
    assert call(box, "look").text == "error: the argument 'city' is missing"
    assert make_tool(setting).parameters["required"] == ["city"]
    assert "days" in make_tool(setting).parameters["properties"], "those of its types"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (f"{OWN}nothing", "has no 'nothing'"),
        (f"{OWN}unclear", "the tool unclear has parameters without a JSON schema: Unable to"),
        (f"{OWN}nameless", "has parameters without names"),
        (f"{OWN}NoTool", "NoTool has no 'call', but a tool has name, description"),
        ({"name": f"{OWN}Adder", "amounts": 5}, "amounts"),
        ({"name": f"{OWN}weather", "city": "Kiel"}, "is a function, but has keywords"),
        ("calculatr", "must be module:name or one of calculator.* did you mean 'calculator'"),
        ({"name": "python", "memory_mb": 0}, "memory_mb is 0"),
        ({"name": "python", "at_once": -1}, "at_once is -1"),
        ({"name": "python", "timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_a_tool_that_cannot_be_made_is_refused(setting: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        make_tool(setting)
    assert "\n" not in str(raised.value)


def test_calls_that_hang_for_ever_end_the_run_and_not_its_threads() -> None:
    """The last call fails as the tool's, and nothing waits for the threads."""
    tool = FunctionTool(own_tools.hangs)
    box = ToolBox(tool, timeout_s=0.01)

    async def main() -> list[ToolResult]:
        calls = (box.call("hangs", {}) for _ in range(MOST_LEFT_BEHIND))
        found = await asyncio.gather(*calls)
        with pytest.raises(ToolBroken, match="32 calls of the tool hangs still run"):
            await box.call("hangs", {})
        return found

    assert {one.outcome for one in asyncio.run(main())} == {"timeout"}
    own_tools.NEVER.set()
    own_tools.NEVER.clear()


PYTHON = Python(timeout_s=20.0, memory_mb=256)


@pytest.mark.parametrize(
    ("code", "text", "outcome"),
    [
        ("print(6 * 7)", "42", "ok"),
        ("x = 1", "(nothing was printed)", "ok"),
        ("print('so far')\n1 / 0", "so far\nZeroDivisionError: division by zero", "error"),
        ("print(", "SyntaxError: '(' was never closed", "error"),
        ("import sys; sys.exit(3)", "error: exit code 3", "error"),
        ("import os; os.abort()", "error: ended by signal 6", "error"),
        ("b = [bytearray(1 << 20) for _ in range(1000)]", "MemoryError", "error"),
        ("print('x' * 60_000)", "x" * 100 + "... (cut)", "ok"),
        ("print('x' * (1 << 20))", "x" * 100 + "... (cut)", "error"),
        ("open('/etc/passwd')", "FileNotFoundError", "error"),
    ],
)
def test_a_program_gives_what_it_prints(code: str, text: str, outcome: str) -> None:
    box = ToolBox(PYTHON, timeout_s=0.001, most_characters=100)
    found = call(box, "python", code=code)
    # The kernel's limit of a process, or the keeper's of all of them, whichever comes first.
    limits = (text, "error: more than 256 MB of memory") if "Memory" in text else (text,)
    assert found.text.startswith(limits)
    assert found.outcome == outcome


def test_a_program_that_does_not_end_is_ended() -> None:
    box = ToolBox(Python(timeout_s=0.3))
    assert call(box, "python", code="print('on', flush=True)\nwhile True: pass") == ToolResult(
        "on\nerror: no end within 0.3 s", "timeout"
    )
    assert call(box, "python").text == "error: the argument 'code' is missing"


def test_more_programs_than_places_wait_and_are_not_late() -> None:
    box = ToolBox(Python(timeout_s=20.0, at_once=1), timeout_s=0.001)

    async def main() -> list[ToolResult]:
        code = "import time; time.sleep(0.05); print(1)"
        return await asyncio.gather(*(box.call("python", {"code": code}) for _ in range(3)))

    assert asyncio.run(main()) == [ToolResult("1")] * 3


def test_a_sandbox_that_cannot_run_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise SandboxError("no memory for a process")

    monkeypatch.setattr(Sandbox, "run_async", refused)
    with pytest.raises(ToolBroken, match="cannot run a program: no memory"):
        call(ToolBox(PYTHON), "python", code="1")


def test_programs_are_refused_where_nothing_contains_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_lab.rewards.sandbox.levels.refusal", lambda level: f"no {level}")
    with pytest.raises(NoSandbox, match=r"no bubblewrap.*reward\.sandbox=unsafe"):
        Python()
    assert refusal("namespaces") == ""  # the real one


def test_a_failure_has_an_outcome_of_its_own() -> None:
    async def refuses() -> str:
        raise ToolFailure("not today", "refused")

    assert call(ToolBox(FunctionTool(refuses)), "refuses") == ToolResult("not today", "refused")


def renamed(tool: Any, **keywords: Any) -> Any:
    name = "areal_lab.agents.tools.catalogue:Renamed"
    return make_tool({"name": name, "tool": tool, "called": "other", **keywords}, sandbox="unsafe")


def test_a_tool_may_have_another_name_and_other_arguments() -> None:
    tool = renamed("calculator", parameters={"sum": {"type": "string"}, "digits": "integer"})
    assert (tool.name, tool.description) == ("other", Calculator.description)
    assert tool.parameters["properties"]["digits"] == {"type": "integer"}
    box = ToolBox(tool)
    assert call(box, "other", sum="6 * 7", digits=3) == ToolResult("42")
    assert call(box, "other", expression="6 * 7") == ToolResult("42")
    assert call(box, "other", words="6").text == "error: the argument 'sum' is missing"
    assert call(ToolBox(renamed("calculator")), "other", expression="1").text == "1"
    slow = ToolBox(renamed("python", description="Runs."), timeout_s=0.001)
    assert call(slow, "other", code="print(1)") == ToolResult("1"), "it limits itself"
    name = "areal_lab.agents.tools.catalogue:Renamed"
    limited = make_tool(
        {"name": name, "tool": f"{OWN}Bounded", "called": "other"}, sandbox="unsafe", timeout_s=7
    )
    assert call(ToolBox(limited, timeout_s=20.0), "other", a="b").text == "b: unsafe, 7 s"
    with pytest.raises(ValueError, match="takes 2 arguments, but only tools with one"):
        renamed(f"{OWN}distance")


def test_bare_properties_become_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": []}
    assert as_schema(schema) == schema
    assert as_schema(schema["properties"]) == {**schema, "required": ["a"]}  # type: ignore[arg-type]
    assert as_schema({"type": {"type": "string"}})["required"] == ["type"]
