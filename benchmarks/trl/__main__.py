"""areal_lab against TRL's `GRPOTrainer` on the same task: seconds to the same reward, and memory.

    configs/arithmetic.yaml --> problems in training order --> JSONL --.
            |                                                          |
            v                                                          v
      areal-lab train (asynchronous, one core each phase)    baseline (both cores, tuned)
            '---------------- repeats take turns, seeds 1, 2, ... ----'

Equal: model, problems and their order, held-out problems, reward, group size, batch, learning rate
at each step, clipping, AdamW, number of steps. TRL computes in float32 or bfloat16, whichever is
faster on this machine, and gets the same allocator settings as areal_lab.

`ratio` is TRL's over areal_lab's wall seconds until the mean training reward of three steps in
a row passes the target, counted from the start of training. `ratio_from_process_start` counts from
the start of the process, including loading and the first evaluation.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.models.locate import resolve_model_path
from benchmarks.harness import parse, report, spread
from benchmarks.tiny_model import write_tiny_model
from benchmarks.trl import environment
from benchmarks.trl.sides import Side, TookTooLong, run_areal_lab, run_trl

CONFIG = environment.ROOT / "configs" / "arithmetic.yaml"
TARGET = 0.85
STEPS = 24
PROBE_STEPS = 2
RATIOS = {
    "ratio": "wall_s",
    "ratio_from_process_start": "wall_from_process_start_s",
    "cpu_ratio": "cpu_s",
    "step_s_ratio": "step_s",
    "peak_mib_ratio": "peak_mib",
}
"""TRL's figure over ours, by name; above 1 means that we need less."""


def measure(repeats: int) -> dict[str, Any]:
    """Both sides in turns, with seeds 1, 2, ...; the order alternates."""
    environment.make()
    cores = len(os.sched_getaffinity(0))
    with TemporaryDirectory(prefix="demo_vs_trl-") as name:
        folder = Path(name)
        resolve_model_path(load_config(CONFIG).actor.path)  # convert it before anything is timed
        _say(f"TRL for {PROBE_STEPS} steps in float32 and in bfloat16: which is faster here?")
        dtype, probe = faster_dtype(load_config(CONFIG), _new(folder / "probe"), cores=cores)
        ours: list[Side] = []
        theirs: list[Side] = []
        for seed in range(1, repeats + 1):
            overrides = [f"seed={seed}", f"total_train_steps={STEPS}"]
            for side in ("areal_lab", "trl")[:: 1 if seed % 2 else -1]:
                _say(f"repeat {seed} of {repeats}: {side}, {STEPS} steps")
                here = _new(folder / f"{side}-{seed}")
                if side == "trl":
                    theirs.append(run_trl(load_config(CONFIG, overrides), dtype, here, cores=cores))
                else:
                    ours.append(run_areal_lab(CONFIG, overrides, here))
    our_figures = [side.figures(TARGET) for side in ours]
    their_figures = [side.figures(TARGET) for side in theirs]
    return {
        **compare(our_figures, their_figures),
        "target": TARGET,
        "trl_dtype": f"{dtype}, the faster of fp32 and bf16 on this machine",
        "trl_dtype_probe": probe,
        "rows": _rows(our_figures, their_figures),
        "rewards": {"areal_lab": [s.rewards for s in ours], "trl": [s.rewards for s in theirs]},
    }


def measure_quickly() -> dict[str, Any]:
    """Three steps of a random model on both sides at the same time, to test that they run."""
    cores = len(os.sched_getaffinity(0))
    with TemporaryDirectory(prefix="demo_vs_trl-") as name:
        folder = Path(name)
        write_tiny_model(folder / "model")
        overrides = [
            f"actor.path={folder / 'model'}",
            "total_train_steps=3",
            "evaluation.max_problems=8",
            "evaluation.samples_per_problem=1",
        ]
        theirs: list[dict[str, Any]] = []
        with ThreadPoolExecutor() as threads:
            our_run = threads.submit(run_areal_lab, CONFIG, overrides, _new(folder / "areal_lab"))
            if environment.is_ready():
                here, config = _new(folder / "trl"), load_config(CONFIG, overrides)
                theirs = [run_trl(config, "fp32", here, cores=cores).figures(TARGET)]
            ours = [our_run.result().figures(TARGET)]
    note = "quick: a random model, three steps, both sides at the same time; nothing to be quoted"
    if not theirs:
        note += "; TRL left out, a run without --quick makes its environment"
    figures = compare(ours, theirs) if theirs else {"ratio": None}
    return {**figures, "note": note, "repeats": 1, "rows": _rows(ours, theirs)}


def faster_dtype(config: TrainConfig, folder: Path, *, cores: int) -> tuple[str, dict[str, Any]]:
    """The faster type for TRL on this machine: two steps in float32, then in bfloat16.

    The second is ended once it has taken half as long again as the first.
    """
    config.total_train_steps, config.evaluation.max_problems = PROBE_STEPS, 0
    (folder / "fp32").mkdir()
    fp32 = run_trl(config, "fp32", folder / "fp32", cores=cores)
    limit_s = 1.5 * (fp32.usage.ended_s - fp32.usage.started_s)
    seconds: dict[str, Any] = {"fp32_step_s": fp32.step_s}
    (folder / "bf16").mkdir()
    try:
        bf16 = run_trl(config, "bf16", folder / "bf16", cores=cores, limit_s=limit_s)
    except TookTooLong:
        return "fp32", {**seconds, "bf16_step_s": None, "bf16_ended_after_s": limit_s}
    return (
        "bf16" if bf16.step_s < fp32.step_s else "fp32",
        {**seconds, "bf16_step_s": bf16.step_s, "bf16_ended_after_s": None},
    )


def compare(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median over the repeats of TRL's figure over ours, pair by pair; None without a pair."""
    result: dict[str, Any] = {}
    spreads: dict[str, Any] = {}
    for name, figure in RATIOS.items():
        pairs = [(our[figure], their[figure]) for our, their in zip(ours, theirs, strict=True)]
        ratios = [their / our for our, their in pairs if our is not None and their is not None]
        spreads[name] = {**spread(ratios), "pairs": len(ratios)} if ratios else None
        result[name] = statistics.median(ratios) if ratios else None
    peaks = [[run["peak_mib"] for run in runs] for runs in (ours, theirs)]
    return {
        **result,
        "peak_mib": max(peaks[0]),
        "trl_peak_mib": max(peaks[1]),
        "spread": spreads,
    }


def _rows(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    named = [("areal_lab", run) for run in ours] + [("trl", run) for run in theirs]
    return [{"side": side, **run} for side, run in named]


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1)
    report(measure_quickly() if arguments.quick else measure(arguments.repeats), arguments)


if __name__ == "__main__":
    main()
