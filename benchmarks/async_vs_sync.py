"""Asynchronous against synchronous training on the same cores, with long-tailed responses.

    synchronous    both cores generate, then both cores train, ...
    asynchronous   one core generates while the other trains; new weights interrupt

Same model, prompts, seeds, response lengths and number of trained samples; fill and drain included.
Response lengths are log-normal, as DeepSeek-R1's requests in the ServeGen traces, with a mean of 93
tokens:

math   one client with requests like those of RL on mathematics (sigma 0.684), cut off at 276, as in
       the paper, where both numbers are a hundred times larger (arXiv:2505.24298: 9,277 and 27,648)
all    all clients (sigma 0.970), cut off at 21.5 times the mean, as the longest in the traces is

The gain is bounded: asynchrony saves the time in which a phase cannot use both cores (the tail of
generation, where few responses are left) and costs interruptions; it can never be faster than a
trainer that is always busy.

--slots compares two asynchronous runs instead: places that a group frees when it ends, and places
that each response frees (`rollout.slots`), with responses of a third of these lengths. The
simulator, fitted to each run with groups, predicts the gain with the lengths of the runs; its
interval has one simulated run for each of 20 seeds and each fit, with lengths that are drawn.

python -m benchmarks.async_vs_sync --json [--lengths all] [--steps 16] [--slots]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.pipeline.run import RunResult, run
from areal_lab.resolve.resolved import resolve
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.lags import total, trained_batches
from areal_lab.shell.display import Silent
from areal_lab.shell.stop import StopSignal
from benchmarks import harness
from benchmarks.tiny_model import write_tiny_model
from simulator.assembly.simulate import replicate
from simulator.calibrate.fit_run import calibrate_from
from simulator.calibrate.length_source import LEAST_STEPS
from simulator.calibrate.replay import replay
from simulator.calibrate.report import configuration as configuration_of

MEAN_TOKENS: Final = 93
LENGTHS: Final[Mapping[str, tuple[float, int]]] = {"math": (0.684, 276), "all": (0.970, 2000)}
"""Standard deviation of ln(response length) before the cut, and the tokens of the cut."""
CORES: Final = 2
ETA: Final = 4
_SEEDS: Final = 20
Variant = Mapping[str, Any]
"""Settings in which two runs differ."""
SCHEDULES: Final[Mapping[str, Variant]] = {
    "synchronous": {
        "rollout.schedule": "synchronous",
        "eta": 0,
        "rollout.threads": CORES,
        "actor.threads": CORES,
    },
    "asynchronous": {
        "rollout.schedule": "asynchronous",
        "eta": ETA,
        "rollout.threads": 1,
        "actor.threads": 1,
    },
}
SLOTS: Final[Mapping[str, Variant]] = {
    # Two groups at once, and far more within the bound on age: places are what is scarce.
    name: {
        **SCHEDULES["asynchronous"],
        "rollout.max_concurrent_rollouts": 2,
        "rollout.slots": name,
    }
    for name in ("groups", "samples")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Settings of both variants."""

    model: str
    steps: int
    groups: int
    samples: int
    lengths: str = "math"
    """Of `LENGTHS`."""
    shrink: int = 1
    """Factor by which responses are shorter."""

    @property
    def cap_tokens(self) -> int:
        """Length of the longest response that there may be."""
        return LENGTHS[self.lengths][1] // self.shrink

    def answer_tokens(self, group: int, sample: int) -> int:
        """Length of one response, the same in both variants and all repeats."""
        draw = random.Random(f"{group}/{sample}")
        sigma, cap = LENGTHS[self.lengths]
        # exp(mu + sigma^2 / 2) is the mean before the cut, which lowers it by at most 2 %.
        mu = math.log(1.02 * MEAN_TOKENS) - sigma**2 / 2
        tokens = min(draw.lognormvariate(mu, sigma), cap)
        return max(1, round(tokens / self.shrink))


def digits_share(completion: str, example: Mapping[str, Any]) -> float:
    """A reward that differs within a group, so that all samples are trained on."""
    del example
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


def configuration(workload: Workload, folder: Path, variant: Variant) -> TrainConfig:
    """One variant; they differ only in its settings."""
    return load_config(
        None,
        [
            f"actor.path={workload.model}",
            f"run_dir={folder}",
            f"total_train_steps={workload.steps}",
            f"dataset.batch_size={workload.groups}",
            f"gconfig.n_samples={workload.samples}",
            f"gconfig.max_new_tokens={workload.cap_tokens}",
            *(f"{name}={value}" for name, value in variant.items()),
            "actor.optimizer.lr=1e-6",
            "evaluation.max_problems=0",
            "plots=false",
        ],
    )


def perform(workload: Workload, folder: Path, name: str, variant: Variant) -> RunResult:
    """Run one variant once."""
    return asyncio.run(
        run(
            resolve(configuration(workload, folder, variant), reward_fn=digits_share),
            on_step=lambda report: print(
                f"  {name} step {report.step}/{report.total_steps} {report.step_s:.1f} s",
                file=sys.stderr,
                flush=True,
            ),
            display=Silent(),
            stop=StopSignal(),
            response_tokens=workload.answer_tokens,
        )
    )


