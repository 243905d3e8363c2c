"""Make this interpreter refuse what Python in a browser (Pyodide) does not have.

    python -c "from tests.browser_python import install; install(); import simulator; ..."

- Modules: no processes, no file locks, no users, no torch, no psutil. What is loaded already stays
  for others (marimo talks to its kernel by processes, except in a browser), and not for us.
- Threads and processes do not start.
- `numpy.intp` has 32 bits, and what counts or repeats by index refuses 64 bits. Only our modules
  see such a numpy: pandas and matplotlib are built for the machine they run on.

Install it before the modules that it is meant for are imported.
"""

from __future__ import annotations

import builtins
import importlib.abc
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any, Final

MISSING: Final = {
    *("_multiprocessing", "_posixshmem", "fcntl", "grp", "pwd", "pty", "resource", "syslog"),
    *("termios", "psutil", "torch", "transformers", "uvicorn"),
}
PROCESSES: Final = {"multiprocessing", "ProcessPoolExecutor"}
OURS: Final = ("simulator", "areal_lab", "reproductions", "notebooks", "__main__")
INDEX_BITS: Final = 32


def install() -> None:
    """Refuse from now on; there is no way back."""
    loaded = sorted(name for name in sys.modules if name.split(".")[0] in OURS[:-1])
    if loaded:
        raise RuntimeError(f"already imported: {', '.join(loaded)}")
    sys.meta_path.insert(0, _Missing())
    threading.Thread.start = _no_thread  # type: ignore[method-assign]
    subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign, assignment]

    import numpy

    narrow = _narrow(numpy)
    ordinary = builtins.__import__

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = None,
        level: int = 0,
    ) -> ModuleType:
        importer = str((globals or {}).get("__name__"))
        ours = importer.split(".", maxsplit=1)[0] in OURS
        if ours and level == 0:
            lacking = {name.split(".", maxsplit=1)[0], *(fromlist or ())} & (MISSING | PROCESSES)
            if lacking:
                raise ModuleNotFoundError(f"{importer} imports {lacking}, which browsers lack")
        module = ordinary(name, globals, locals, fromlist or (), level)
        return narrow if ours and name == "numpy" and not fromlist else module

    builtins.__import__ = import_


class _Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname in MISSING:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _no_process(*_: object, **__: object) -> None:
    raise OSError("emscripten does not support processes.")


def _narrow(numpy: ModuleType) -> ModuleType:
    """Numpy as it is where an address has 32 bits."""
    narrow = ModuleType("numpy", numpy.__doc__)
    narrow.__dict__.update(numpy.__dict__)
    narrow.__getattr__ = numpy.__getattr__  # type: ignore[method-assign]

    def guarded(name: str, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        @wraps(function)
        def guard(*arguments: Any, **options: Any) -> Any:
            if len(arguments) > place:
                dtype = numpy.asarray(arguments[place]).dtype
                indexes = numpy.asarray(arguments[place]).ndim > 0 and dtype.kind in "iu"
                if indexes and 8 * dtype.itemsize > INDEX_BITS - (dtype.kind == "u"):
                    raise TypeError(
                        f"{name}: cannot cast array data from dtype('{dtype}') to "
                        f"dtype('int{INDEX_BITS}') according to the rule 'safe'"
                    )
            return function(*arguments, **options)

        return guard

    narrow.intp = numpy.int32
    narrow.bincount = guarded("bincount", numpy.bincount, 0)
    narrow.repeat = guarded("repeat", numpy.repeat, 1)
    for name in ("add", "maximum", "minimum", "multiply", "logical_or", "logical_and"):
        setattr(narrow, name, _Ufunc(getattr(numpy, name), guarded))
    return narrow


class _Ufunc(SimpleNamespace):
    """A ufunc whose `reduceat` refuses wide indices."""

    def __init__(self, ufunc: Any, guarded: Callable[..., Any]) -> None:
        super().__init__(ufunc=ufunc)
        self.reduceat = guarded(f"{ufunc.__name__}.reduceat", ufunc.reduceat, 1)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.ufunc(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ufunc, name)
