"""Functions named in a config (`module:function`) or sent to another process.

`python -m areal_lab.config.functions module:function` checks that the name can be imported, in a
separate process because the module's imports may be heavy.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def load_function(name: str) -> Callable[..., Any]:
    """Import `module:function`; modules in the current folder are found, too."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"{name!r} is not of the form module:function")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the named module itself; a missing import inside it is a different problem.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name!r}: module {error.name!r} does not exist") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ValueError(f"{name!r}: {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"{name!r} is {type(target).__name__}, which is not callable")
    function: Callable[..., Any] = target
    return function


@dataclass(frozen=True, slots=True)
class Form:
    """Signature that a user's function must have."""

    call: str
    """Call as code, `score(completion, example)`: a name, and the arguments by position."""
    may_wait: bool = True
    """True if the function may be async."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(self.call.partition("(")[2].rstrip(")").split(", "))


def check_call(
    function: Callable[..., Any], form: Form, keywords: Mapping[str, Any] = _NOTHING
) -> None:
    """Check that a function accepts the arguments of its later call, before anything starts.

    For a class, the instance is checked. Callables without a signature, such as some builtins, are
    not checked.
    """
    if not callable(function):
        raise ValueError(
            f"is {type(function).__name__} {function!r:.60}, but must be a function, "
            f"called as {form.call}"
        )
    given: tuple[None, ...] = (None,) * len(form.arguments)
    if isinstance(function, type):
        _bind(function, (), keywords, "is made with " + (", ".join(keywords) or "no keywords"))
        if not any("__call__" in vars(one) for one in function.__mro__):
            raise ValueError(f"is a class without __call__, but must be called as {form.call}")
        of_instances: Callable[..., Any] = getattr(function, "__call__")  # noqa: B004, B009 -- of the class
        function, keywords, given = of_instances, _NOTHING, (None, *given)
    _bind(function, given, keywords, f"is called as {form.call}")
    runs = [one for one in (function, getattr(function, "__call__", None)) if one]  # noqa: B004 -- of an object
    if any(map(inspect.isgeneratorfunction, runs)) or any(map(inspect.isasyncgenfunction, runs)):
        raise ValueError("yields, but must return what it computes")
    if not form.may_wait and any(map(inspect.iscoroutinefunction, runs)):
        raise ValueError("is async, but nothing waits for it; write def instead of async def")


def _bind(
    function: Callable[..., Any], given: tuple[Any, ...], keywords: Mapping[str, Any], how: str
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(*given, **keywords)
    except TypeError as error:
        raise ValueError(f"takes {signature}, but {how}: {error}") from None


def pickle_function(function: Callable[..., Any]) -> bytes:
    """Pickle a function for another process, even if a notebook defines it."""
    # Plain pickle cannot send functions of a notebook. Imported by name: it has no types.
    cloudpickle: Any = importlib.import_module("cloudpickle")
    pickled: bytes = cloudpickle.dumps(function)
    return pickled


def unpickle_function(pickled: bytes) -> Callable[..., Any]:
    """The function that `pickle_function` pickled."""
    function: Callable[..., Any] = pickle.loads(pickled)
    return function


def main(arguments: list[str], check: Callable[[str], object] = load_function) -> int:
    """Check a function, by default by importing it; print the error and return 1 if that fails."""
    try:
        check(arguments[0])
    except BaseException as error:  # a module may raise anything, SystemExit too
        message = str(error) if isinstance(error, ValueError) else ""
        print(message or traceback.format_exception_only(error)[-1].strip())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
