"""The solution's side: load the code, send its names, then handle requests in order.

    ('names', {name: object}, {name: names of its bases})      once, when the code has been loaded
    ('call', object or name in _BUILT_IN, arguments, keywords) --> ('value', value, {n: changed})
                                                               --> ('raise', names, arguments, text)
                                                               --> ('unsupported', reason)

The solution controls this process and can send anything: it decides what its functions return, and
nothing else.
"""

from __future__ import annotations

import io
import operator
import os
import sys

from areal_lab.rewards.sandbox.cell import LINK_IN, LINK_OUT
from areal_lab.rewards.verdicts import literals

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import Any

_BUILT_IN = {
    "bool": bool,
    "getattr": getattr,
    "getitem": operator.getitem,
    "isinstance": isinstance,
    "iter": iter,
    "len": len,
    "next": next,
    "repr": repr,
    "setattr": setattr,
    "setitem": operator.setitem,
    "str": str,
}
"""Operations of the tests on an object that is not a literal, besides calling it."""


def main(argument: dict[str, Any]) -> None:
    """Serve until the tests hang up."""
    module = type(sys)("solution")  # not "__main__": the main block of a script is skipped
    sys.modules["solution"] = module
    sys.set_int_max_str_digits(0)
    requests = io.BufferedReader(io.FileIO(LINK_IN, closefd=False), 1 << 16)
    exec(compile(argument["code"], "solution.py", "exec", dont_inherit=True), module.__dict__)
    objects = Objects()
    send(objects.write(("names", *_defined(module.__dict__))))
    for line in requests:
        send(answer(line.decode("ascii"), objects))


def _defined(names: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Callables, and the bases of exceptions, by name."""
    called = {name: value for name, value in names.items() if callable(value) and name[:2] != "__"}
    errors = {
        name: [one.__name__ for one in value.__mro__]
        for name, value in called.items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    return called, errors


class Objects:
    """Numbers of objects that are not literals; they live as long as this."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._objects: list[object] = []

    def refer(self, value: object) -> int:
        """The number of an object."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def write(self, value: object) -> str:
        """The text of a value."""
        return literals.write(value, self.refer)

    def read(self, text: str) -> Any:
        """The value of a text."""
        return literals.read(text, self._objects.__getitem__)


def answer(request: str, objects: Objects) -> str:
    """Handle one request; returns the reply."""
    try:
        _, function, arguments, keywords = objects.read(request)
        given = [*arguments, *keywords.values()]
        before = [objects.write(one) if _may_change(one) else None for one in given]
        if isinstance(function, str):
            function = _BUILT_IN[function]
        value = function(*arguments, **keywords)
        changed = {
            number: one
            for number, (one, text) in enumerate(zip(given, before, strict=True))
            if text is not None and objects.write(one) != text
        }
        reply = objects.write(("value", value, changed))
    except BaseException as error:
        names = [one.__name__ for one in type(error).__mro__]
        reply = objects.write(("raise", names, list(error.args), _text(error)))
    if len(reply) > literals.MOST_BYTES:
        return f"('unsupported', 'a value of {len(reply)} bytes')"
    return reply


def _may_change(value: object) -> bool:
    return isinstance(value, (list, dict, set, bytearray)) or type(value).__name__ == "deque"


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""


def send(text: str) -> None:
    """Write one line to the tests."""
    data = memoryview(text.encode("ascii") + b"\n")
    while data:
        data = data[os.write(LINK_OUT, data) :]
