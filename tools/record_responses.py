"""Record the two small runs that the trajectory viewer opens: haiku by SmolLM2-135M-Instruct.

    the same prompts, seeds and settings; eta is 0 in one run, 4 in the other

    python -m tools.record_responses               both, into notebooks/data (13 CPU minutes)
    python -m tools.record_responses --eta 4 --into DIR --steps 3

A haiku has three lines, short ones, and names its subject: a reward that differs between the
samples of a group. Each run keeps its log, metrics, settings, summary and trajectories, compressed,
and recording.json: the command, the date, the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.host.machine import processor_name

INTO: Final = Path(__file__).parents[1] / "notebooks" / "data"
ETAS: Final = (0, 4)
STEPS: Final = 20
MODEL: Final = "SmolLM2-135M-Instruct"
MOST_WORDS: Final = 7
"""Of a short line."""
_KEPT: Final = ("events.jsonl", "metrics.jsonl")
_PROMPT: Final = "<|im_start|>user\nWrite a haiku about {}.<|im_end|>\n<|im_start|>assistant\n"
_SUBJECTS: Final = (
    *("rain", "a cat", "the sea", "snow", "a lighthouse", "coffee", "the moon", "a train"),
    *("spring", "a bee", "bread", "a river", "the night", "an old dog", "tea", "the wind"),
    *("a garden", "a bridge", "winter", "a violin", "the sun", "a snail", "fog", "a letter"),
)


def haiku_problems() -> ProblemSet:
    """One problem per subject; none is needed for evaluation, but a set must hold one out."""
    problems = [
        Problem(prompt=_PROMPT.format(subject), answer=subject.split()[-1], key=subject)
        for subject in _SUBJECTS
    ]
    return ProblemSet(train=tuple(problems[:-1]), held_out=tuple(problems[-1:]))


def haiku_reward(completion: str, example: Mapping[str, Any]) -> dict[str, float]:
    """Three parts, each from 0 to 1: three lines, short lines, the subject is named."""
    lines = [line.split() for line in completion.strip().split("\n") if line.strip()]
    short = [1 <= len(words) <= MOST_WORDS for words in lines]
    return {
        "three_lines": float(len(lines) == 3),
        "short_lines": sum(short) / max(1, len(short)),
        "on_subject": float(str(example["answer"]) in completion.lower()),
    }


def record(eta: float, into: Path, *, steps: int = STEPS, command: str = "") -> None:
    """Run once, and keep what the viewer reads in `into`; replaces an existing folder."""
    with tempfile.TemporaryDirectory(prefix="responses-") as runs:
        _keep(_run(eta, Path(runs), steps), into, command)


def overrides(eta: float, steps: int = STEPS) -> list[str]:
    """The settings of a run."""
    return [
        f"experiment_name=haiku-eta{eta:g}",
        f"actor.path={MODEL}",
        f"total_train_steps={steps}",
        f"eta={eta:g}",
        "token_fields=true",
        # Small batches and long responses: weights change while a response is generated.
        "dataset.batch_size=2",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=96",
        "gconfig.stop=[<|im_end|>]",
        "rollout.max_concurrent_rollouts=8",
        # The same in both runs, whatever the schedule would take.
        "rollout.threads=1",
        "actor.threads=1",
        # One type on both sides: a fresh token then has the weight 1.
        "rollout.dtype=float32",
        "actor.dtype=float32",
        # With one minibatch, pi_theta would be pi_prox and every ratio 1.
        "actor.ppo_n_minibatches=2",
        "actor.optimizer.lr=2e-5",
        "actor.optimizer.warmup_steps=2",
        "evaluation.max_problems=0",
        "plots=false",
    ]


def _run(eta: float, runs: Path, steps: int) -> Path:
    # torch and transformers come with these.
    from areal_lab.config.load import load_config
    from areal_lab.pipeline.run import run
    from areal_lab.resolve.resolved import resolve
    from areal_lab.shell.display import Silent
    from areal_lab.shell.stop import StopSignal

    config = load_config(None, [*overrides(eta, steps), f"run_dir={runs}"])
    result = asyncio.run(
        run(
            resolve(config, haiku_problems(), reward_fn=haiku_reward),
            on_step=lambda report: print(
                f"  eta {eta:g} step {report.step}/{report.total_steps} {report.step_s:.1f} s, "
                f"reward {report.reward_mean:.2f}",
                file=sys.stderr,
                flush=True,
            ),
            display=Silent(),
            stop=StopSignal(),
        )
    )
    return result.folder


def _keep(run: Path, into: Path, command: str) -> None:
    """Keep the files that a reader of runs reads, compressed, without paths of this machine."""
    shutil.rmtree(into, ignore_errors=True)
    (into / "trajectories").mkdir(parents=True)
    for file in [run / name for name in _KEPT]:
        _compress(file, into)
    for file in sorted((run / "trajectories").iterdir()):
        if file.suffix == ".npz":
            shutil.copy(file, into / "trajectories")
        else:
            _compress(file, into / "trajectories")
    shutil.copy(run / "summary.json", into)
    config = yaml.safe_load((run / "config.yaml").read_text())
    del config["run_dir"]
    (into / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    circumstances = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
    }
    (into / "recording.json").write_text(json.dumps(circumstances, indent=2) + "\n")


def _compress(file: Path, into: Path) -> None:
    with gzip.GzipFile(into / f"{file.name}.gz", "wb", mtime=0) as compressed:
        compressed.write(file.read_bytes())


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--eta", type=float, action="append", help="default: 0 and 4")
    parser.add_argument("--into", type=Path, default=INTO, help="default: notebooks/data")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    chosen = parser.parse_args(argv)
    # Where it was written to does not matter to those who read it.
    given = [*(f"--eta={eta:g}" for eta in chosen.eta or ())]
    given += [f"--steps={chosen.steps}"] if chosen.steps != STEPS else []
    command = " ".join(["python", "-m", "tools.record_responses", *given])
    for eta in chosen.eta or ETAS:
        folder = chosen.into / f"haiku-eta{eta:g}"
        record(eta, folder, steps=chosen.steps, command=command)
        print(folder)


if __name__ == "__main__":
    main()
