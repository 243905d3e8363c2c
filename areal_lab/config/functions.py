"""Functions named in a config (`module:function`) or sent to another process.

`python -m areal_lab.config.functions module:function` checks that the name can be imported, in a
separate process because the module's imports may be heavy.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_function(name: str) -> Callable[..., Any]:
    """Import `module:function`; modules in the current folder are found, too.

    Raises:
        ValueError: if the name is not of this form, or the module or function does not exist.
            Errors of the module's own code are passed on.
    """
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
