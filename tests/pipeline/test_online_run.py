"""A run whose samples a program outside of it makes, over HTTP, while weights change under them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from areal_lab.pipeline.train import resume_run
from areal_lab.resolve.notes import notes
from areal_lab.resolve.placement import place_run
from areal_lab.resolve.resolved import resolve
from areal_lab.shell.display import Silent
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from tests.pipeline.outside import post
from tests.pipeline.test_agent_program import config_with_template
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    metrics,
    rescored_difference,
    trained_samples,
)

WORKFLOW = "rollout.workflow={name: agent, mode: online, session_timeout_s: 60}"


class StartsAProgram(Silent):
    """Starts the program outside once the run says where its gateway is."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.programs: list[subprocess.Popen[bytes]] = []
        self.address: dict[str, str] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)
        if "waits for sessions from outside" not in text:
            return
        url = text.partition(" at ")[2].partition(";")[0]
        file = text.rpartition(" ")[2]
        self.address = {"url": url, "admin_key_file": file}
        command = [sys.executable, "-m", "tests.pipeline.outside", url, file]
        self.programs.append(subprocess.Popen(command))


def test_sessions_from_outside_are_trained_on_as_they_were_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = config_with_template(
        tmp_path,
        "total_train_steps=3",
        "eta=1",
        "save_every_steps=1",
        "evaluation.max_problems=2",
        WORKFLOW,
    )
    display = StartsAProgram()
    seen: list[dict[str, str]] = []

    def on_step(_: StepReport) -> None:
        (run,) = (tmp_path / "runs").iterdir()
        seen.append(json.loads((run / "gateway.json").read_text()))
        key = Path(display.address["admin_key_file"])
        assert key.stat().st_mode & 0o777 == 0o600
        assert not key.is_relative_to(run)

    result = do_run(config, on_step=on_step, display=display)
    (program,) = display.programs
    assert program.wait(60) == 0
    assert seen == [display.address] * 3
    assert not (result.folder / "gateway.json").exists()
    assert not Path(display.address["admin_key_file"]).exists()
    assert any("curl http://127.0.0.1:" in text for text in display.notes)
    assert result.summary["reward_before"]["n"] == result.summary["reward_after"]["n"] == 2

    models, worst, versions = checkpoints(result.folder), 0.0, set()
    for step in trained_samples(result.folder):
        for sample in step:
            assert len(sample["turns"]) == 2
            assert sample["reward"] in (0.0, 1.0), "a session without a reward is no sample"
            worst = max(worst, rescored_difference(models, sample)[0])
            versions |= {part["version"] for part in sample["parts"] if "tokens" in part}
    assert worst < 1e-4
    assert len(versions) >= 2, "weights changed under the sessions"
    assert all(line["turns_mean"] == 2 for line in metrics(result.folder))
    assert all(len(step) == 3 * 4 for step in trained_samples(result.folder))
    with pytest.raises((urllib.error.URLError, OSError)):
        post(f"{display.address['url']}/rl/start_session", "anything")


@pytest.mark.slow
def test_a_run_that_continues_waits_for_new_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    config = config_with_template(
        tmp_path,
        "total_train_steps=4",
        "eta=2",
        "save_every_steps=1",
        "checkpoint.open_groups=tokens",
        "evaluation.max_problems=0",
        WORKFLOW,
    )
    display, stop = StartsAProgram(), StopSignal()
    first = do_run(config, display=display, stop=stop, on_step=lambda _: stop.request()).folder
    assert display.programs[0].wait(60) == 0
    again = StartsAProgram()
    steps = [report.step for report in resume_run(first, display=again)]
    assert again.programs[0].wait(60) == 0
    assert steps == [2, 3, 4]
    samples = [sample for step in trained_samples(first) for sample in step]
    assert sorted({sample["group"] for sample in samples}) == list(range(4 * 3))
    models = checkpoints(first)
    assert max(rescored_difference(models, sample)[0] for sample in samples) < 1e-4


def test_a_port_in_use_and_a_model_without_template_are_refused_first(tmp_path: Path) -> None:
    config = config_with_template(tmp_path, WORKFLOW)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"rollout\.workflow: .*has no chat template"):
        resolve(config)
    wrong = "rollout.workflow={name: agent, mode: online, port: -1}"
    with pytest.raises(ValueError, match=r"rollout\.workflow: port is -1, but must be in"):
        resolve(config_with_template(tmp_path, wrong))


def test_a_user_is_told_that_held_out_problems_wait_for_sessions_too(tmp_path: Path) -> None:
    (told,) = notes(place_run(config_with_template(tmp_path, WORKFLOW)))
    assert "2 for each of up to 4 problems; evaluation.max_problems=0 switches them off" in told
    assert not notes(
        place_run(config_with_template(tmp_path, WORKFLOW, "evaluation.max_problems=0"))
    )
