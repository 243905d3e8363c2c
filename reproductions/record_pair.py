"""Record a synchronous and an asynchronous run of `areal-lab train` to calibrate on and to predict.

    the same model, prompts, answer lengths, limits and threads; only the schedule differs

One thread for the engine and one for the trainer in both schedules, so that what a step costs is
the same in both but for what the two processes take from each other: memory bandwidth, and cores
if other processes run. How much those took is recorded beside the logs.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_lab.processor import processor_name

SIGMA = 0.684
"""Of the log of answer lengths: DeepSeek-R1, short prompts and long answers (ServeGen traces)."""
MEAN_TOKENS, CAP_TOKENS = 14, 42
"""A six-hundredth of the paper's, so that a run takes a minute."""
ETA = 2
KINDS = ("synchronous", "asynchronous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What both runs do."""

    model: str
    steps: int = 9


def answer_tokens(group: int, sample: int) -> int:
    """Length of one answer, the same in both runs."""
    draw = random.Random(f"{group}/{sample}")
    # exp(mu + sigma^2 / 2) is the mean before the cap, which takes some 2 % off.
    mu = math.log(1.02 * MEAN_TOKENS) - SIGMA**2 / 2
    return max(1, round(min(draw.lognormvariate(mu, SIGMA), CAP_TOKENS)))


def digits_share(completion: str, example: Mapping[str, Any]) -> float:
    """A reward in which samples of a group differ, so that all of them are trained on."""
    del example
    return sum(map(str.isdigit, completion)) / max(1, len(completion)) + len(completion) / 1e4


def record_pair(pair: Pair, into: Path) -> None:
    """Run both schedules, and keep of each what a calibration reads; what was there is replaced.

    Args:
        pair: what to run.
        into: gets a folder for each schedule.
    """
    with tempfile.TemporaryDirectory(prefix="recorded-pair-") as runs:
        for kind in KINDS:
            begun_s, before = time.time(), _processor_seconds()
            folder = _run(pair, kind, Path(runs))
            everything_s, own_s = (
                after - was for after, was in zip(_processor_seconds(), before, strict=True)
            )
            share = max(0.0, everything_s - own_s) / (
                (os.cpu_count() or 1) * (time.time() - begun_s)
            )
            _keep(folder, into / kind, others=share)


def _run(pair: Pair, kind: str, runs: Path) -> Path:
    # torch and transformers come with these.
    from areal_lab.load import load_config
    from areal_lab.pipeline.progress import Silent
    from areal_lab.pipeline.run import prepare, run
    from areal_lab.pipeline.state import StopSignal

    config = load_config(
        None,
        [
            f"experiment_name={kind}",
            f"actor.path={pair.model}",
            f"run_dir={runs}",
            f"total_train_steps={pair.steps}",
            "dataset.batch_size=4",
            "dataset.few_shot=0",
            "gconfig.n_samples=2",
            f"gconfig.max_new_tokens={CAP_TOKENS}",
            f"rollout.schedule={kind}",
            f"eta={ETA if kind == 'asynchronous' else 0}",
            "rollout.max_concurrent_rollouts=2",
            "rollout.threads=1",
            "actor.threads=1",
            "actor.optimizer.lr=1e-6",
            "evaluation.max_problems=0",
            "plots=false",
        ],
    )
    result = asyncio.run(
        run(
            config,
            prepare(config),
            on_step=lambda report: print(
                f"  {kind} step {report.step}/{report.total_steps} {report.step_s:.1f} s",
                file=sys.stderr,
                flush=True,
            ),
            display=Silent(),
            stop=StopSignal(),
            reward_fn=digits_share,
            answer_tokens=answer_tokens,
        )
    )
    return result.folder


def _keep(run: Path, into: Path, *, others: float) -> None:
    """The log, compressed, the settings without paths of this machine, and the circumstances.

    `others` is the share of all cores' time that other processes took meanwhile.
    """
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    with gzip.GzipFile(into / "events.jsonl.gz", "wb", mtime=0) as file:
        file.write((run / "events.jsonl").read_bytes())
    lines = (run / "config.yaml").read_text().splitlines(keepends=True)
    (into / "config.yaml").write_text(
        "".join(one for one in lines if not one.startswith("run_dir"))
    )
    circumstances = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "others": f"{others:.1%}",
    }
    (into / "recording.json").write_text(json.dumps(circumstances, indent=2) + "\n")


def _processor_seconds() -> tuple[float, float]:
    """Of all cores, and of this process with its children that have ended."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _waiting, *rest = map(int, file.readline().split()[1:])
    everything = (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")
    own = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        own += usage.ru_utime + usage.ru_stime
    return everything, own
