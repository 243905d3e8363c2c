"""Whether this process simulates with compiled code: numba's, if `areal_lab[fast]` is installed.

Compiled and plain code give the same results to the last bit, so this decides about time only.
Loading the compiled functions takes 0.4 s, and compiling them, once on a machine, 25 s: a process
turns to them when it simulates enough for that. `python -m simulator.assembly.compiled` compiles
them at once.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ENOUGH: Final = 60_000
"""Sequences, simulated or to simulate, from which on compiled code is loaded."""
ENOUGH_TO_COMPILE: Final = 5_000_000
"""The same if numba must compile it first, which takes about as long as these with plain code."""

_sequences = 0
_in_use = False
_forbidden = False


def simulates(sequences: int) -> bool:
    """Note that this process simulates these sequences, too; returns whether with compiled code."""
    global _sequences, _in_use, _forbidden  # noqa: PLW0603 - of the process
    _sequences += sequences
    if _in_use or _forbidden or _sequences < ENOUGH or not available():
        return _in_use
    if _sequences >= ENOUGH_TO_COMPILE or compiled_before():
        collects = gc.isenabled()
        gc.disable()  # searches for cycles are a sixth of the time of the import
        try:
            import_module("numba")
            _in_use = True
        except ImportError:  # it does not go with this NumPy
            _forbidden = True
        finally:
            if collects:
                gc.enable()
    return _in_use


def in_use() -> bool:
    """Whether this process has turned to compiled code."""
    return _in_use


def available() -> bool:
    """Whether numba is installed, and this is the Python that it compiles for."""
    return sys.implementation.name == "cpython" and find_spec("numba") is not None


def compiled_before() -> bool:
    """Whether an earlier process has left its compiled functions beside ours."""
    source = Path(__file__).parent / "engine" / "kernel.py"
    kept = source.parent.glob("__pycache__/kernel.perform-*.nbi")
    return any(one.stat().st_mtime > source.stat().st_mtime for one in kept)


def use(*, wanted: bool) -> None:
    """Use compiled code from now on, or never."""
    global _in_use, _forbidden
    _in_use, _forbidden = wanted, not wanted


def reset() -> None:
    """Decide again, as a process that has simulated nothing."""
    global _sequences, _in_use, _forbidden
    _sequences, _in_use, _forbidden = 0, False, False
