"""Functions named in a configuration, `module:function`, or sent to another process.

As a program, `python -m areal_lab.config.functions module:function`, it says whether the name can
be imported, in a process of its own: what the module imports may be heavy.
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
    """Import `module:function`; modules in the current folder are found too.

    Raises:
        ValueError: if the name is not of this form, or the module or function does not exist.
            Other errors of the module's own code are raised as they are.
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
        # Only the named module itself: one that it imports in turn is another problem.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name!r}: there is no module {error.name!r}") from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ValueError(f"{name!r}: {module_name!r} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"{name!r} is {type(target).__name__}, which cannot be called")
    function: Callable[..., Any] = target
    return function


def pickle_function(function: Callable[..., Any]) -> bytes:
    """A function for another process, one that a notebook defines too."""
    # Plain pickle cannot send what a notebook defines. Imported by name: it ships no types.
    cloudpickle: Any = importlib.import_module("cloudpickle")
    pickled: bytes = cloudpickle.dumps(function)
    return pickled


def unpickle_function(pickled: bytes) -> Callable[..., Any]:
    """What `pickle_function` was given."""
    function: Callable[..., Any] = pickle.loads(pickled)
    return function


def main(arguments: list[str], check: Callable[[str], object] = load_function) -> int:
    """Print why the function cannot be imported or fails the check, if so; 0 or 1."""
    try:
        check(arguments[0])
    except BaseException as error:  # a module may raise anything, SystemExit too
        message = str(error) if isinstance(error, ValueError) else ""
        print(message or traceback.format_exception_only(error)[-1].strip())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
