"""Speed of simulations on one core, and their memory.

`sequences_per_s` is the whole of `run_system` on the paper's 1.5B asynchronous run (128 GPUs, 512 x
16 responses per step, eta 4): drawing lengths, `control`'s decisions, 96 engines, packing and
timing every training step, and the statistics of lags, time and cost. Sequences count when they are
trained on; those generated but unused at the end do not. `paper_run_s` is that run of 250 steps,
including loading and checking the preset.

Rows leave parts out. `given training times` replaces the cost of a training step by a constant, as
`trainer.step_s` does. `engines alone` has no coordinator and no simpy: the same engines get 65,536
sequences at once, which wait for slots, and run until all have finished.

`plan_s` is wall time of the search of `areal-lab plan plan_example` with one split
more, on 2 processes: `possible` configurations, of which a closed form leaves `screened` to be
simulated, some of them with several seeds and changed inputs (`simulations`).

`rss_growth_mib_per_100_steps` compares the resident memory of the 1.5B run at its end with that at
its 50th step.

Rows are of compiled code (`simulator.fast`), which is made before, in `compile_s`, and loaded
before the first of them; `plain code` is the first row without it, and `engines alone` is plain,
too.
`rss_mib` is the most memory of a process that performs the 1.5B run, compiled and plain.

Seconds, except those of the plan and of compiling, are CPU seconds of this one thread: the time on
an otherwise idle core.

With `--against COMMIT` it measures the paper's run and the plan in this tree and in that one, in
turns, each in a process of its own (`benchmarks.one_simulation`). `run_ratio` and `plan_ratio` are
CPU seconds of COMMIT over those of this tree: above 1, this tree is faster; loading the compiled
code counts, compiling it does not. `same_run` and `same_plan` say whether all results are equal to
the last bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

from benchmarks.demo import ROOT, extracted
from benchmarks.harness import Arguments, parse, report, spread
from simulator import fast
from simulator.assembly.compiled import compile_all
from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.costs.training_timing import Sizes
from simulator.plan.schema import load_plan
from simulator.plan.search import find_plan
from simulator.plan.trial import workers
from simulator.run.one_seed import no_search_for_cycles, run_system
from simulator.run.responses import Draws
from simulator.run.system import System, Timing, Training

PAPER: Final = "table_1_1.5b_asynchronous"
PRESETS: Final = (PAPER, "table_1_1.5b_synchronous", "table_1_7b_asynchronous")
PLAN: Final = Path(__file__).parents[1] / "configs" / "plan_example.yaml"
QUESTION: Final = ("candidates.rollout_share=[0.5, 0.5625, 0.625, 0.75]",)
QUICK_QUESTION: Final = (
    *("candidates.node_range=[4, 4]", "candidates.gpu=[H100]", "candidates.eta=[0, 4]"),
    *("search.seeds=1", "search.sensitivity=0"),
)
SHORT: Final = ["workload.steps=12", "workload.warmup_steps=8"]
ENGINE_GROUPS: Final = 4096
SETTLED: Final = 50
"""Steps after which memory is measured, when the pipeline is full."""
MIB: Final = 2**20


def whole_run(config: SimulationConfig) -> tuple[float, int]:
    """CPU seconds of a simulation and the sequences that it trained on."""
    begin_s = time.process_time()
    result = run_system(build(config), config.seed, name=config.name)
    return time.process_time() - begin_s, int(result.columns["sequences"].sum())


def engines_alone(config: SimulationConfig, groups: int) -> tuple[float, int]:
    """CPU seconds of the engines of `config`, one after another, for `groups` groups at once."""
    system = build(config)
    draws = Draws(system, config.seed)
    engines = [system.make_engine(n, config.seed, None) for n in range(system.engines)]
    lengths = [draws.of(group).lengths for group in range(groups)]
    done = 0
    with no_search_for_cycles():
        begin_s = time.process_time()
        for group, responses in enumerate(lengths):
            engines[group % len(engines)].submit(
                0.0, group, system.workload.prompt_tokens, responses, 0
            )
        for engine in engines:
            while (next_s := engine.next_s()) < math.inf:
                done += len(engine.advance(next_s))
        seconds = time.process_time() - begin_s
    assert done == groups
    return seconds, groups * system.workload.samples_per_prompt


def measure(case: str, run: Callable[[], tuple[float, int]], repeats: int) -> dict[str, Any]:
    """A row with the rate and its extremes over the repeats."""
    measured = [run() for _ in range(repeats)]
    rates = spread([sequences / seconds for seconds, sequences in measured])
    return {
        "case": case,
        "sequences": measured[0][1],
        "seconds": statistics.median([seconds for seconds, _ in measured]),
        "sequences_per_s": rates["median"],
        "min": rates["min"],
        "max": rates["max"],
    }


class WatchedTraining:
    """Records the resident memory at every training step."""

    def __init__(self, training: Training) -> None:
        self.rss_mib: list[float] = []
        self._training = training
        self._process = psutil.Process()

    def step(self, lengths: Sizes, *, minibatches: int) -> Timing:
        """The wrapped result."""
        self.rss_mib.append(self._process.memory_info().rss / MIB)
        return self._training.step(lengths, minibatches=minibatches)


def rss_growth(system: System, seed: int, *, settled: int) -> float:
    """Growth of the process in MiB per 100 steps, after the first `settled` steps."""
    watched = WatchedTraining(system.training)
    run_system(dataclasses.replace(system, training=watched), seed)
    steps = watched.rss_mib
    return 100 * (steps[-1] - steps[settled]) / (len(steps) - 1 - settled)


def compiled() -> float:
    """Compile what is not compiled yet, in a process that keeps it; returns seconds."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "simulator.assembly.compiled"], cwd=ROOT, check=True)
    return time.perf_counter() - begin_s


