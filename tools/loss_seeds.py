"""Train the example losses with several seeds, and write the file: `python -m tools.loss_seeds`.

    EXAMPLES x seeds --areal-lab train tiny--> areal_lab/runlog/data/loss_seeds.json

The numbers that the notebook about custom losses shows before anybody presses its button. 30 runs
take seven minutes on two idle cores. `--seeds 6 7` adds seeds to the file.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from areal_lab.config.load import load_config
from areal_lab.functional import decoupled_ppo, truncate
from areal_lab.host.machine import processor_name
from areal_lab.pipeline.compare_losses import LossComparison, compare_losses
from areal_lab.runlog.seeds import RECORDED, SeedResults, SeedRun, load_seed_results
from areal_lab.training.objective.typed_loss import EXAMPLES, read_loss

SEEDS = (1, 2, 3, 4, 5)
DECOUPLED = "decoupled PPO"
_CAP = 5.0  # of the weight, as `actor.behav_imp_weight_cap`


def compared(seeds: Sequence[int], overrides: Sequence[str]) -> LossComparison:
    """The runs: of the examples, and of decoupled PPO."""
    losses: dict[str, Any] = {name: read_loss(text).function for name, text in EXAMPLES.items()}
    losses[DECOUPLED] = partial(decoupled_ppo, correct=truncate(_CAP))
    return compare_losses(losses, load_config("tiny", list(overrides)), seeds=seeds)


def with_others(runs: Sequence[SeedRun], file: Path) -> tuple[SeedRun, ...]:
    """These runs and those of other seeds in the file, in the order of their seeds."""
    seeds = {run.seed for run in runs}
    recorded = load_seed_results(file).runs if file.exists() else ()
    kept = [run for run in recorded if run.seed not in seeds]
    return tuple(sorted([*kept, *runs], key=lambda run: run.seed))


def about(load: tuple[float, float, float]) -> dict[str, Any]:
    """Where and how the runs were made."""
    return {
        "made_by": "python -m tools.loss_seeds",
        "made_at": datetime.now(UTC).date().isoformat(),
        "config": "tiny",
        "losses": {**EXAMPLES, DECOUPLED: f"decoupled_ppo, weights truncated at {_CAP:g}"},
        "versions": {name: version(name) for name in ("areal_lab", "torch", "transformers")},
        "machine": f"{processor_name()}, {len(os.sched_getaffinity(0))} cores",
        "load_before_and_after": [round(load[0], 1), round(os.getloadavg()[0], 1)],
    }


def main() -> None:
    """Parse the command line, train, print the table and write the file after each seed."""
    parser = argparse.ArgumentParser(description="Train the example losses with several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=RECORDED)
    parser.add_argument("overrides", nargs="*", help="settings of the runs, as total_train_steps=2")
    arguments = parser.parse_args()
    load = os.getloadavg()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            comparison = compared([seed], [f"run_dir={folder}", *arguments.overrides])
            for step in comparison:
                if step.report.step == step.report.total_steps:
                    print(f"seed {seed}, {step.loss}: {step.report.reward_mean:.3f}", flush=True)
        runs = with_others(comparison.results.runs, arguments.out)
        SeedResults(runs, about(load)).save(arguments.out)
    for name, reward in load_seed_results(arguments.out).final_rewards().items():
        print(f"{name:>20}  held-out reward {reward.mean:.3f} ± {reward.ci95 or 0:.3f}")


if __name__ == "__main__":
    main()
