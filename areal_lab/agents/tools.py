"""Tools that a model may call: a name, what it takes, and a result that is always text.

A tool that fails tells the model why; that is an outcome, and no exception of the run.
"""

from __future__ import annotations

import ast
import asyncio
import operator
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol

MOST_DIGITS: Final = 300
"""Of a calculator's numbers: more digits would take its caller's time."""
MOST_CHARACTERS: Final = 4000
"""Of a tool's result that the model sees, unless said otherwise."""
_CUT: Final = "... (cut)"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave."""

    text: str
    outcome: str = "ok"
    """`ok`, `error`, `timeout`, or `unknown` for a tool that there is not."""


class CallableTool(Protocol):
    """A tool."""

    @property
    def name(self) -> str:
        """By which the model calls it."""
        ...

    @property
    def description(self) -> str:
        """For the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of its arguments."""
        ...

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result.

        Raises:
            Exception: its message is shown to the model.
        """
        ...


class Calculator:
    """Exact arithmetic: `+ - * / // %`, parentheses, and `**` with small exponents.

    >>> asyncio.run(Calculator().call({"expression": "34 * 27"}))
    '918'
    """

    name = "calculator"
    description = "Compute an arithmetic expression, such as 34 * 27."
    parameters: Final[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The value of `expression`: an integer, or a decimal number with 12 digits."""
        return calculate(str(arguments["expression"]))


class ScrambledCalculator(Calculator):
    """A calculator with wrong results: the digits in another order, or other digits.

    A control: a policy cannot learn to use it, so that what it learns with a calculator comes from
    the results.
    """

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """A number as long as the value of `expression`, and never equal to it."""
        expression = str(arguments["expression"])
        value = calculate(expression)
        digits = list(value)
        random.Random(expression).shuffle(digits)
        scrambled = "".join(digits)
        if scrambled != value:
            return scrambled
        return value.translate(str.maketrans("0123456789", "1234567890"))


def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    Raises:
        ValueError: in one line: it is no arithmetic, or too large.
    """
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression.strip()!r} is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError as error:
        raise ValueError("the result is too large for a decimal number") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ValueError("only numbers and + - * / // % ** are known")
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(sign)](_value(left), _value(right)))
        case _:
            raise ValueError("only numbers and + - * / // % ** are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if exponent.denominator != 1 or digits * abs(exponent) > MOST_DIGITS:
        raise ValueError(f"the exponent {exponent} is too large, or no whole number")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    # Of base 2, so that no number is written out.
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if bits > MOST_DIGITS * 4:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")
    return value


_OPERATIONS: Final[dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class ToolBox:
    """The tools of a workflow, by name, with limits of time and length.

    Args:
        tools: with different names.
        timeout_s: of one call.
        most_characters: of a result; what is longer is cut, visibly.

    Raises:
        ValueError: two tools have one name.
    """

    def __init__(
        self,
        *tools: CallableTool,
        timeout_s: float = 10.0,
        most_characters: int = MOST_CHARACTERS,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = ", ".join(tool.name for tool in tools)
            raise ValueError(f"the tools are {names}, but each needs a name of its own")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if most_characters < 1:
            raise ValueError(f"most_characters is {most_characters}, but must be >= 1")
        self._timeout_s = timeout_s
        self._most_characters = most_characters

    @property
    def tools(self) -> tuple[CallableTool, ...]:
        """All of them."""
        return tuple(self._tools.values())

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool; never raises but for a cancellation."""
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult(f"error: there is no tool {name!r}, only {known}", "unknown")
        try:
            text = str(await self._limited(tool.call(arguments)))
        except TimeoutError:
            return ToolResult(f"error: no result within {self._timeout_s:g} s", "timeout")
        except KeyError as error:
            return ToolResult(f"error: the argument {error} is missing", "error")
        except Exception as error:
            return ToolResult(self._cut(f"error: {error or type(error).__name__}"), "error")
        return ToolResult(self._cut(text))

    async def _limited(self, work: Awaitable[str]) -> str:
        async with asyncio.timeout(self._timeout_s):
            return await work

    def _cut(self, text: str) -> str:
        if len(text) <= self._most_characters:
            return text
        return text[: self._most_characters] + _CUT
