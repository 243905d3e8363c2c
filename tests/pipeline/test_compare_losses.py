"""Several losses with several seeds: real runs of two steps, and what one failure leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from areal_lab import compare_losses
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.functional import PlainLoss, token_mean
from areal_lab.training.objective.typed_loss import EXAMPLES, read_loss


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    few = ["total_train_steps=2", "evaluation.max_problems=4", "dataset.batch_size=4"]
    return load_config("tiny", [f"run_dir={tmp_path}", *few])


def test_losses_are_trained_with_common_seeds_and_one_failure_leaves_the_others(
    config: TrainConfig,
) -> None:
    def explodes(logprobs, _proximal, _behavior, advantages, mask):
        infinite = torch.where(advantages > 0, torch.inf, 1.0)
        return PlainLoss(-token_mean(logprobs * infinite, mask))

    losses = {
        "PPO": None,
        "my own": read_loss(EXAMPLES["clip from above"]).function,
        "Explodes!": explodes,
    }
    comparison = compare_losses(losses, config, seeds=[7, 3])
    assert (comparison.runs, comparison.total_steps) == (6, 12)
    assert comparison.results.runs == ()
    seen = [(step.run, step.loss, step.seed, step.report.step) for step in comparison]
    assert seen == [
        *[(1, "PPO", 7, 1), (1, "PPO", 7, 2), (2, "my own", 7, 1), (2, "my own", 7, 2)],
        *[(4, "PPO", 3, 1), (4, "PPO", 3, 2), (5, "my own", 3, 1), (5, "my own", 3, 2)],
    ]
    results = comparison.results
    complete = [run for run in results.runs if run.status == "complete"]
    assert [(run.loss, run.seed) for run in complete] == [
        (loss, seed) for _, loss, seed, _ in seen[::2]
    ]
    failed = [run for run in results.runs if run.status == "failed"]
    assert [(run.loss, run.seed) for run in failed] == [("Explodes!", 7), ("Explodes!", 3)]
    assert "loss" in failed[0].error
    for one in complete:
        folder = Path(one.folder)
        assert folder.name.startswith(
            f"tiny-{'ppo' if one.loss == 'PPO' else 'my-own'}-seed-{one.seed}-"
        )
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert tuple(line["reward_mean"] for line in metrics) == one.rewards
        assert (folder / "loss.pickle").exists() == (one.loss == "my own")
        assert not (folder / "reward.png").exists()
    # Before training, a seed has the same problems and samples for every loss.
    before = {(run.seed, run.held_out_before) for run in complete}
    assert len(before) == 2
    assert set(results.final_rewards()) == {"PPO", "my own"}
    with pytest.raises(RuntimeError, match="the runs were made"):
        next(iter(comparison))


def test_leaving_early_stops_the_run_and_keeps_those_before(config: TrainConfig) -> None:
    comparison = compare_losses({"PPO": None, "again": None}, config, seeds=1)
    for step in comparison:
        if step.run == 2:
            break
    statuses = [(run.loss, run.status) for run in comparison.results.runs]
    assert statuses == [("PPO", "complete"), ("again", "stopped")]


def test_what_cannot_be_compared_is_refused_before_anything_starts(
    config: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="losses is empty"):
        compare_losses({}, config)
    with pytest.raises(ValueError, match="seeds is 0, but must give at least one"):
        compare_losses({"PPO": None}, config, seeds=0)
    with pytest.raises(ValueError, match="has no 'gpso'"):
        compare_losses({"typo": "areal_lab.functional:gpso"}, config)
    with pytest.raises(ConfigError, match="cannot be called as a policy loss"):
        compare_losses({"PPO": None, "wrong": lambda logprobs: logprobs}, config)
    assert not list(tmp_path.iterdir())
