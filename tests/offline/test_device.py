"""A step on a device that is not the CPU: nothing mixes, and the host hardly waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def main(folder: Path) -> None:
    """Compare the pretend device with the CPU; in a process of its own, for its registration."""
    from tests.training import pretend

    device = pretend.register()
    from areal_lab.offline.objectives import DPO, make_objective
    from areal_lab.offline.trainee import (
        evaluate,
        load_network,
        make_trainee,
        reference_logprobs,
        train_step,
    )
    from areal_lab.training.ranks import ALONE
    from tests.offline.test_trainee import CONFIGS, make_items, references
    from tests.training.tiny import save_model

    path = save_model(folder / "model")

    def measured(kind: str, where: str) -> list[dict[str, float]]:
        config, items = CONFIGS[kind], make_items(kind)
        actor = config.actor.with_settings({"max_tokens_per_mb": 25, "dtype": "float32"})
        network = load_network(path, actor, ALONE, scores=kind == "rm", device=where, seed=1)
        trainee = make_trainee(network, make_objective(config), actor, steps=9)
        if isinstance(trainee.objective, DPO):
            told = reference_logprobs(
                network, trainee.objective, items, at_once=4, done=lambda _: None
            )
            assert told.device.type == "cpu"
        frozen = references(kind, items)
        pretend.WAITS.clear()
        step = train_step(trainee, items, frozen)
        assert step["micro_batches"] > 2
        # The optimizer's step, and the sums.
        assert sum(pretend.WAITS.values()) <= 2, dict(pretend.WAITS)
        return [step, evaluate(trainee, items, frozen, at_once=5)]

    for kind in CONFIGS:
        on_cpu = measured(kind, "cpu")
        with pretend.PretendMode():
            there = measured(kind, str(device))
        for one, other in zip(on_cpu, there, strict=True):
            assert other == pytest.approx(one, rel=1e-4, abs=1e-5), kind


@pytest.mark.slow
def test_a_step_on_a_device_mixes_nothing_and_waits_twice(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.offline.test_device", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
