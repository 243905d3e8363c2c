"""Evaluation while training continues: scores of checkpoints, and nothing else of the run changes.

Real processes on a tiny model. Held-out problems take several steps, because few of their
responses run at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lab.agents.workflow import Episode, Row
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import SampleEnd, Segment
from areal_lab.pipeline.evaluate import results
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.state import RunState
from areal_lab.pipeline.train import resume_run
from areal_lab.resolve.notes import notes
from areal_lab.resolve.placement import place_run
from areal_lab.resolve.resolved import resolve
from areal_lab.rewards.service import RewardError, RewardOutcome
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.held_out import Measured, read_held_out
from areal_lab.runlog.replay import check_replay
from areal_lab.shell.display import Silent
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from tests.pipeline.resume.killed_run import Kill, check_folder, comparable, live
from tests.pipeline.rewards import even_digits, fails_on_held_out, opposite_on_held_out
from tests.pipeline.tiny_run import do_run, marked, metrics, tiny_config, trained_samples

STEPS, TOKENS = 6, 40
GREEDY = ("evaluation.temperature=0", "evaluation.samples_per_problem=1")
SLOW = (f"gconfig.max_new_tokens={TOKENS}", "evaluation.max_problems=24")
"""Held-out problems that take longer than a step, on the few places that they get."""


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    return tiny_config(
        folder,
        *(f"total_train_steps={STEPS}", "eta=2", "save_every_steps=1", "eval_every_steps=3"),
        "rollout.batch_order=bounded_lag",  # holds when an engine is lost as well
        *SLOW,
        *overrides,
    )


def measured(folder: Path) -> list[Measured]:
    return read_held_out(folder)


class Reports(list[StepReport]):
    """The reports of a run."""

    @property
    def in_flight(self) -> set[int]:
        """Steps that were being evaluated when a later step had ended."""
        words = [(one.step, one.evaluating.split()) for one in self if one.evaluating]
        return {at for step, said in words if (at := int(said[2].rstrip(":"))) < step}


class Notes(Silent):
    """What a run tells its user."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def greedy_reward(config: TrainConfig, checkpoint: Path) -> float:
    """The mean reward of a model's greedy responses to the held-out problems."""
    problems = resolve(config).problems.held_out[: config.evaluation.max_problems]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    codec = TextCodec.load(config.actor.path)
    stops = set(codec.stops(config.gconfig.stop).token_ids)
    prompts = [list(codec.encode(problem.prompt)) for problem in problems]
    responses: list[list[int]] = [[] for _ in problems]
    for _ in range(TOKENS):
        rows = [[*one, *more] for one, more in zip(prompts, responses, strict=True)]
        longest = max(map(len, rows))
        with torch.no_grad():  # a causal model does not see what is padded on the right
            logits = model(
                torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
            ).logits
        for row, response, of_row in zip(rows, responses, logits, strict=True):
            if not (response and response[-1] in stops):
                response.append(int(of_row[len(row) - 1].argmax()))
    rewards = [even_digits(codec.decode(response), {}) for response in responses]
    return fmean(rewards)


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path, Reports]:
    """A run of two engines."""
    # Four places on the pinned engine, so that the problems take several steps.
    config = config_of(
        tmp_path_factory.mktemp("pinned"),
        *("rollout.engines=2", "rollout.max_running_requests=4", *GREEDY),
    )
    reports = Reports()
    result = do_run(config, reward_fn=even_digits, on_step=reports.append)
    return config, result.folder, reports


def test_with_two_engines_a_score_is_that_of_the_checkpoint(
    pinned: tuple[TrainConfig, Path, Reports],
) -> None:
    config, folder, reports = pinned
    found = measured(folder)
    assert all(one.exact and one.problems == 24 for one in found)
    # Training went on meanwhile, and the other engine got newer weights.
    during = reports.in_flight & {one.version for one in found}
    assert during
    by_version = {one.version: one.reward for one in found}
    others = {by_version[version] for version in by_version.keys() - during}
    for version in during:
        checkpoint = folder / "checkpoints" / f"step-{version:05d}"
        assert greedy_reward(config, checkpoint) == pytest.approx(by_version[version])
        assert by_version[version] not in others  # equal scores would tell nothing


