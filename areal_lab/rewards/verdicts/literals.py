"""Values as text, between a solution and its tests: literals, and references to other objects.

    [1, 2.5, -inf, 'text', {'a': {1, 2}}, set(), Ref(3)]     written by `write`, read by `read`

Reading builds new objects of the plain types from an expression's parts and calls nothing of the
writer's: a number that claims to equal everything arrives as a number. Subclasses of plain types
(named tuples, counters, enumerations of integers) arrive as the plain type.
"""

from __future__ import annotations

import _ast
import builtins
import sys

TYPE_CHECKING = False  # typing is slow to import, and so are ast, decimal and fractions
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_BYTES = 4 << 20
"""Longest text of one message."""
ONLY_TREE = 0x400
"""Flag of `compile` for the syntax tree alone."""
_DEEPEST = 100  # Python's parser takes 200 brackets
_DECIMAL_BITS = 64  # longer integers are written in hexadecimal, which takes linear time

_MADE = {
    "Decimal": "decimal",
    "Fraction": "fractions",
    "bytearray": "builtins",
    "complex": "builtins",
    "date": "datetime",
    "datetime": "datetime",
    "deque": "collections",
    "frozenset": "builtins",
    "range": "builtins",
    "set": "builtins",
    "time": "datetime",
    "timedelta": "datetime",
}
"""Types that are written as a call with literal arguments, and their modules."""
_FUNCTIONS = (
    *(abs, all, any, bin, chr, divmod, hash, hex, isinstance, len, max, min, oct, ord, pow),
    *(repr, round, sorted, sum),
)
_NAMES = {
    "inf": float("inf"),
    "nan": float("nan"),
    "Ellipsis": ...,
    "NotImplemented": NotImplemented,
    **{one.__name__: one for one in _FUNCTIONS},
    **{name: one for name, one in vars(builtins).items() if isinstance(one, type)},
}
"""Objects that are written as a name: some tests pass `int` or `len` to a function."""
_NAME_OF = {id(one): name for name, one in _NAMES.items()}


class Unreadable(ValueError):
    """The text is not a literal of this module."""


def write(value: object, refer: Callable[[object], int], depth: int = 0) -> str:
    """Text of a value.

    `refer` returns the number of an object that is not a literal; it is called in the order of the
    text. Values below more than 100 containers (`depth`) are not literals.
    """
    text = _scalar(value)
    if text is None and depth < _DEEPEST:
        text = _container(value, refer, depth + 1)
    return f"Ref({refer(value)})" if text is None else text


def _scalar(value: object) -> str | None:
    """Text of a value that contains no other values; None if it does."""
    if value is None or isinstance(value, bool):
        return repr(value)
    for kind, text_of in _WRITERS:
        if isinstance(value, kind):
            return text_of(value)
    return _NAME_OF.get(id(value)) or _of_library(value)


def _integer(value: int) -> str:
    plain = int.__index__(value)
    return hex(plain) if plain.bit_length() > _DECIMAL_BITS else repr(plain)


_WRITERS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (int, _integer),
    (float, float.__repr__),
    (str, lambda one: ascii(str.__str__(one))),
    (bytes, bytes.__repr__),
    (bytearray, lambda one: f"bytearray({bytes(one)!r})"),
    (complex, lambda one: f"complex({float.__repr__(one.real)}, {float.__repr__(one.imag)})"),
    (range, lambda one: f"range({', '.join(map(_integer, (one.start, one.stop, one.step)))})"),
)


def _of_library(value: Any) -> str | None:
    """Text of a number or a time of the standard library."""
    if isinstance(value, _loaded("Decimal")):
        return f"Decimal({str(value)!r})"
    if isinstance(value, _loaded("Fraction")):
        return f"Fraction({_integer(value.numerator)}, {_integer(value.denominator)})"
    if isinstance(value, _loaded("timedelta")):
        return f"timedelta({value.days}, {value.seconds}, {value.microseconds})"
    days, times = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
    for name, fields in (("datetime", (*days, *times)), ("date", days), ("time", times)):
        # A datetime is a date, and comes first. Time zones are objects.
        if isinstance(value, _loaded(name)) and getattr(value, "tzinfo", None) is None:
            return f"{name}({', '.join(str(getattr(value, one)) for one in fields)})"
    return None


def _loaded(name: str) -> Any:
    """A type; an empty tuple if its module is not loaded, because then no value has this type."""
    return getattr(sys.modules.get(_MADE[name]), name, ())


def _container(value: Any, refer: Callable[[object], int], depth: int) -> str | None:
    if isinstance(value, dict):
        pairs = [
            f"{write(key, refer, depth)}: {write(dict.__getitem__(value, key), refer, depth)}"
            for key in dict.keys(value)
        ]
        return f"{{{', '.join(pairs)}}}"
    bases: tuple[Any, ...] = (list, tuple, set, frozenset, _loaded("deque"))
    for base in bases:
        if isinstance(value, base):
            parts = [write(one, refer, depth) for one in base.__iter__(value)]
            return _joined(base.__name__, parts, getattr(value, "maxlen", None))
    return None


def _joined(kind: str, parts: list[str], most: int | None) -> str:
    text = ", ".join(parts)
    match kind:
        case "list":
            return f"[{text}]"
        case "tuple":
            return f"({text},)" if len(parts) == 1 else f"({text})"
        case "set" if parts:
            return f"{{{text}}}"
        case "deque" if most is not None:
            return f"deque([{text}], {most})"
        case _:
            return f"{kind}([{text}])"


def read(text: str, resolve: Callable[[int], object]) -> Any:
    """Value of a text; raises Unreadable for other texts than those of `write`."""
    if len(text) > MOST_BYTES:
        raise Unreadable(f"a value of {len(text)} bytes, but at most {MOST_BYTES} are read")
    try:
        tree = compile(text, "value", "eval", ONLY_TREE, dont_inherit=True)
        return _value(tree.body, resolve)
    except Unreadable:
        raise
    except (SyntaxError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError) as e:
        raise Unreadable(f"no value: {text[:80]!r} ({type(e).__name__})") from None


def _value(node: Any, resolve: Callable[[int], object]) -> Any:  # noqa: PLR0911 -- by kind
    match node:
        case _ast.Constant(value=value):
            return value
        case _ast.UnaryOp(op=_ast.USub(), operand=operand):
            number = _value(operand, resolve)
            if isinstance(number, (int, float)):
                return -number
        case _ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case _ast.List(elts=parts):
            return [_value(part, resolve) for part in parts]
        case _ast.Tuple(elts=parts):
            return tuple([_value(part, resolve) for part in parts])
        case _ast.Set(elts=parts):
            return {_value(part, resolve) for part in parts}
        case _ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {_value(key, resolve): _value(value, resolve) for key, value in pairs}
        case _ast.Call(func=_ast.Name(id=name), args=parts, keywords=[]):
            arguments = [_value(part, resolve) for part in parts]
            if name == "Ref" and [*map(type, arguments)] == [int]:
                return resolve(arguments[0])
            if name in _MADE:
                return getattr(__import__(_MADE[name]), name)(*arguments)
    raise Unreadable(f"{type(node).__name__} is not part of a literal")
