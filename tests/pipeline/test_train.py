"""The library's front door: records in, an iterator of step reports out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch

import areal_lab
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.pipeline.train import TrainingRun
from areal_lab.resolve.limits import Threads, limits_of, threads_of
from areal_lab.resolve.placement import place_run, this_machine
from areal_lab.shell.display import Silent
from areal_lab.shell.step_report import StepReport
from areal_lab.training.process.client import TrainingError
from tests.environments import ROOT
from tests.offline.small import TEMPLATE
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import tiny_config, trained_samples


@pytest.fixture(scope="module")
def left_early(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TrainingRun, list[StepReport]]:
    """A run with rows made for verl, a custom reward and loss, left after its second step."""
    folder = tmp_path_factory.mktemp("left")
    config = tiny_config(
        folder,
        "total_train_steps=1000",
        "dataset.prompt_field=prompt",
        "dataset.answer_field=reward_model.ground_truth",
    )
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    problems = pd.DataFrame(verl_rows("12345678")), verl_rows("9")
    scale = 0.5

    def judge(completion: str, example: dict[str, Any]) -> float:  # not importable by name
        assert example["messages"][0]["content"][0] == example["answer"][1]
        assert example["reward_model"]["ground_truth"] == example["answer"]
        return even_digits(completion, example)

    def loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):  # type: ignore[no-untyped-def]
        weight = torch.exp(proximal_logprobs - behavior_logprobs)
        return Result(-scale * (weight * advantages * logprobs)[mask].mean(), -logprobs)

    class Result(NamedTuple):
        loss: torch.Tensor
        surprise: torch.Tensor

    def advantage(rewards, groups, length_tokens):  # type: ignore[no-untyped-def] # as in notebooks
        print("advantages of", len(groups))
        return scale * (rewards - rewards.mean()) - 1e-3 * length_tokens

    run = areal_lab.train(
        config, problems=problems, reward_fn=judge, loss=loss, advantage=advantage
    )
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


@pytest.mark.slow
def test_the_script_of_the_docs_makes_a_model_from_a_frame(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "train.md").read_text()
    section = page.split("### From a frame and a function to a trained model")[1]
    script = tmp_path / "own.py"
    script.write_text(section.split("```python\n")[1].split("```")[0])
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *steps, model = done.stdout.splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2", "3", "4", "5"]
    assert (Path(model) / "model.safetensors").is_file()
    assert Path(model).is_relative_to(tmp_path)


def test_advantages_that_a_notebook_defines_reach_the_trainer(
    left_early: tuple[TrainingRun, list[StepReport]],
) -> None:
    run, reports = left_early
    printed = (run.folder / "logs" / "trainer.log").read_text()
    assert printed.count("advantages of") >= len(reports)
    samples = [sample for step in trained_samples(run.folder) for sample in step]
    assert len(samples) > len(reports)
    with pytest.raises(ConfigError, match="pass it again") as refused:
        areal_lab.resume_run(run.folder, problems=[], reward_fn=even_digits)
    assert [one.setting for one in refused.value.problems] == ["loss", "advantage"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda rewards: rewards, "is called as advantages"),
        (
            lambda rewards, groups, values: rewards + groups + values,
            "takes values of a critic, which the settings",
        ),
        ("gea", "did you mean 'gae'"),
    ],
)
def test_advantages_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, given: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        areal_lab.train(tiny_config(tmp_path), advantage=given)
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_cannot_be_called_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss cannot be called as a policy loss"):
        areal_lab.train(tiny_config(tmp_path), loss=lambda logprobs: logprobs)  # type: ignore[arg-type, return-value]
    assert not (tmp_path / "runs").exists()


def verl_rows(digits: str) -> list[dict[str, Any]]:
    """Rows as verl has them."""
    return [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{digit} + {digit}"}],
            "reward_model": {"style": "rule", "ground_truth": f"0{digit}"},
        }
        for digit in digits
    ]


def test_rows_made_for_verl_reach_the_model_and_the_reward_as_they_are(
    left_early: tuple[TrainingRun, list[StepReport]],
) -> None:
    run, _ = left_early
    samples = [sample for step in trained_samples(run.folder) for sample in step]
    assert {sample["prompt"] for sample in samples} <= {f"+{d} + {d}=*" for d in "12345678"}
    assert samples


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

    def threads(cores: int) -> Threads:
        return threads_of(place_run(config, replace(this_machine(), cores=cores)))

    config.rollout.max_head_offpolicyness = 4
    assert threads(2) == Threads(engine=1, trainer=1)
    assert threads(9) == Threads(engine=4, trainer=5)
    assert threads(1) == Threads(engine=1, trainer=1)
    config.rollout.schedule = "synchronous"
    assert threads(2) == Threads(engine=2, trainer=2)


def test_engines_share_their_threads_and_processes_of_the_trainer_theirs() -> None:
    def threads(*settings: str) -> Threads:
        config = load_config(None, ["allocation_mode=embedded:d3+fsdp:d2", "eta=4", *settings])
        return threads_of(place_run(config, replace(this_machine(), cores=12)))

    assert threads() == Threads(engine=2, trainer=3)
    assert threads("rollout.schedule=synchronous") == Threads(engine=4, trainer=6)
    assert threads("rollout.threads=5", "actor.threads=7") == Threads(engine=5, trainer=7)


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
