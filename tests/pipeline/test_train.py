"""The library's front door: records in, an iterator of step reports out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import areal_lab
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.pipeline.progress import Silent
from areal_lab.pipeline.step_report import StepReport
from areal_lab.pipeline.train import TrainingRun
from areal_lab.preflight.limits import limits_of, threads_of
from areal_lab.training.process.client import TrainingError
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import tiny_config


@pytest.fixture(scope="module")
def left_early(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TrainingRun, list[StepReport]]:
    """A run with custom problems, reward and loss, left after its second step."""
    config = tiny_config(tmp_path_factory.mktemp("left"), "total_train_steps=1000")
    problems = ProblemSet(train=own_problems("12345678"), held_out=own_problems("9"))
    scale = 0.5

    def judge(completion: str, example: dict[str, Any]) -> float:  # not importable by name
        return even_digits(completion, example)

    def loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # type: ignore[no-untyped-def]
        weight = torch.exp(proximal_logprobs - behavior_logprobs)
        return Result(-scale * (weight * advantages * logprobs)[mask].mean(), -logprobs)

    class Result(NamedTuple):
        loss: torch.Tensor
        surprise: torch.Tensor

    run = areal_lab.train(config, problems=problems, reward_fn=judge, loss=loss)
    reports = []
    for report in run:
        reports.append(report)
        if report.step == 2:
            break
    return run, reports


def test_leaving_the_loop_early_saves_and_stops(
    left_early: tuple[TrainingRun, list[StepReport]],
) -> None:
    run, reports = left_early
    assert [(report.step, report.version) for report in reports] == [(1, 1), (2, 2)]
    assert all(0 <= report.lag_token_mean <= report.lag_token_max for report in reports)
    assert run.summary["status"] == "stopped"
    assert (run.folder / "model" / "model.safetensors").is_file()
    with pytest.raises(RuntimeError, match="call train"):
        next(iter(run))


def test_a_loss_that_a_notebook_defines_reaches_the_trainer(
    left_early: tuple[TrainingRun, list[StepReport]],
) -> None:
    run, reports = left_early
    assert all(report.metrics["surprise_mean"] > 0 for report in reports)
    assert (run.folder / "loss.pickle").is_file()


def test_a_loss_that_cannot_be_called_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss cannot be called as a policy loss"):
        areal_lab.train(tiny_config(tmp_path), loss=lambda logprobs: logprobs)  # type: ignore[arg-type, return-value]
    assert not (tmp_path / "runs").exists()


def own_problems(digits: str) -> tuple[Problem, ...]:
    """Problems that no dataset of ours makes."""
    return tuple(Problem(prompt=f"{digit} + {digit} =", answer="", key=digit) for digit in digits)


def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with pytest.raises(ConfigError, match="eta"):
        config.rollout.max_head_offpolicyness = -1
    config.actor.ppo_n_minibatches = 999
    with pytest.raises(ConfigError, match="ppo_n_minibatches"):
        areal_lab.train(config)
    assert not (tmp_path / "runs").exists()


def test_the_result_is_not_there_before_the_run(tmp_path: Path) -> None:
    run = areal_lab.train(tiny_config(tmp_path))
    with pytest.raises(RuntimeError, match="iterate over it"):
        _ = run.summary


def test_every_public_name_exists_and_none_costs_anything_before_it_is_used() -> None:
    for name in areal_lab.__all__:
        assert getattr(areal_lab, name) is not None
    code = "import sys, areal_lab; print(*sorted(m for m in sys.modules if m.startswith('areal')))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert loaded == ["areal_lab"]


def test_the_pipelines_process_stays_without_torch() -> None:
    code = "import sys, areal_lab.pipeline.console; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"


def test_phases_that_overlap_share_the_cores_and_others_get_them_all() -> None:
    config = TrainConfig()
    config.rollout.max_head_offpolicyness = 4
    assert (threads_of(config, 2).engine, threads_of(config, 2).trainer) == (1, 1)
    assert (threads_of(config, 9).engine, threads_of(config, 9).trainer) == (4, 5)
    assert (threads_of(config, 1).engine, threads_of(config, 1).trainer) == (1, 1)
    config.rollout.schedule = "synchronous"
    assert (threads_of(config, 2).engine, threads_of(config, 2).trainer) == (2, 2)


def test_two_batches_are_in_flight_unless_eta_admits_less() -> None:
    config = TrainConfig()
    config.dataset.batch_size = 8
    for eta, in_flight in ((0, 8), (0.5, 12), (1, 16), (4, 16), (float("inf"), 16)):
        config.rollout.max_head_offpolicyness = eta
        assert limits_of(config).max_in_flight == in_flight
    config.rollout.max_concurrent_rollouts = 5
    assert limits_of(config).max_in_flight == 5


def test_an_error_after_the_loop_was_left_is_raised_when_results_are_read(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "total_train_steps=1000")
    run = areal_lab.train(config, reward_fn=even_digits)
    for _ in run:
        (folder,) = (tmp_path / "runs").iterdir()
        checkpoints = folder / "checkpoints"
        checkpoints.rmdir()
        checkpoints.write_text("a file where the last save wants a folder")
        break
    with pytest.raises(TrainingError, match="checkpoints"):
        _ = run.summary


def test_a_bound_that_cannot_hold_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, "eta=1.5", "rollout.batch_order=bounded_lag", "rollout.max_lag=1.5"
    )
    with pytest.raises(ConfigError, match="max_lag"):
        areal_lab.train(config)
    assert not (tmp_path / "runs").exists()


def test_notes_are_warnings_of_a_silent_run_and_lines_of_one_that_is_shown(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "eta=0.5")

    class Told(Silent):
        def note(self, text: str) -> None:
            raise RuntimeError(text)

    with pytest.warns(UserWarning, match=r"eta=0\.5") as warned:
        areal_lab.train(config)
    assert [one.filename for one in warned] == [__file__]
    run = areal_lab.train(config, display=Told())  # no warning
    with pytest.raises(RuntimeError, match=r"note: eta=0\.5 is in versions"):
        next(iter(run))