def test_evaluations_are_no_rollouts(pinned: tuple[TrainConfig, Path, Reports]) -> None:
    folder = pinned[1]
    seen = [(s["group"], s["sample"]) for step in trained_samples(folder) for s in step]
    assert len(seen) == len(set(seen)) == STEPS * 3 * 4
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["version_mismatches"] == summary["engine_losses"] == summary["dropped"] == 0
    assert max(line["lag_head_max"] for line in metrics(folder)) <= 2
    assert check_replay(read_log_file(folder / "events.jsonl")).agrees
    assert summary["evaluations"]["mixed"] == []
    best = {one.version: one.reward for one in measured(folder) if one.version}
    assert summary["best"]["reward"] == max(best.values())
    assert (folder / "best").resolve().name == f"step-{summary['best']['version']:05d}"


def test_with_one_engine_the_best_is_measured_again_with_its_own_weights(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        *("total_train_steps=9", "checkpoint.keep=1", "evaluation.engine_share=0.1"),
        "actor.optimizer.lr=2e-3",
    )
    notes = Notes()
    result = do_run(config, reward_fn=opposite_on_held_out, problems=marked(config), display=notes)
    text = (result.folder / "held_out.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    first = next(line for line in lines if line["version"] == 3)
    low, high = first["versions"]
    assert low <= first["mean_version"] <= high
    assert high > 3
    assert first["later_tokens"] > 0
    assert any("% of the tokens by version" in note for note in notes.told)
    again = [line for line in lines if line["later_tokens"] == 0 and line["version"] not in (0, 9)]
    assert [line["version"] for line in again] == [3]
    # Training made it worse, so the first checkpoint that was measured is the best.
    best = result.summary["best"]
    assert (best["version"], best["later_tokens"]) == (3, 0)
    assert best["reward"] > result.summary["reward_after"]["mean"]
    left = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert left == ["step-00003", "step-00009"]
    assert (result.folder / "best").resolve().name == "step-00003"
    assert 3 in result.summary["evaluations"]["versions"]


def test_at_eta_0_training_is_bit_equal_with_and_without_evaluations(tmp_path: Path) -> None:
    one_by_one = ("eta=0", "rollout.max_running_requests=1", "total_train_steps=4")
    few = (
        *(*one_by_one, "reward.workers=2", "evaluation.max_problems=6"),
        "gconfig.max_new_tokens=16",
    )
    runs = [do_run(config_of(tmp_path, *few, f"eval_every_steps={every}")) for every in (0, 1)]
    assert [len(measured(one.folder)) > 2 for one in runs] == [False, True]
    assert comparable(runs[0].folder) == comparable(runs[1].folder)


@pytest.mark.parametrize("victim", ["pinned", "other", "only"])
def test_an_engine_that_dies_during_an_evaluation_ends_nothing(tmp_path: Path, victim: str) -> None:
    engines = 1 if victim == "only" else 2
    restarts = 1 if victim == "only" else 0
    config = config_of(
        tmp_path,
        f"rollout.engines={engines}",
        f"rollout.max_engine_restarts={restarts}",
        "rollout.max_running_requests=4",
    )
    state, killed = RunState(), list[int]()

    def kill(report: StepReport) -> None:
        assert state.performer is not None
        servers = state.performer.servers
        at = servers.pinned
        if killed or not report.evaluating or (at is None) != (victim == "only"):
            return
        chosen = next(n for n in servers.alive if (n == at) == (victim == "pinned"))
        child = servers.alive[chosen].child
        assert child is not None
        killed.append(chosen)
        os.kill(child.pid, signal.SIGKILL)

    result = do_run(config, reward_fn=even_digits, on_step=kill, state=state)
    assert killed
    assert result.summary["status"] == "complete"
    assert result.summary["engine_losses"] == 1
    seen = [(s["group"], s["sample"]) for step in trained_samples(result.folder) for s in step]
    assert len(seen) == len(set(seen)) == STEPS * 3 * 4
    assert max(line["lag_head_max"] for line in metrics(result.folder)) <= 2
    found = {one.version: one for one in measured(result.folder)}
    assert all(one.problems == 24 for one in found.values())
    assert 3 in found
    assert {0, STEPS} <= found.keys()


def test_a_reward_function_that_fails_on_held_out_problems_ends_the_run(tmp_path: Path) -> None:
    # 4 failures before training and 4 in each evaluation: more than 10 of 100 end a run.
    config = config_of(
        tmp_path, "evaluation.max_problems=4", "evaluation.samples_per_problem=1",
        "eval_every_steps=1", "total_train_steps=40", "reward.sandbox=unsafe",
    )  # fmt: skip
    with pytest.raises(RewardError, match="no answer, and the sandbox is unsafe"):
        do_run(config, reward_fn=fails_on_held_out, problems=marked(config))
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"


def test_failed_rewards_are_counted_and_no_zeros(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, "evaluation.max_problems=4", "reward.max_error_rate=1", "total_train_steps=5"
    )
    notes = Notes()
    result = do_run(config, reward_fn=fails_on_held_out, problems=marked(config), display=notes)
    assert result.summary["reward_after"] is None
    assert result.summary["best"] is None
    assert not (result.folder / "held_out.jsonl").exists()
    assert "held-out reward of step 3: no problem has a reward" in notes.told


def test_ctrl_c_ends_an_evaluation_without_a_score(tmp_path: Path) -> None:
    config = config_of(tmp_path, "evaluation.engine_share=0.1")
    stop, notes = StopSignal(), Notes()

    def stop_it(report: StepReport) -> None:
        if report.evaluating:
            stop.request()

    result = do_run(config, reward_fn=even_digits, on_step=stop_it, stop=stop, display=notes)
    assert [one.version for one in measured(result.folder)] == [0]
    assert "step 3 is not evaluated: the run ended before it was" in notes.told
    assert result.summary["evaluations"]["missed"] == [3]


def test_a_run_that_continues_measures_its_checkpoint_once(tmp_path: Path) -> None:
    """The last checkpoint of a complete run is removed, as if it was killed before that."""
    config = config_of(tmp_path, *GREEDY, "eta=0", "total_train_steps=7")
    whole = do_run(config, reward_fn=even_digits).folder
    for lost in (False, True):
        killed = tmp_path / f"killed-{lost}"
        shutil.copytree(whole, killed, symlinks=True)
        shutil.rmtree(killed / "checkpoints" / "step-00007")
        file = killed / "held_out.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        of_six = [line for line in lines if json.loads(line)["version"] == 6]
        assert of_six
        if lost:  # it was in flight
            file.write_text("".join(line for line in lines if line not in of_six))
        assert find_recovery(killed).version == 6
        run = resume_run(killed, reward_fn=even_digits, display=Silent())
        assert [report.step for report in run] == [7]
        after = file.read_text().splitlines(keepends=True)
        assert [line for line in after if json.loads(line)["version"] < 6] == [
            line for line in lines if json.loads(line)["version"] < 6
        ]
        if not lost:  # a lost one may be measured to the same digits
            assert [line for line in after if line in of_six] == of_six
        assert 6 in {one.version for one in measured(killed)}
        check_folder(killed, 7, largest_lag=0)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_kills_leave_one_score_per_version(tmp_path: Path, engines: int) -> None:
    config = config_of(
        tmp_path,
        *(f"rollout.engines={engines}", "total_train_steps=24", "checkpoint.keep=2"),
    )
    folder = do_nothing(config)
    for victim, moment, count in (
        ("run", "push", 4),
        ("trainer", "save", 2),
        ("pipeline", "generation", 9),
        ("stopped", "push", 4),
    ):
        assert live(folder, Kill(victim, moment, count, 0.01)) != 0
    assert live(folder, None) == 0
    check_folder(folder, 24, largest_lag=2)


def do_nothing(config: TrainConfig) -> Path:
    """A run folder with a configuration."""
    from areal_lab.runlog.folder import RunFolder

    return RunFolder.create(config).path


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["evaluation.temperature=0"],
            "evaluation.samples_per_problem is 2, but responses at evaluation.temperature=0 are "
            "all equal; set it to 1",
        ),
        (
            ["evaluation.pass_at=[1,9]"],
            "evaluation.pass_at has 9, but each k must be from 1 to "
            "evaluation.samples_per_problem=2",
        ),
        (
            ["eval_every_steps=5", "evaluation.max_problems=0"],
            "eval_every_steps is 5, but evaluation.max_problems is 0",
        ),
        (["eval_every_steps=-1"], "eval_every_steps is -1, but must be an integer >= 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(load_config("arithmetic", overrides))
    assert said in str(raised.value)


def test_what_may_surprise_is_noted() -> None:
    def told(*overrides: str) -> str:
        return "\n".join(
            notes(place_run(load_config("arithmetic", ["total_train_steps=40", *overrides])))
        )

    assert "evaluat" not in told()
    assert "chosen among those of every 12 steps" in told(
        "eval_every_steps=4", "save_every_steps=6"
    )
    assert "chosen among those of the last step" in told("eval_every_steps=4")
    assert "chosen among" not in told("eval_every_steps=4", "save_every_steps=2")
    assert "with one engine" in told("eval_every_steps=4")
    assert "with one engine" not in told("eval_every_steps=4", "rollout.engines=2")
    assert "eval_every_steps=40 has no effect" in told("eval_every_steps=40")


def sample(reward: float, tokens: int = 10, *, truncated: bool = False) -> Episode:
    return _episode(RewardOutcome("ok", reward), tokens, end="length" if truncated else "stop")


def _episode(outcome: RewardOutcome, tokens: int = 10, end: SampleEnd = "stop") -> Episode:
    segment = Segment((7,) * tokens, (-1.0,) * tokens, 0)
    return Episode(rows=(Row(prompt_tokens=(1,), parts=(segment,)),), outcome=outcome, end=end)


FAILED = _episode(RewardOutcome("error", math.nan, detail="Traceback: boom"))


def test_pass_at_k_is_averaged_over_problems() -> None:
    found = results([[sample(1), sample(0)], [sample(0), sample(0)]], (1, 2))
    assert found["pass_at"]["1"]["mean"] == pytest.approx(0.25)
    assert found["pass_at"]["2"]["mean"] == pytest.approx(0.5)
    assert found["pass_at"]["2"]["n"] == 2
    assert found["pass_at"]["2"]["ci95"] > 0


def test_a_partial_reward_is_no_pass() -> None:
    found = results([[sample(0.9)], [sample(1)]], (1,))
    assert found["pass_at"]["1"]["mean"] == 0.5
    assert found["reward"]["mean"] == pytest.approx(0.95)


def test_failed_rewards_are_counted_and_not_zero() -> None:
    found = results([[sample(1), FAILED], [FAILED, FAILED]], (1, 2))
    assert found["rewards"] == {"ok": 1, "error": 3}
    assert found["first_failure"] == "Traceback: boom"
    assert found["pass_at"]["1"] == {"mean": 1.0, "n": 1, "ci95": None}
    assert found["pass_at"]["2"] is None
    assert found["reward"]["mean"] == 1.0


def test_lengths_are_of_all_samples() -> None:
    found = results([[sample(1, 4), sample(0, 8, truncated=True)]], (1,))
    assert found["mean_tokens"] == 6
    assert found["truncated_share"] == 0.5
