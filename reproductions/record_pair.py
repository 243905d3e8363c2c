"""Record a synchronous and an asynchronous run of `areal-lab train`, to calibrate and to predict.

    the same model, prompts, response lengths, limits and threads; only the schedule differs

    python -m reproductions.record_pair                         both, into reproductions/recorded
    python -m reproductions.record_pair synchronous --into DIR  one of them, elsewhere

Each run takes two minutes on two cores, which nothing else should use. Engine and trainer have one
thread each in both schedules, so that a step costs the same in both, except for resources that both
processes share: memory bandwidth, and cores if other processes run. Each run leaves
events.jsonl.gz, config.yaml, and recording.json: command, commit, date, machine, and the share of
the cores' time that other processes took meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_lab.host.machine import processor_name
from simulator.calibrate.length_source import LEAST_STEPS

SIGMA = 0.684
"""Spread of ln(tokens): DeepSeek-R1, short prompts and long responses (ServeGen traces)."""
MEAN_TOKENS, CAP_TOKENS = 14, 42
"""1/600 of the paper's, so that a run takes a minute."""
ETA = 2
KINDS = ("synchronous", "asynchronous")
RECORDED = Path(__file__).parent / "recorded"
MODEL, STEPS = "SmolLM2-135M-Instruct", 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Settings of both runs."""

    model: str = MODEL
    steps: int = STEPS


def answer_tokens(group: int, sample: int) -> int:
    """Length of one response, the same in both runs."""
    draw = random.Random(f"{group}/{sample}")
    # exp(mu + sigma^2 / 2) is the mean before the cap, which takes some 2 % off.
    mu = math.log(1.02 * MEAN_TOKENS) - SIGMA**2 / 2
    return max(1, round(min(draw.lognormvariate(mu, SIGMA), CAP_TOKENS)))


def digits_share(completion: str, example: Mapping[str, Any]) -> float:
    """A reward that differs between the samples of a group, so that all are trained on."""
    del example
    return sum(map(str.isdigit, completion)) / max(1, len(completion)) + len(completion) / 1e4


def record_pair(pair: Pair, into: Path, *, kinds: Sequence[str] = KINDS, command: str = "") -> None:
    """Run both schedules, and keep the files that a calibration reads; replaces existing ones.

    Args:
        pair: what to run.
        into: folder for one folder per schedule.
        kinds: schedules to run.
        command: command line, for the record.
    """
    with tempfile.TemporaryDirectory(prefix="recorded-pair-") as runs:
        for kind in kinds:
            start_s, before = time.time(), _processor_seconds()
            folder = _run(pair, kind, Path(runs))
            everything_s, own_s = (
                after - was for after, was in zip(_processor_seconds(), before, strict=True)
            )
            share = max(0.0, everything_s - own_s) / (
                (os.cpu_count() or 1) * (time.time() - start_s)
            )
            _keep(folder, into / kind, others=share, command=command)


def _run(pair: Pair, kind: str, runs: Path) -> Path:
    # torch and transformers come with these.
    from areal_lab.config.load import load_config
    from areal_lab.pipeline.run import run
    from areal_lab.resolve.resolved import resolve
    from areal_lab.shell.display import Silent
    from areal_lab.shell.stop import StopSignal

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
            resolve(config, reward_fn=digits_share),
            on_step=lambda report: print(
                f"  {kind} step {report.step}/{report.total_steps} {report.step_s:.1f} s",
                file=sys.stderr,
                flush=True,
            ),
            display=Silent(),
            stop=StopSignal(),
            response_tokens=answer_tokens,
        )
    )
    return result.folder


def _keep(run: Path, into: Path, *, others: float, command: str) -> None:
    """Keep the compressed log, the settings without paths of this machine, and the circumstances.

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
        "command": command,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "others": round(others, 4),
    }
    (into / "recording.json").write_text(json.dumps(circumstances, indent=2) + "\n")


def _processor_seconds() -> tuple[float, float]:
    """CPU seconds of all cores, and of this process with its ended children."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _waiting, *rest = map(int, file.readline().split()[1:])
    everything = (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")
    own = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        own += usage.ru_utime + usage.ru_stime
    return everything, own


def _commit() -> str:
    """Commit of the source, with a + if it was changed since; empty outside a git repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    here = [git, "-C", str(Path(__file__).parent)]
    # Recordings do not count as changes of the source.
    changed = [*here, "status", "--porcelain", "--untracked-files=no", "--", ":/*.py"]
    found = [
        subprocess.run(words, capture_output=True, text=True, check=False)
        for words in ([*here, "rev-parse", "--short=12", "HEAD"], changed)
    ]
    if found[0].returncode:
        return ""
    return found[0].stdout.strip() + ("+" if found[1].stdout.strip() else "")


def run_command(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="SCHEDULE", help=f"{' or '.join(KINDS)}; both")
    parser.add_argument("--into", type=Path, default=RECORDED, help="default: the shipped pair")
    parser.add_argument("--model", default=MODEL, help=f"default {MODEL}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = parser.parse_args(words)
    for kind in chosen.kinds:
        if kind not in KINDS:
            parser.error(f"no schedule {kind!r}; one of {', '.join(KINDS)}, or none for both")
    if chosen.steps <= LEAST_STEPS:
        parser.error(
            f"--steps is {chosen.steps}, but must be at least {LEAST_STEPS + 1}: a calibration "
            f"needs {LEAST_STEPS}, and the intervals exclude each step in turn"
        )
    record_pair(
        Pair(model=chosen.model, steps=chosen.steps),
        chosen.into,
        kinds=chosen.kinds or KINDS,
        command=shlex.join(["python", "-m", "reproductions.record_pair", *words]),
    )
    print(chosen.into)


if __name__ == "__main__":
    run_command()
