"""What a browser lacks: processes, and indices of 64 bits.

Pyodide has no `_multiprocessing`, and its `np.intp` has 32 bits: functions that take indices or
counts refuse int64 there. Both are checked natively, in a process whose numpy refuses as well.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

NO_PROCESSES = """
import sys
sys.modules["_multiprocessing"] = None
"""
NARROW_INDICES = """
import numpy as np

np.intp = np.int32

def refuse_wide(values):
    if getattr(values, "dtype", None) in (np.int64, np.uint64):
        raise TypeError(f"Cannot cast array data from {values.dtype!r} to int32 by rule 'safe'")

class Narrow:
    def __init__(self, ufunc):
        self.ufunc = ufunc
    def __call__(self, *args, **kwargs):
        return self.ufunc(*args, **kwargs)
    def __getattr__(self, name):
        return getattr(self.ufunc, name)
    def reduceat(self, values, indices, *args, **kwargs):
        refuse_wide(indices)
        return self.ufunc.reduceat(values, indices, *args, **kwargs)

def bincount(x, *args, original=np.bincount, **kwargs):
    refuse_wide(x)
    return original(x, *args, **kwargs)

def repeat(a, repeats, *args, original=np.repeat, **kwargs):
    refuse_wide(repeats)
    return original(a, repeats, *args, **kwargs)

np.add, np.maximum = Narrow(np.add), Narrow(np.maximum)
np.bincount, np.repeat = bincount, repeat
"""
SMALL = """
import simulator
print(simulator.simulate(simulator.load_simulation("small")).step_s)
"""
SYNCHRONOUS = """
import simulator
config = simulator.load_simulation("table_1_1.5b_synchronous").with_settings(
    {"workload.steps": 2, "workload.warmup_steps": 0, "workload.prompts_per_batch": 64})
print(simulator.simulate(config).step_s)
"""
LENGTHS = """
import simulator
print(simulator.fit_lengths([400, 500, 700, 1500, 2500, 4000] * 10).distance)
"""
USES = {"small": SMALL, "synchronous": SYNCHRONOUS, "lengths": LENGTHS}


def printed(script: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_results_are_the_same_without_processes_and_with_narrow_indices(use: str) -> None:
    assert printed(NO_PROCESSES + NARROW_INDICES + use) == printed(use)