def plain_run(config: SimulationConfig) -> tuple[float, int]:
    """`whole_run` without compiled code."""
    fast.use(wanted=False)
    try:
        return whole_run(config)
    finally:
        fast.use(wanted=True)


def peak_rss_mib(*, compiled_code: bool) -> float:
    """Most memory of a process that performs the paper's run."""
    script = (
        "import resource; from simulator import build, load_simulation, run_system, fast; "
        f"fast.use(wanted={compiled_code}); "
        f"run_system(build(load_simulation({PAPER!r})), 1); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def plan_seconds(overrides: Sequence[str], processes: int) -> dict[str, Any]:
    """Wall seconds of a search, and its size."""
    config = load_plan(PLAN, overrides)
    begin_s = time.perf_counter()
    with workers(processes) as run:
        plan = find_plan(config, run)
    return {
        "plan_s": time.perf_counter() - begin_s,
        "possible": len(plan.space.possible),
        "screened": len(plan.screened),
        "simulations": plan.simulations,
    }


def one_of(tree: Path, *arguments: str) -> dict[str, Any]:
    """What `benchmarks.one_simulation` prints with the packages of a tree; RuntimeError if it
    fails."""
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("one_simulation.py")), *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{tree}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout))


def against(commit: str, arguments: Arguments) -> dict[str, Any]:
    """Figures of both trees; the order inside a pair alternates."""
    question = QUICK_QUESTION if arguments.quick else QUESTION
    cases = {
        "run": ("run", PAPER, *(SHORT if arguments.quick else ())),
        "plan": ("plan", str(PLAN.relative_to(ROOT)), *question),
    }
    figures: dict[str, Any] = {"against": commit, "compile_s": compiled(), "rows": [], "spread": {}}
    with TemporaryDirectory(prefix="benchmark-simulator-") as folder:
        other = extracted(commit, Path(folder), ("areal_lab", "configs", "simulator"))
        for name, case in cases.items():
            pairs = []
            for number in range(arguments.repeats):
                trees = (ROOT, other) if number % 2 else (other, ROOT)
                found = {tree: one_of(tree, *case) for tree in trees}
                pairs.append((found[ROOT], found[other]))
            ratio = spread([theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in pairs])
            figures[f"{name}_ratio"] = ratio["median"]
            figures[f"same_{name}"] = len({one["answer"] for pair in pairs for one in pair}) == 1
            figures["spread"][f"{name}_ratio"] = ratio
            figures["rows"] += [
                {
                    "case": name,
                    "this_tree_cpu_s": statistics.median([ours["cpu_s"] for ours, _ in pairs]),
                    "commit_cpu_s": statistics.median([theirs["cpu_s"] for _, theirs in pairs]),
                }
            ]
    return figures


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="COMMIT", help="measure another tree in turns")


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1, add_own=_add_arguments)
    if arguments.own.against is not None:
        report(against(arguments.own.against, arguments), arguments)
        return
    short = SHORT if arguments.quick else []
    compile_s = compiled()
    compile_all()
    configs = [load_simulation(name, short) for name in PRESETS]
    paper = configs[0]
    given = load_simulation(PAPER, [*short, "trainer.step_s=150"])
    groups = ENGINE_GROUPS // 8 if arguments.quick else ENGINE_GROUPS
    repeats = arguments.repeats
    rows = [measure(one.name, partial(whole_run, one), repeats) for one in configs]
    rows += [
        measure("given training times", partial(whole_run, given), repeats),
        measure("plain code", partial(plain_run, paper), repeats),
        measure("engines alone", partial(engines_alone, paper, groups), repeats),
    ]
    whole, alone = rows[0], rows[-1]
    plan = plan_seconds(QUICK_QUESTION if arguments.quick else QUESTION, processes=2)
    settled = 6 if arguments.quick else SETTLED
    report(
        {
            "sequences_per_s": whole["sequences_per_s"],
            "engine_sequences_per_s": alone["sequences_per_s"],
            "paper_run_s": whole["seconds"],
            "compile_s": compile_s,
            "rss_mib": {
                name: peak_rss_mib(compiled_code=name == "compiled")
                for name in ("compiled", "plain")
            },
            "rss_growth_mib_per_100_steps": rss_growth(build(paper), paper.seed, settled=settled),
            **plan,
            "rows": rows,
            "spread": {
                "sequences_per_s": {name: whole[name] for name in ("min", "max")},
                "engine_sequences_per_s": {name: alone[name] for name in ("min", "max")},
            },
        },
        arguments,
    )


if __name__ == "__main__":
    main()
