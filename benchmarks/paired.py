"""A benchmark of CPU time against another commit: both trees run it, in turns.

    this tree   python -m benchmarks.NAME --json ...
    COMMIT      python -m benchmarks.NAME --json ... --+--> ratios of equal figures, pair by pair

Each tree runs its own program, in processes of its own, and both use this environment's packages;
the order inside a pair alternates. A figure means the same in both only where the program does:
compare them if they differ. `rows` has, for each figure, the median, smallest and largest ratio,
this tree over COMMIT, and the medians themselves; `case: figure` is one of a row of the program.

    python -m benchmarks.paired --against COMMIT [--repeats 6] control --repeats 2
    python -m benchmarks.paired --against COMMIT cosim --quick --repeats 1    # minutes a pair
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.demo import ROOT, extracted
from benchmarks.harness import parse, report, spread

PACKAGES = ("areal_lab", "benchmarks", "configs", "cosim", "simulator")


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=6, quick_repeats=1, add_own=_add_arguments)
    commit, own = arguments.own.against, arguments.own.program
    program = [*own, "--quick"] if arguments.quick and "--quick" not in own else own
    pairs = []
    with TemporaryDirectory(prefix="benchmark-paired-") as name:
        other = extracted(commit, Path(name) / "tree", PACKAGES)
        for number in range(arguments.repeats):
            trees = (ROOT, other) if number % 2 else (other, ROOT)
            found = {tree: figures_of(run(tree, program)) for tree in trees}
            pairs.append((found[ROOT], found[other]))
    report({"program": " ".join(program), "against": commit, "rows": compared(pairs)}, arguments)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the other tree")
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="name of a benchmark and its arguments"
    )


def run(tree: Path, program: Sequence[str]) -> dict[str, Any]:
    """The JSON object of a benchmark of `tree`; raises RuntimeError with its errors if it fails."""
    name, *arguments = program
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--json"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{tree}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def figures_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a report and of its rows by name."""
    found = {"": result} | {
        f"{row['case']}: ": row for row in result.get("rows", ()) if "case" in row
    }
    return {
        before + name: float(value)
        for before, figures in found.items()
        for name, value in figures.items()
        if isinstance(value, int | float) and name not in ("min", "max", "quick", "wall_s")
    }


def compared(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> list[dict[str, Any]]:
    """A row for each figure that all runs have, is not 0 and is not the same in all."""
    first, _ = pairs[0]
    rows = []
    for name in first:
        values = [(ours.get(name, 0.0), theirs.get(name, 0.0)) for ours, theirs in pairs]
        if not all(map(all, values)) or len({one for pair in values for one in pair}) == 1:
            continue
        ratio = spread([ours / theirs for ours, theirs in values])
        rows.append(
            {
                "figure": name,
                "ratio": ratio["median"],
                "min": ratio["min"],
                "max": ratio["max"],
                "this_tree": statistics.median(ours for ours, _ in values),
                "commit": statistics.median(theirs for _, theirs in values),
            }
        )
    return rows


if __name__ == "__main__":
    main()
