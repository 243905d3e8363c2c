"""Whole runs on hosts of this machine: the same results, and what is lost with a host."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from areal_lab.cluster.host import HostLost
from areal_lab.cluster.scheduler import LocalScheduler
from areal_lab.config.problem import ConfigError
from areal_lab.control.events import Train
from areal_lab.pipeline.state import RunState
from areal_lab.pipeline.train import resume_run
from areal_lab.resolve.resolved import resolve
from areal_lab.runlog.file import read_log_file
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from tests.ended import gone
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config

EXACT = (
    "eta=0",
    "rollout.max_running_requests=1",
    "rollout.engines=2",
    "total_train_steps=3",
    "evaluation.max_problems=0",
)
"""Responses depend on their seeds alone, and trained batches on these."""
SAVING = ("save_every_steps=1", "checkpoint.resumable=true")


def trained(folder: Path) -> list[dict[str, Any]]:
    """What was trained on, without what depends on the clock."""
    lines: list[dict[str, Any]] = []
    for file in sorted((folder / "trajectories").glob("step-*.jsonl")):
        lines += map(json.loads, file.read_text().splitlines())
    return lines


def agent_of(state: RunState, name: str) -> int:
    """Process id of a host's agent."""
    assert state.hosts is not None
    scheduler = state.hosts.hosts.scheduler
    assert isinstance(scheduler, LocalScheduler)
    return scheduler.agents[name].pid


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["auto", "never"])
def test_three_hosts_train_as_one_machine_and_one_machine_continues(
    tmp_path: Path, shared: str
) -> None:
    whole = do_run(tiny_config(tmp_path, *EXACT, *SAVING), reward_fn=even_digits)
    settings = ("cluster.n_nodes=3", f"cluster.shared_files={shared}", "total_train_steps=2")
    part = do_run(tiny_config(tmp_path, *EXACT, *SAVING, *settings), reward_fn=even_digits)
    for _ in (
        resumed := resume_run(
            part.folder, ["cluster.n_nodes=2", "total_train_steps=3"], reward_fn=even_digits
        )
    ):
        pass
    for ours, theirs in zip(metrics(resumed.folder), metrics(whole.folder), strict=True):
        for name in ("reward_mean", "loss", "grad_norm"):
            assert ours[name] == theirs[name], name
    assert trained(resumed.folder) == trained(whole.folder)
    logs = {file.name for file in (part.folder / "logs").iterdir()}
    assert {"h1-engine-0.log", "h2-engine-1.log", "h3-trainer.log", "host-h1.log"} <= logs


@pytest.mark.slow
def test_an_engine_lost_with_its_host_costs_no_sample(tmp_path: Path) -> None:
    state = RunState()
    killed: list[int] = []

    def kill(group: int, sample: int) -> int:
        if (group, sample) == (4, 0) and not killed:
            killed.append(agent_of(state, "h1"))
            os.kill(killed[0], signal.SIGKILL)
        return 5

    config = tiny_config(
        tmp_path,
        *EXACT,
        "cluster.n_nodes=3",
        "cluster.shared_files=never",
        "rollout.max_engine_restarts=1",
    )
    result = do_run(config, response_tokens=kill, reward_fn=even_digits, state=state)
    assert killed
    assert result.summary["engine_losses"] == 1
    assert sorted(line["group"] for line in trained(result.folder)) == list(range(9))
    log = read_log_file(result.folder / "events.jsonl")
    groups = [g for r in log.actions if isinstance(r.action, Train) for g in r.action.groups]
    assert sorted(groups) == list(range(9))
    assert all(gone(child.pid) for child in state.children)


@pytest.mark.slow
def test_a_trainer_lost_with_one_of_its_hosts_ends_the_run_which_continues(tmp_path: Path) -> None:
    state = RunState()

    def hang(group: int, sample: int) -> int:
        if (group, sample) == (7, 0):  # of the third batch: two are trained and saved
            os.kill(agent_of(state, "h3"), signal.SIGSTOP)
        return 5

    settings = (
        *EXACT,
        *SAVING,
        "cluster.n_nodes=3",
        "cluster.trainer_nodes=2",
        "allocation_mode=embedded:d2+fsdp:d2",
        "rollout.engines=1",
    )
    config = tiny_config(tmp_path, *settings)
    with pytest.raises(HostLost, match=r"trainer rank 1 is lost with its host: host h3 "):
        do_run(config, response_tokens=hang, reward_fn=even_digits, state=state)
    assert all(gone(child.pid) for child in state.children)
    (folder,) = (tmp_path / "runs").iterdir()
    for _ in (resumed := resume_run(folder, reward_fn=even_digits)):
        pass
    assert [step["step"] for step in metrics(resumed.folder)] == [1, 2, 3]
    assert [line["group"] for line in trained(folder)] == list(range(9))


def test_what_hosts_cannot_hold_is_refused_before_they_are_asked_for(tmp_path: Path) -> None:
    for settings, said in (
        (["cluster.n_nodes=2", "cluster.trainer_nodes=3"], "trainer_nodes is 3, but 2 hosts"),
        (
            [
                "cluster.n_nodes=2",
                "cluster.n_gpus_per_node=4",
                "allocation_mode=sglang:d6+fsdp:d3",
            ],
            "6 engines of 1 GPU each are asked for, but the hosts have h1: 4 GPUs",
        ),
        (["cluster.n_nodes=2", "cluster.heartbeat_s=4"], "lease_s is 10, but must be above 16"),
        (
            ["scheduler.type=manual", "cluster.n_nodes=2", "rollout.addresses=[http://10.0.0.9:1]"],
            "transfer is folder, but the trainer writes weights on its own host",
        ),
        (["cluster.n_nodes=2", "token_fields=true"], "token_fields is true, but the trainer"),
    ):
        with pytest.raises(ConfigError, match=said):
            resolve(tiny_config(tmp_path, *settings))


@pytest.mark.slow
def test_an_engine_that_joins_later_goes_to_a_spare_host(tmp_path: Path) -> None:
    """Hosts 1 and 2 generate and train; host 3 has no work until an engine joins."""
    state, stop, seats = RunState(), StopSignal(), set[str]()

    def on_step(report: StepReport) -> None:
        assert state.performer is not None
        assert state.coordinator is not None
        assert state.hosts is not None
        if report.step == 1:
            assert [host.name for host in state.hosts.hosts.spares] == ["h3"]
            assert state.performer.servers.add_engine() == 1
        if state.coordinator.engine_loads.get(1):
            seats.add(state.hosts.seat_of(1))
            stop.request()

    result = do_run(
        tiny_config(
            tmp_path,
            "eta=1",
            "cluster.n_nodes=3",
            "cluster.spare_nodes=1",
            "rollout.scaling.max_engines=2",
            "rollout.scaling.window_steps=1000",
            "total_train_steps=2000",
            "evaluation.max_problems=0",
        ),
        reward_fn=even_digits,
        state=state,
        stop=stop,
        on_step=on_step,
    )
    assert seats == {"h3"}
    assert result.summary["engines_added"] == 1
    assert result.summary["engine_losses"] == result.summary["host_losses"] == 0
