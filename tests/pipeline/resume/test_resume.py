"""A run that was killed continues as if nothing had happened: real processes, a tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import psutil
import pytest
from omegaconf import OmegaConf

from areal_lab.config.problem import ConfigError
from areal_lab.control.events import RECYCLED
from areal_lab.host.processes import ChildDied
from areal_lab.models.checkpoint_files import checkpoint_fault, checkpoints_of
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.train import resume_run
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.read_run import read_run
from tests.pipeline.resume import kills_while_saving
from tests.pipeline.resume.killed_run import (
    AGAIN,
    GIVE_UP_S,
    MOMENTS,
    Kill,
    check_folder,
    comparable,
    live,
    trained_groups,
    wait_for,
)
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    rescored_difference,
    tiny_config,
    trained_samples,
)

STEPS, GROUPS = 5, 3
ONE_BY_ONE = "rollout.max_running_requests=1"
"""Without it, batches of the engine depend on when requests arrive, and log-probs in their last
digits on the batch: two runs that nobody killed then differ now and then, too."""


@pytest.mark.parametrize("beside", [False, True])
def test_at_eta_0_a_resumed_run_is_bit_equal(tmp_path: Path, beside: bool) -> None:
    config = tiny_config(
        tmp_path,
        f"total_train_steps={STEPS}",
        "eta=0",
        "save_every_steps=1",
        f"checkpoint.asynchronous={beside}",
        ONE_BY_ONE,
    )
    result = do_run(config)
    assert result.summary["save_wait_s"] > 0
    whole = result.folder
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed, symlinks=True)
    for checkpoint in sorted((killed / "checkpoints").iterdir())[4:]:
        shutil.rmtree(checkpoint)  # as if it was killed before the last one was complete
    assert find_recovery(killed).version == 4
    newest = killed / "checkpoints" / "step-00004"
    for file in (newest / "model.safetensors", *(newest / "trainer").iterdir()):
        sound = file.read_bytes()
        file.write_bytes(sound[:-9] + bytes([sound[-9] ^ 4]) + sound[-8:])
        with pytest.raises(ConfigError, match=rf"step-00004 is damaged: .*{file.name} has other"):
            find_recovery(killed)
        file.write_bytes(sound)
    copy = shutil.copytree(newest, killed / "checkpoints" / "step-00004-copy")
    run = resume_run(killed)
    assert [report.step for report in run] == [5]
    assert checkpoint_fault(copy) == ""
    shutil.rmtree(copy)
    check_folder(killed, STEPS, largest_lag=0)
    again = AGAIN if beside else ()
    assert comparable(killed, again) == comparable(whole, again)
    for name in {"reward_before", "reward_after", "generated_tokens", "trained_tokens"} - {*again}:
        assert run.summary[name] == result.summary[name]


def test_a_kill_while_a_checkpoint_is_written_continues_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kills_while_saving.FOLDER, str(tmp_path))
    config = tiny_config(
        tmp_path,
        "total_train_steps=4",
        "eta=0",
        "save_every_steps=1",
        "checkpoint.asynchronous=true",
        f"actor.loss_fn={kills_while_saving.__name__}:loss",
        ONE_BY_ONE,
    )
    with pytest.raises(ChildDied, match=r"trainer .* was killed by SIGKILL"):
        do_run(config)
    assert (tmp_path / "killed").is_file()
    (killed,) = (tmp_path / "runs").iterdir()
    (partial,) = (killed / "checkpoints").glob(".step-00002.writing-*")
    assert (partial / "run.json").is_file(), "everything is there but the name"
    assert find_recovery(killed).version == 1
    run = resume_run(killed)
    assert [report.step for report in run] == [2, 3, 4]
    assert not list((killed / "checkpoints").glob(".*"))
    check_folder(killed, 4, largest_lag=0)
    assert comparable(killed, AGAIN) == comparable(do_run(config).folder, AGAIN)


KILLS, MANY = 17, 60


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["restart", "tokens"])
def test_a_killed_run_trains_on_the_prompts_of_recycled_groups(tmp_path: Path, opened: str) -> None:
    config = tiny_config(
        tmp_path,
        "total_train_steps=20",
        "eta=4",
        "save_every_steps=1",
        "gconfig.max_new_tokens=40",
        f"checkpoint.open_groups={opened}",
        "rollout.batch_order=bounded_lag",
        "rollout.max_lag=1",
        "rollout.on_late=recycle",
        "rollout.max_concurrent_rollouts=12",
    )
    folder = RunFolder.create(config).path
    for process, moment in zip(("run", "pipeline", "stopped"), sorted(MOMENTS), strict=False):
        assert live(folder, Kill(process, moment, 3, 0.02)) != 0
    assert live(folder, None) == 0
    check_folder(folder, 20, largest_lag=1)
    assert trained_groups(folder) == Counter(range(20 * GROUPS))
    log = read_run(folder).log
    assert any(getattr(one.action, "reason", "") == RECYCLED for one in log.actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eta", "opened", "pause", "seed"),
    [
        (0, "restart", "retract", 1),
        (2, "restart", "retract", 2),
        (2, "tokens", "abort", 3),
        (0, "restart", "abort", 4),
        (2, "tokens", "retract", 5),
    ],
)
def test_kills_at_random_moments_leave_no_trace(
    tmp_path: Path, eta: int, opened: str, pause: str, seed: int
) -> None:
    """17 of the 85 kills each: of every process, at every moment, and Ctrl-C; with the last two
    seeds checkpoints are written while training continues."""
    random = Random(seed)
    config = tiny_config(
        tmp_path,
        f"total_train_steps={MANY}",
        f"eta={eta}",
        "save_every_steps=1",
        f"gconfig.max_new_tokens={40 if eta else 16}",  # one by one they take long
        f"checkpoint.open_groups={opened}",
        f"checkpoint.asynchronous={seed > 3}",
        f"rollout.pause_mode={pause}",
        "rollout.batch_order=bounded_lag",
        *([ONE_BY_ONE] if eta == 0 else []),
    )
    folder = RunFolder.create(config).path
    tokens = 0
    for kills in range(KILLS):
        kill = Kill(
            random.choice(["run", "run", "trainer", "engine", "pipeline", "stopped"]),
            random.choice(sorted(MOMENTS)),
            random.randint(1, 4),
            random.choice([0.0, 0.005, 0.02, 0.05]),
        )
        code = live(folder, kill)
        assert code != 0, f"{kill} came too late, after {kills} kills"
        saved = find_recovery(folder).saved if checkpoints_of(folder) else None
        tokens += 0 if saved is None else saved.running_tokens
    assert live(folder, None) == 0
    check_folder(folder, MANY, largest_lag=eta)
    assert trained_groups(folder) == Counter(range(MANY * GROUPS))
    if eta == 0:
        again = AGAIN if seed > 3 else ()
        assert comparable(folder, again) == comparable(do_run(config).folder, again)
    assert (tokens > 0) == (opened == "tokens")
    models = checkpoints(folder)
    for step in trained_samples(folder)[:: MANY // 6]:
        for sample in step:
            assert rescored_difference(models, sample)[0] < 1e-4


@pytest.mark.slow
def test_a_run_with_restarts_survives_the_kill_of_its_own_process(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "total_train_steps=25", "eta=2", "save_every_steps=1")
    file = tmp_path / "config.yaml"
    file.write_text(OmegaConf.to_yaml(config.model_dump()))
    command = [sys.executable, "-m", "areal_lab.cli.app", "train", str(file), "--restart", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as supervisor:
        folder = wait_for(lambda: next((tmp_path / "runs").glob("*/process.json"), None)).parent
        for step in (3, 7):
            wait_for(lambda step=step: len(trained_groups(folder)) >= step * GROUPS)
            (run,) = psutil.Process(supervisor.pid).children()
            run.kill()
            run.wait(GIVE_UP_S)
        out, err = supervisor.communicate(timeout=GIVE_UP_S)
    assert supervisor.returncode == 0
    assert Path(out.decode().splitlines()[-1]) == folder
    assert err.decode().count("signal SIGKILL; continuing it") == 2
    check_folder(folder, 25, largest_lag=25)
    assert trained_groups(folder) == Counter(range(25 * GROUPS))
    assert json.loads((folder / "summary.json").read_text())["recoveries"] == 2
