"""Engines join and leave a real run: every group is trained on once, and no token is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import EngineJoined, EngineRetired, StartGroup, Train, TrainStepDone
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.pipeline.drive import ScaledRun
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.run import RunResult
from areal_lab.pipeline.servers.pool import EngineSource, ServerPool
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.check import check_settings
from areal_lab.runlog.activity import RETIRED, idle_by_cause
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.records import Log
from areal_lab.runlog.replay import check_replay
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, long_tail, tiny_config, trained_samples

ON = ("rollout.scaling.max_engines=2", "rollout.scaling.window_steps=1")


def scaled_run(
    folder: Path, then: Callable[[RunPerformer, Coordinator], bool], *overrides: str
) -> tuple[RunResult, Log]:
    """A run that generates slower than it trains, until `then` is true after a step."""
    state, stop = RunState(), StopSignal()

    def on_step(report: StepReport) -> None:
        del report
        assert state.performer is not None
        assert state.coordinator is not None
        if then(state.performer, state.coordinator):
            stop.request()

    result = do_run(
        tiny_config(
            folder,
            *ON,
            "rollout.scaling.cooldown_steps=0",
            "rollout.scaling.tolerance=0.01",
            "eta=1",
            "gconfig.max_new_tokens=120",
            "total_train_steps=2000",
            "evaluation.max_problems=0",
            *overrides,
        ),
        on_step=on_step,
        response_tokens=long_tail,
        reward_fn=even_digits,
        state=state,
        stop=stop,
    )
    return result, read_log_file(result.folder / "events.jsonl")


@pytest.mark.parametrize(("wanted", "calls"), [(5, "++"), (3, ""), (1, "--")])
def test_a_pool_follows_the_rule_at_the_end_of_a_step(wanted: int, calls: str) -> None:
    found: list[str] = []
    pool = SimpleNamespace(
        alive=(0, 1, 2),
        changing=False,
        add_engine=lambda: found.append("+"),
        retire_engine=lambda: found.append("-"),
    )
    watch = SimpleNamespace(note=lambda _: None, step_done=lambda *_, **__: wanted)
    log = SimpleNamespace(event=lambda _: None, action=lambda _: None)
    run = ScaledRun(
        log=cast(Any, log), watch=cast(Any, watch), pool=pool, generated_tokens=lambda: 7
    )
    run.event(EngineRetired(1))
    assert not found
    run.event(TrainStepDone(1))
    assert "".join(found) == calls


@pytest.mark.slow
def test_a_run_grows_by_the_rule_shrinks_and_loses_nothing(tmp_path: Path) -> None:
    steps_after = 0

    def then(performer: RunPerformer, coordinator: Coordinator) -> bool:
        nonlocal steps_after
        if coordinator.engine_loads.get(1):
            assert performer.servers.retire_engine() == 1
        steps_after += performer.counts()["kept_tokens"] > 0  # of groups that moved
        return steps_after > 3

    result, log = scaled_run(tmp_path, then)
    summary, events = result.summary, [record.event for record in log.events]
    assert EngineJoined(1) in events
    assert EngineRetired(1) in events
    assert summary["engines_added"] >= 1
    assert summary["engines_retired"] >= 1
    assert summary["engine_losses"] == summary["engine_restarts"] == 0
    assert summary["discarded_tokens"] == 0
    actions = [record.action for record in log.actions]
    assert any(isinstance(one, StartGroup) and one.engine == 1 for one in actions)
    trained = Counter(g for one in actions if isinstance(one, Train) for g in one.groups)
    assert trained
    assert set(trained.values()) == {1}
    samples = [sample for step in trained_samples(result.folder) for sample in step]
    assert len(samples) == 4 * len(trained)
    for sample in samples:  # none was cut off, or generated twice
        tokens = sum(len(part["tokens"]) for part in sample["parts"])
        assert tokens == long_tail(sample["group"], sample["sample"])
    assert check_replay(log).agrees
    assert idle_by_cause(log)["engine 1"].idle_s[RETIRED] > 0


@pytest.mark.slow
def test_a_run_continues_without_an_engine_that_dies_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ServerPool.add_engine

    def broken(source: EngineSource) -> EngineSource:
        async def open_() -> EngineProcess:
            engine = await source()
            assert isinstance(engine, EngineProcess)
            os.kill(engine.child.pid, signal.SIGKILL)
            return engine

        return open_

    def add_broken(pool: ServerPool) -> int | None:
        pool.later = {number: broken(source) for number, source in pool.later.items()}
        return add(pool)

    monkeypatch.setattr(ServerPool, "add_engine", add_broken)
    result, log = scaled_run(tmp_path, lambda run, _: run.counts()["engine_start_failures"] > 0)
    assert result.summary["engine_start_failures"] >= 1
    assert result.summary["engines_added"] == result.summary["engine_losses"] == 0
    assert result.summary["steps"] > 0
    assert not [record for record in log.events if isinstance(record.event, EngineJoined)]
    trained = [g for one in log.actions if isinstance(one.action, Train) for g in one.action.groups]
    assert len(trained) == len(set(trained)) == 3 * result.summary["steps"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.engines=3"], "starts with 3 engines, but rollout.scaling keeps 1"),
        (["eta=0"], "schedule asynchronous with eta 0 makes the trainer wait"),
        (["rollout.addresses=[http://127.0.0.1:9]"], "no engines beside those of"),
    ],
)
def test_what_cannot_scale_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_settings(tiny_config(tmp_path, *ON, *overrides))
