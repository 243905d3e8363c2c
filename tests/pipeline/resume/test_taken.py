"""A run that was continued elsewhere while it hung: it ends, and leaves the folder alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from areal_lab.cli.train import run_train
from areal_lab.config.problem import ConfigError
from areal_lab.host.claim import RunTaken
from areal_lab.live.presence import Present, read_presence
from areal_lab.pipeline.resume.restart import FINAL_CODES
from areal_lab.shell.step_report import StepReport
from areal_lab.training.process.output import begin_folder
from benchmarks.tiny_model import write_tiny_model
from tests.host.test_claim import contents, continue_elsewhere
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, tiny_config


def what_runs_write(folder: Path) -> dict[str, bytes]:
    """Everything but the output of processes, which ends with these."""
    return {n: c for n, c in contents(folder).items() if not n.startswith("logs/")}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_continued_elsewhere_ends_and_writes_nothing(
    tmp_path: Path, asynchronous: bool
) -> None:
    config = tiny_config(
        tmp_path,
        "total_train_steps=6",
        "save_every_steps=1",
        "token_fields=true",
        f"checkpoint.asynchronous={asynchronous}",
    )
    taken: dict[str, bytes] = {}

    def take(report: StepReport) -> None:
        if report.step == 2:
            (folder,) = (tmp_path / "runs").iterdir()
            while not (folder / "checkpoints" / "step-00001").exists():
                time.sleep(0.005)  # the trainer renames it meanwhile
            continue_elsewhere(folder)
            taken.update(what_runs_write(folder))

    with pytest.raises(RunTaken, match="process 7 on host elsewhere"):
        do_run(config, reward_fn=even_digits, on_step=take)
    (folder,) = (tmp_path / "runs").iterdir()
    after = {n: c for n, c in what_runs_write(folder).items() if ".writing-" not in n}
    assert after == {n: c for n, c in taken.items() if ".writing-" not in n}
    assert not (folder / "summary.json").exists()
    presence = read_presence(folder)
    assert presence is not None
    assert not presence.ended


def test_a_checkpoint_that_was_being_written_does_not_appear(tmp_path: Path) -> None:
    run, source = tmp_path / "run", tmp_path / "model"
    write_tiny_model(source)
    path = run / "checkpoints" / "step-00003"
    path.mkdir(parents=True)
    (path / "config.json").write_text("of the process that has continued the run")
    present = Present(run)
    present.enter("training")
    model = AutoModelForCausalLM.from_pretrained(source)
    writing = begin_folder(model, path, claim=present.claim)
    with pytest.raises(RunTaken):
        writing.write(source, lambda _: continue_elsewhere(run))
    assert [file.name for file in run.glob("checkpoints/**/*")] == ["step-00003", "config.json"]


def test_the_command_that_continues_runs_does_not_take_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_args: object, **_kwargs: object) -> int:
        raise RunTaken("process 7 on host elsewhere has continued the run")

    monkeypatch.setattr("areal_lab.cli.train.find_recovery", lambda *_: FakeRecovery())
    monkeypatch.setattr("areal_lab.cli.train.console.run_to_end", taken)
    with pytest.raises(ConfigError, match="host elsewhere"):
        run_train([], resume=tmp_path, restarts=0)
    assert 2 in FINAL_CODES, "the exit code of a ConfigError"


class FakeRecovery:
    config = None
