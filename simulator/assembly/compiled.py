"""Compile the simulator's functions before a run needs them.

python -m simulator.assembly.compiled
"""

from __future__ import annotations

import time

from simulator import fast
from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.run.one_seed import run_system


def compile_all() -> None:
    """Compile the functions, or load them, by two small runs."""
    fast.use(wanted=True)
    pipeline = ("cluster.gpus=4", "trainer.pipeline_parallel=2", "trainer.step_s=null")
    for settings in ((), pipeline):
        config = load_simulation("small", settings)
        run_system(build(config), config.seed)


def main() -> None:
    """Compile, and say how long that took."""
    if not fast.available():
        print('numba is missing; pip install "areal_lab[fast]"')
        return
    begin_s = time.perf_counter()
    compile_all()
    print(f"the simulator's compiled functions are ready ({time.perf_counter() - begin_s:.1f} s)")


if __name__ == "__main__":
    main()