def figures(result: RunResult, name: str) -> dict[str, Any]:
    """The figures of one run, from its summary and log.

    Seconds are those from the first group's start to the last step's end.
    """
    summary = result.summary
    batches = list(trained_batches(read_log_file(result.folder / "events.jsonl")))
    return {
        "variant": name,
        "training_s": summary["training_s"],
        "tokens_per_s": summary["tokens_per_s"],
        "trained_samples": summary["trained_samples"],
        "trained_tokens": summary["trained_tokens"],
        "interruptions": summary["interruptions"],
        "multi_version_share": summary["multi_version_share"],
        "processes": summary["processes"],
        "token_lags": dict(sorted(total(batch.token_lags for batch in batches).items())),
        "head_lags": dict(sorted(total(batch.head_lags for batch in batches).items())),
    }


def predict(folder: Path) -> dict[str, Any]:
    """What slots by sample gain, simulated with the costs and lengths of a run with groups.

    Args:
        folder: of the run.
    """
    fit = calibrate_from(folder)
    config = configuration_of(fit)
    assert fit.run is not None, "calibrated from a run"
    total_s, seeds = {}, {}
    for name in SLOTS:
        own = config.with_settings({"schedule.slots": name, "seeds": _SEEDS})
        replayed = replay(own, fit.run, own=["schedule.slots"], name=name)
        total_s[name] = sum(replayed.predicted_steps_s)
        seeds[name] = replicate(own, processes=1)
    return {
        "ratio": total_s["groups"] / total_s["samples"],
        "seeds": seeds["groups"].ratios(seeds["samples"], lambda result: result.makespan_s),
    }


def main() -> None:
    """Run both variants in turn and compare their medians."""
    arguments = harness.parse(__doc__, repeats=2, quick_repeats=1, add_own=_own_arguments)
    slots = arguments.own.slots
    variants = SLOTS if slots else SCHEDULES
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as name:
        folder = Path(name)
        workload = Workload(
            model="SmolLM2-135M-Instruct",
            steps=arguments.own.steps,
            groups=4,
            samples=4,
            lengths=arguments.own.lengths,
            shrink=3 if slots else 1,
        )
        if arguments.quick:
            write_tiny_model(folder / "model")
            workload = Workload(
                model=str(folder / "model"),
                steps=LEAST_STEPS if slots else 3,
                groups=2,
                samples=2,
                shrink=8,
            )
        runs: list[dict[str, Any]] = []
        predictions: list[dict[str, Any]] = []
        for _ in range(arguments.repeats):
            for variant, settings in variants.items():
                result = perform(workload, folder / "runs", variant, settings)
                runs.append(figures(result, variant))
                if variant == "groups":
                    predictions.append(predict(result.folder))
    found = compare(runs, list(variants))
    if predictions:
        found |= predicted(predictions)
    harness.report(found, arguments)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", choices=list(LENGTHS), default="math", help="of responses (default math)"
    )
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="training steps of a run (default 8)"
    )
    parser.add_argument(
        "--slots", action="store_true", help="compare rollout.slots of two asynchronous runs"
    )


def predicted(predictions: list[dict[str, Any]]) -> dict[str, Any]:
    """The gain with the lengths of the runs, and 90 % of the gains with drawn lengths."""
    ratios = sorted(ratio for one in predictions for ratio in one["seeds"])
    cut = len(ratios) // 20
    return {
        "predicted_ratio": statistics.median(one["ratio"] for one in predictions),
        "predicted_low": ratios[cut],
        "predicted_high": ratios[-1 - cut],
    }


def compare(runs: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Medians over repeats, the ratio of each pair, and the time by state.

    Args:
        runs: of both variants, in turns.
        names: of the variants; the ratio is the time of the first over that of the second.
    """
    by_variant = {name: [one for one in runs if one["variant"] == name] for name in names}
    seconds = {name: [one["training_s"] for one in own] for name, own in by_variant.items()}
    ratios = [before / after for before, after in zip(*seconds.values(), strict=True)]
    rows = [
        {
            "variant": variant,
            "training_s": statistics.median(seconds[variant]),
            "tokens_per_s": statistics.median(one["tokens_per_s"] for one in chosen),
            **{
                f"{process} idle": statistics.median(
                    one["processes"][process]["idle_share"] for one in chosen
                )
                for process in ("trainer", "engine 0")
            },
            "interruptions": statistics.median(one["interruptions"] for one in chosen),
        }
        for variant, chosen in by_variant.items()
    ]
    return {
        "ratio": statistics.median(ratios),
        "rows": rows,
        "trained_samples": runs[0]["trained_samples"],
        "trained_tokens": runs[0]["trained_tokens"],
        "spread": {
            "ratio": harness.spread(ratios),
            **{f"{name}_s": harness.spread(own) for name, own in seconds.items()},
        },
        "runs": runs,
    }


if __name__ == "__main__":
    main()
