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

python -m benchmarks.async_vs_sync --json [--lengths all] [--steps 16]
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

MEAN_TOKENS: Final = 93
LENGTHS: Final[Mapping[str, tuple[float, int]]] = {"math": (0.684, 276), "all": (0.970, 2000)}
"""Standard deviation of ln(response length) before the cut, and the tokens of the cut."""
CORES: Final = 2
ETA: Final = 4


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


def configuration(workload: Workload, folder: Path, *, asynchronous: bool) -> TrainConfig:
    """One variant; they differ only in schedule and threads."""
    threads = 1 if asynchronous else CORES
    return load_config(
        None,
        [
            f"actor.path={workload.model}",
            f"run_dir={folder}",
            f"total_train_steps={workload.steps}",
            f"dataset.batch_size={workload.groups}",
            f"gconfig.n_samples={workload.samples}",
            f"gconfig.max_new_tokens={workload.cap_tokens}",
            f"rollout.schedule={'asynchronous' if asynchronous else 'synchronous'}",
            f"eta={ETA if asynchronous else 0}",
            f"rollout.threads={threads}",
            f"actor.threads={threads}",
            "actor.optimizer.lr=1e-6",
            "evaluation.max_problems=0",
            "plots=false",
        ],
    )


def measure(workload: Workload, folder: Path, *, asynchronous: bool) -> dict[str, Any]:
    """Run one variant once and measure it from the first group's start to the last step's end."""
    config = configuration(workload, folder, asynchronous=asynchronous)
    result = asyncio.run(
        run(
            resolve(config, reward_fn=digits_share),
            on_step=lambda report: print(
                f"  {'async' if asynchronous else 'sync'} step {report.step}/{report.total_steps} "
                f"{report.step_s:.1f} s",
                file=sys.stderr,
                flush=True,
            ),
            display=Silent(),
            stop=StopSignal(),
            response_tokens=workload.answer_tokens,
        )
    )
    return figures(result, asynchronous=asynchronous)


def figures(result: RunResult, *, asynchronous: bool) -> dict[str, Any]:
    """The figures of one run, from its summary and log."""
    summary = result.summary
    batches = list(trained_batches(read_log_file(result.folder / "events.jsonl")))
    return {
        "variant": "asynchronous" if asynchronous else "synchronous",
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


def main() -> None:
    """Run both variants in turn and compare their medians."""
    arguments = harness.parse(__doc__, repeats=2, quick_repeats=1, add_own=_own_arguments)
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as name:
        folder = Path(name)
        workload = Workload(
            model="SmolLM2-135M-Instruct",
            steps=arguments.own.steps,
            groups=4,
            samples=4,
            lengths=arguments.own.lengths,
        )
        if arguments.quick:
            write_tiny_model(folder / "model")
            workload = Workload(model=str(folder / "model"), steps=3, groups=2, samples=2, shrink=8)
        runs: list[dict[str, Any]] = []
        for _ in range(arguments.repeats):
            for asynchronous in (False, True):
                runs.append(measure(workload, folder / "runs", asynchronous=asynchronous))
    harness.report(compare(runs), arguments)


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", choices=list(LENGTHS), default="math", help="of responses (default math)"
    )
    parser.add_argument(
        "--steps", type=int, default=8, metavar="N", help="training steps of a run (default 8)"
    )


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repeats, the ratio of each pair, and the time by state."""
    by_variant = {
        variant: [one for one in runs if one["variant"] == variant]
        for variant in ("synchronous", "asynchronous")
    }
    sync_s, async_s = (
        [one["training_s"] for one in by_variant[variant]]
        for variant in ("synchronous", "asynchronous")
    )
    ratios = [before / after for before, after in zip(sync_s, async_s, strict=True)]
    rows = [
        {
            "variant": variant,
            "training_s": statistics.median(one["training_s"] for one in chosen),
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
            "synchronous_s": harness.spread(sync_s),
            "asynchronous_s": harness.spread(async_s),
        },
        "runs": runs,
    }


if __name__ == "__main__":
    main()
