"""Search over a local corpus: trained at one depth, measured at others, with how samples end.

A chain of pages is followed by searching for the word that the last page named; the page at its end
has the answer (`areal_lab.data.chain`). SmolLM2 is trained on chains of `--depth` pages, and before
and after that measured on chains of each of `--measure` pages: a sample of depth 100 makes 100
calls, in 101 turns.

python -m benchmarks.search --json [--depth 10] [--measure 10 30 100] [--steps 40]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from areal_lab.config.load import load_config
from areal_lab.config.schema import TrainConfig
from areal_lab.data.chain import words_of, write_chains
from areal_lab.data.tokenize import TextCodec
from areal_lab.models.locate import resolve_model_path
from areal_lab.pipeline.model_evaluation import evaluate, prepare_evaluation
from areal_lab.pipeline.train import train
from areal_lab.shell.display import Silent
from benchmarks.harness import parse, report
from benchmarks.tiny_model import write_tiny_model

TRAINED, MEASURED = 400, 32
"""Chains to train on, and to measure on."""
ENDS: Final = ("stop", "length", "turns", "context")
"""`stop` is an answer, or a line that is none and no call either."""


def main() -> None:
    """Measure, train, measure."""
    arguments = parse(__doc__, repeats=1, quick_repeats=1, add_own=_own_arguments)
    own = arguments.own
    with tempfile.TemporaryDirectory(prefix="search-") as name:
        folder = Path(name)
        model, depth, depths, steps = "SmolLM2-135M-Instruct", own.depth, own.measure, own.steps
        changed: dict[str, Any] = {"total_train_steps": steps}
        if arguments.quick:
            write_tiny_model(folder / "model")
            model, depth, depths, steps = str(folder / "model"), 2, [2], 1
            changed = {"total_train_steps": 1, "gconfig.n_samples": 2, "dataset.batch_size": 2}
        rows = [measure("before", model, folder, one) for one in depths]
        config = configuration(model, folder, depth=depth, chains=TRAINED, seed=1)
        rewards = []
        run = train(config.with_settings(changed))
        for step in run:
            rewards.append(step.metrics["reward_mean"])
            _say(f"step {step.step}/{steps}: reward {rewards[-1]:.2f}, {step.step_s:.1f} s")
        rows += [measure("after", str(run.folder / "model"), folder, one) for one in depths]
    report({"rows": rows, "rewards": rewards, "trained_depth": depth}, arguments)


def configuration(model: str, folder: Path, *, depth: int, chains: int, seed: int) -> TrainConfig:
    """Settings for chains of one depth, whose files are written."""
    data = folder / f"depth-{depth}-{chains}"
    words = words_of(TextCodec.load(resolve_model_path(model)))
    # The vocabulary of the tiny model has no words.
    write_chains(data, chains, depth=depth, words=words or None, seed=seed)
    search = {"name": "search", "corpus": str(data / "corpus.jsonl")}
    return load_config(None, []).with_settings(
        {
            "actor.path": model,
            "run_dir": str(folder / "runs"),
            "dataset.type": "jsonl",
            "dataset.path": str(data / "problems.jsonl"),
            "dataset.eval_size": min(MEASURED, chains // 2),
            "dataset.batch_size": 8,
            "gconfig.n_samples": 8,
            "gconfig.max_new_tokens": 12,
            "gconfig.stop": ["\n"],
            "rollout.workflow": {
                "name": "tool_use",
                "tool": search,
                "call": "Open:",
                "result": "",
                "max_turns": 2 * depth,
            },
            "rollout.max_head_offpolicyness": 2.0,
            "actor.optimizer.beta2": 0.95,
            "actor.optimizer.warmup_steps": 3,
            "reward.fn": "areal_lab.rewards.exact:answer_line",
            "evaluation.max_problems": 0,
            "plots": False,
        }
    )


def measure(weights: str, model: str, folder: Path, depth: int) -> dict[str, Any]:
    """Rewards and ends of samples on chains of one depth, one each, at temperature 1."""
    config = configuration(model, folder, depth=depth, chains=2 * MEASURED, seed=2)
    out = folder / f"{weights}-{depth}"
    evaluation = prepare_evaluation(config, samples=1, ks=[1], out=out)
    found = asyncio.run(evaluate(evaluation, Silent()))
    reward = found["reward"] or {}
    _say(f"{weights} training, depth {depth}: reward {reward.get('mean')}, ends {found['ends']}")
    return {
        "weights": weights,
        "depth": depth,
        "reward": reward.get("mean"),
        "ci95": reward.get("ci95"),
        "mean_turns": found["mean_turns"],
        **{f"end {end}": found["ends"].get(end, 0) / found["samples"] for end in ENDS},
        "samples": found["samples"],
        "wall_s": found["wall_s"],
    }


def _own_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, default=10, help="pages of a trained chain")
    parser.add_argument(
        "--measure", type=int, nargs="+", default=[10, 30, 100], help="pages of measured chains"
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
