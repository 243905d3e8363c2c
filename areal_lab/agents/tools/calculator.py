"""Exact arithmetic for a model, and a control whose results are wrong."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

MOST_DIGITS: Final = 300
"""Maximum digits of numbers: longer ones would block the caller."""


class Calculator:
    """Exact arithmetic: `+ - * / // %`, parentheses, and `**` with small exponents.

    >>> await Calculator().call({"expression": "34 * 27"})
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
        """Value of `expression`: an integer, or a decimal number with 12 digits."""
        return calculate(str(arguments["expression"]))


class ScrambledCalculator(Calculator):
    """A calculator with wrong results: digits in another order, or other digits.

    A control: a policy cannot learn to use it, so anything learned with the real calculator comes
    from its results.
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
    """Evaluate an arithmetic expression."""
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
    # Bits, so the number does not have to be printed.
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
