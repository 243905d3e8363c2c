"""The two sides of `benchmarks.trl`: each runs one training in its own processes.

areal-lab train  --> events.jsonl, metrics.jsonl, summary.json --.
baseline         --> progress.jsonl -----------------------------+--> Side
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import RunStarted, TrainStepDone
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.data.sources import load_problems
from areal_lab.host.processes import MEMORY_FOR_TRAINING
from areal_lab.models.locate import resolve_model_path
from areal_lab.runlog.file import read_log_file
from areal_lab.training.settings import lr_factor
from benchmarks.process_usage import Usage, run_and_measure
from benchmarks.trl import environment

IN_A_ROW = 3
"""Consecutive steps whose mean reward must pass the target."""
MICRO_BATCH = 16
"""Sequences of one forward pass in TRL: 64 is no faster and needs nearly twice the memory."""


class TookTooLong(RuntimeError):
    """A run reached its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run of one side."""

    began_s: float
    """Start of training, in seconds since the epoch; step times count from here."""
    step_ends_s: tuple[float, ...]
    rewards: tuple[float, ...]
    """Mean training reward of each step."""
    held_out: dict[str, float]
    """Mean reward before and after, and the number of samples."""
    usage: Usage

    @property
    def step_s(self) -> float:
        """Median seconds from the end of one step to the end of the next."""
        ends = (0.0, *self.step_ends_s)
        return statistics.median(after - before for before, after in pairwise(ends))

    def steps_to(self, target: float) -> int | None:
        """The first step at which the last `IN_A_ROW` rewards have a mean above the target."""
        for step in range(IN_A_ROW, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[step - IN_A_ROW : step]) > target:
                return step
        return None

    def figures(self, target: float) -> dict[str, Any]:
        """Figures of the run; None if the target was not reached."""
        steps = self.steps_to(target)
        seconds = None if steps is None else self.step_ends_s[steps - 1]
        end_s = None if seconds is None else self.began_s + seconds
        cpu_before = self.usage.cpu_at(self.began_s)
        return {
            "steps_to_target": steps,
            "wall_s": seconds,
            "wall_from_process_start_s": None if end_s is None else end_s - self.usage.started_s,
            "cpu_s": None if end_s is None else self.usage.cpu_at(end_s) - cpu_before,
            "step_s": self.step_s,
            "peak_mib": self.usage.peak_mib,
            "steps": len(self.rewards),
            **self.held_out,
        }


def run_areal_lab(config: Path, overrides: Sequence[str], folder: Path) -> Side:
    """`areal-lab train`, started as by a user."""
    program = [sys.executable, "-m", "areal_lab.cli.app", "train"]
    command = [*program, str(config), *overrides, f"run_dir={folder}", "plots=false"]
    usage = run_and_measure(
        command,
        log_path=folder / "areal_lab.log",
        environment={"HF_HUB_OFFLINE": "1"},
        working_folder=environment.ROOT,
    )
    _require_success("areal-lab train", usage, folder / "areal_lab.log")
    run_folder = next(path.parent for path in folder.glob("*/summary.json"))
    log = read_log_file(run_folder / "events.jsonl")
    began = next(record.t_s for record in log.events if isinstance(record.event, RunStarted))
    ends = [record.t_s for record in log.events if isinstance(record.event, TrainStepDone)]
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_folder / "summary.json").read_text())
    return Side(
        began_s=log.header.started_at + began,
        step_ends_s=tuple(end - began for end in ends),
        rewards=tuple(line["reward_mean"] for line in metrics),
        held_out={
            "held_out_before": summary["reward_before"]["mean"],
            "held_out_after": summary["reward_after"]["mean"],
            "held_out_problems": summary["reward_after"]["n"],
        },
        usage=usage,
    )


def run_trl(
    config: TrainConfig, dtype: str, folder: Path, *, cores: int, limit_s: float = float("inf")
) -> Side:
    """`GRPOTrainer` in its own environment, on all cores.

    Raises:
        TookTooLong: after `limit_s` seconds, when it was ended.
    """
    problems = load_problems(config.dataset, seed=config.seed)
    order = PromptSource(problems.train, seed=config.seed)
    prompts = config.total_train_steps * config.dataset.batch_size
    held_out = problems.held_out[: config.evaluation.max_problems]
    _export(folder / "train.jsonl", [order[index] for index in range(prompts)])
    _export(folder / "held_out.jsonl", held_out)
    output = folder / "progress.jsonl"
    script = Path(__file__).with_name("baseline.py")
    options = {
        "model": resolve_model_path(config.actor.path),
        "train": folder / "train.jsonl",
        "held-out": folder / "held_out.jsonl",
        "output": output,
        "dtype": dtype,
        "threads": cores,
        "steps": config.total_train_steps,
        "seed": config.seed,
        "prompts": config.dataset.batch_size,
        "group-size": config.gconfig.n_samples,
        "new-tokens": config.gconfig.max_new_tokens,
        "learning-rates": ",".join(map(str, learning_rates(config))),
        "micro-batch": MICRO_BATCH,
        "held-out-samples": config.evaluation.samples_per_problem,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    usage = run_and_measure(
        [str(environment.PYTHON), str(script), *arguments],
        log_path=folder / "trl.log",
        environment={
            **MEMORY_FOR_TRAINING,
            "OMP_NUM_THREADS": str(cores),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        limit_s=limit_s,
    )
    if usage.exit_code != 0 and usage.ended_s - usage.started_s > limit_s:
        raise TookTooLong(f"TRL took more than {limit_s:.0f} s")
    _require_success("baseline", usage, folder / "trl.log")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    began_s = next(line["at_s"] for line in lines if line["event"] == "began")
    steps = [line for line in lines if line["event"] == "step"]
    measured = {line["event"]: line for line in lines if line["event"] in ("before", "after")}
    return Side(
        began_s=began_s,
        step_ends_s=tuple(line["at_s"] - began_s for line in steps),
        rewards=tuple(line["reward"] for line in steps),
        held_out={f"held_out_{name}": line["mean"] for name, line in measured.items()}
        | {"held_out_problems": len(held_out)},
        usage=usage,
    )


def learning_rates(config: TrainConfig) -> list[float]:
    """The learning rate of each optimizer step of `areal-lab train`, for the other side."""
    optimizer, steps = config.actor.optimizer, config.total_train_steps
    return [optimizer.lr * lr_factor(step, optimizer, steps) for step in range(steps)]


def _export(path: Path, problems: Sequence[Problem]) -> None:
    lines = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems]
    path.write_text("".join(f"{line}\n" for line in lines))


def _require_success(name: str, usage: Usage, log: Path) -> None:
    if usage.exit_code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{name} ended with exit code {usage.exit_code}:\n{tail}")
