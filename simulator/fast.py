"""Whether this process simulates with compiled code: numba's, if `areal_lab[fast]` is installed.

Compiled and plain code give the same results to the last bit, so this decides about time only.
Loading the compiled functions takes about half a second, and compiling them, once on a machine,
about ten: a process turns to them when it simulates enough for that.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ENOUGH: Final = 60_000
"""Sequences, simulated or to simulate, from which on compiled code is loaded."""
ENOUGH_TO_COMPILE: Final = 2_000_000
"""The same if numba must compile it first: they take plain code ten seconds."""

_sequences = 0
_in_use = False
_forbidden = False


def simulates(sequences: int) -> bool:
    """Note that this process simulates these sequences, too; returns whether with compiled code."""
    global _sequences, _in_use, _forbidden  # noqa: PLW0603 - of the process
    _sequences += sequences
    if not _in_use and not _forbidden and _sequences >= ENOUGH and available():
        try:
            _in_use = compiled_before() or _sequences >= ENOUGH_TO_COMPILE
        except ImportError:  # a numba that does not go with this NumPy
            _forbidden = True
    return _in_use


def in_use() -> bool:
    """Whether this process has turned to compiled code."""
    return _in_use


def available() -> bool:
    """Whether numba is installed, and this is the Python that it compiles for."""
    return sys.implementation.name == "cpython" and find_spec("numba") is not None


def compiled_before() -> bool:
    """Whether an earlier process has left its compiled functions beside ours, or in a cache."""
    from simulator.engine.kernel import perform

    return any(Path(perform.stats.cache_path).glob("kernel.perform-*.nbi"))


def use(*, wanted: bool) -> None:
    """Use compiled code from now on, or never."""
    global _in_use, _forbidden  # noqa: PLW0603 - of the process
    _in_use, _forbidden = wanted, not wanted


def reset() -> None:
    """Decide again, as a process that has simulated nothing."""
    global _sequences, _in_use, _forbidden  # noqa: PLW0603 - of the process
    _sequences, _in_use, _forbidden = 0, False, False


def compile_all() -> None:
    """Compile all functions, or load them, by a small run and its training steps."""
    from simulator.assembly.simulate import build
    from simulator.config.load import load_simulation
    from simulator.run.one_seed import run_system

    use(wanted=True)
    pipeline = ("trainer.pipeline_parallel=2", "cluster.gpus=16", "rollout.tensor_parallel=1")
    for settings in ((), pipeline):
        config = load_simulation("small", settings)
        run_system(build(config), config.seed)


def main() -> None:
    """Compile, and say how long that took: `python -m simulator.fast`."""
    if not available():
        print('numba is missing: pip install "areal_lab[fast]"')
        return
    begin_s = time.perf_counter()
    compile_all()
    print(f"the simulator's compiled functions are ready ({time.perf_counter() - begin_s:.1f} s)")


if __name__ == "__main__":
    main()
