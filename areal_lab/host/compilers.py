"""Compilers on this machine, which torch needs to compile. No torch."""

from __future__ import annotations

import os
import shutil
from typing import Literal

_NAMES = {"c": ("CC", ("gcc", "clang", "cc")), "c++": ("CXX", ("g++", "clang++"))}


def find_compiler(language: Literal["c", "c++"]) -> str | None:
    """Path of a compiler: the one in `CC` or `CXX`, else one that torch looks for; None if there is
    none.

    Kernels for a CPU are compiled as C++; what starts Triton's on a GPU as C.
    """
    variable, names = _NAMES[language]
    asked = os.environ.get(variable)
    return next(filter(None, map(shutil.which, (asked,) if asked else names)), None)
