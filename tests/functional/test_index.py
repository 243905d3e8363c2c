"""What `import areal_lab.functional` offers and loads."""

from __future__ import annotations

import subprocess
import sys

from areal_lab import functional

SCRIPT = """
import sys
import torch
from jaxtyping import Bool, Float, Int, Shaped
before = set(sys.modules)
import areal_lab.functional
print(*(set(sys.modules) - before))
"""


def test_nothing_but_torch_and_jaxtyping_is_loaded():
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    added = set(process.stdout.decode().split())
    own = {name for name in added if name.startswith("areal_lab.")}
    allowed = ("areal_lab.functional", "areal_lab.capacity")
    assert all(name.startswith(allowed) for name in own)
    packages = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert packages == {"areal_lab"}


def test_the_index_is_complete_and_documented():
    assert len(set(functional.__all__)) == len(functional.__all__)
    for name in functional.__all__:
        value = getattr(functional, name)
        if callable(value) and getattr(value, "__module__", "").startswith("areal_lab"):
            assert value.__doc__, name
