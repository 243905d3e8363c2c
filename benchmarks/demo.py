"""CPU seconds, memory and held-out reward of `make demo`, paired with an older commit.

    this tree   areal-lab train arithmetic seed=1 --.
    COMMIT      areal-lab train arithmetic seed=1 --+--> ratios, pair by pair; then seed 2, ...

Pairs take turns, and the order inside a pair alternates. Both trees use this environment's
packages. Wall time is not reported: CPU seconds are disturbed less by other processes.

    cpu_ratio     user and system seconds of all processes, this tree over COMMIT
    memory_ratio  largest sum of the processes' proportional set sizes, pages in /dev/shm included
    held_out      mean held-out reward after the last step, of each tree over all seeds
    sampler_gap   mean |log-prob of the trainer - of the engine| of tokens at lag 0, over the steps

    python -m benchmarks.demo --against COMMIT --json [--repeats 10] [SETTING=VALUE ...]

The settings go to both; `actor.dtype=float32 rollout.dtype=float32` is a CPU without bfloat16.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from areal_lab.config.load import load_config
from areal_lab.models.locate import resolve_model_path
from benchmarks.harness import parse, report, spread
from benchmarks.process_usage import run_and_measure

ROOT = Path(__file__).parents[1]
CONFIG, QUICK_CONFIG = "arithmetic", "tiny"
QUICK_SETTINGS = ("total_train_steps=2", "evaluation.samples_per_problem=1", "dataset.eval_size=8")


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=10, quick_repeats=1, add_own=_add_arguments)
    config = QUICK_CONFIG if arguments.quick else CONFIG
    settings = [*(QUICK_SETTINGS if arguments.quick else ()), *arguments.own.settings]
    # Converted before anything is measured.
    resolve_model_path(load_config(ROOT / f"areal_lab/configs/{config}.yaml", settings).actor.path)
    commit = arguments.own.against
    with TemporaryDirectory(prefix="benchmark-demo-") as name:
        old = extracted(commit, Path(name) / "tree")
        rows = []
        for seed in range(1, arguments.repeats + 1):
            sides = [("this tree", ROOT), (commit, old)]
            for side, tree in sides if seed % 2 else reversed(sides):
                command = [config, f"seed={seed}", *settings]
                row = {"tree": side, "seed": seed, **run(tree, command, Path(name))}
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
    report(compared(rows, commit) | {"rows": rows}, arguments)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the other tree")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="of both runs")


def extracted(commit: str, folder: Path, packages: Sequence[str] = ("areal_lab",)) -> Path:
    """Write packages of a commit to `folder`, without touching the working tree."""
    command = ["git", "archive", "--format=tar", commit, *packages]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def run(tree: Path, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """One run of the package in `tree`; raises RuntimeError with its log if it fails."""
    with TemporaryDirectory(dir=folder) as name:
        runs, log = Path(name), Path(name) / "log"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        usage = run_and_measure(
            [sys.executable, "-m", "areal_lab.cli.app", "train", *arguments, f"run_dir={runs}"],
            log_path=log,
            environment={"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"},
            working_folder=runs,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if usage.exit_code:
            raise RuntimeError(f"{tree}: exit code {usage.exit_code}\n{log.read_text()[-4000:]}")
        (summary_file,) = runs.glob("*/summary.json")
        summary = json.loads(summary_file.read_text())
        lines = (summary_file.parent / "metrics.jsonl").read_text().splitlines()
        gaps = [json.loads(line).get("sampler_gap_mean") for line in lines]
    user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return {
        "user_s": round(user_s, 2),
        "system_s": round(system_s, 2),
        "cpu_s": round(user_s + system_s, 2),
        "peak_mib": round(usage.peak_mib, 1),
        "held_out": summary["reward_after"]["mean"],
        "sampler_gap": statistics.fmean(gap for gap in gaps if gap is not None),
        "interruptions": summary["interruptions"],
    }


def compared(rows: Sequence[dict[str, Any]], commit: str) -> dict[str, Any]:
    """Ratios by pair, and the means of what is to stay the same."""
    ours = sorted((row for row in rows if row["tree"] != commit), key=lambda row: row["seed"])
    theirs = sorted((row for row in rows if row["tree"] == commit), key=lambda row: row["seed"])
    ratios = {
        name: [one[of] / other[of] for one, other in zip(ours, theirs, strict=True)]
        for name, of in (("cpu_ratio", "cpu_s"), ("memory_ratio", "peak_mib"))
    }
    figures: dict[str, Any] = {name: statistics.median(values) for name, values in ratios.items()}
    for name in ("cpu_s", "peak_mib"):
        figures[name] = statistics.median(row[name] for row in ours)
        figures[f"{name}_of_commit"] = statistics.median(row[name] for row in theirs)
    for name in ("held_out", "sampler_gap"):
        figures[name] = statistics.fmean(row[name] for row in ours)
        figures[f"{name}_of_commit"] = statistics.fmean(row[name] for row in theirs)
    return figures | {"spread": {name: spread(values) for name, values in ratios.items()}}


if __name__ == "__main__":
    main()
