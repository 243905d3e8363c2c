"""Whole runs with faults of rewards, sandbox, agents and gateway: real processes, a tiny model.

A step of these runs begins when the one before it has ended (eta 0), so that workers are idle while
weights are loaded and checkpoints saved.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from omegaconf import OmegaConf

from areal_lab.agents import tool_use
from areal_lab.agents.agent import Agent
from areal_lab.agents.tool_use import Call, Notation
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId
from areal_lab.engines.client.resubmit import PartialSamples
from areal_lab.engines.protocol import Generated, GenerateRequest
from areal_lab.host import asgi
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.run import RunResult
from areal_lab.pipeline.state import RunState
from areal_lab.rewards.service import RewardError, RewardService
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.replay import check_replay
from areal_lab.shell.step_report import StepReport
from tests.fault_lab import programs
from tests.fault_lab.parts import (
    AGENT_ASKING,
    AGENT_BETWEEN,
    AGENT_HUNG,
    AGENT_IDLE,
    AGENT_IDLE_HUNG,
    AGENT_LOADING,
    AGENT_SAVING,
    AGENT_STREAM,
    ENGINE_TOOL,
    ENGINE_TURN,
    GATEWAY_DEAF,
    GATEWAY_KILLED,
    KEEPER_HUNG,
    KEEPER_KILLED,
    PROGRAM_KILLED,
    WORKER_HUNG,
    WORKER_IDLE,
    WORKER_IDLE_HUNG,
    WORKER_KILLED,
    WORKER_LOADING,
    WORKER_SAVING,
    PartFault,
)
from tests.pipeline.kept_keys import keep_keys
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    rescored_difference,
    tiny_config,
    trained_samples,
)
from tests.warm import ForkedPopen

Counts = dict[str, int]
Counted = dict[PartFault, Counts]
"""What a run counted of each of its faults."""
HUNG_S: Final = 3.0
"""`reward.timeout_s` and `timeout_s` of agents in these runs, on a busy machine."""
STEPS, GROUPS, SAMPLES = 4, 2, 3
VICTIM: EngineId = 1
SHORT, LONG = 8, 60
"""Tokens of a response that an engine is stopped in: at least, and at most."""
BOUND_MS: Final = 20_000
MEASURED: Final = ("engine_losses", "resubmitted_samples", "kept_tokens")
TEMPLATE: Final = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}={{ m.content }}<end>{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


# --- the runs ------------------------------------------------------------------------------------


def faults_of_rewards(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """Reward workers and sandboxes, busy and idle."""
    claims, state = prepare(folder, patch), RunState()
    idle = IdleKills(state, lambda run: run.rollout.rewards)
    idle.arm(patch, WORKER_LOADING, WORKER_SAVING)
    config = faulty_config(
        folder,
        "reward.fn=tests.fault_lab.programs:score",
        f"reward.kwargs={{folder: '{claims}'}}",
        f"reward.timeout_s={HUNG_S}",
        "reward.workers=2",
    )
    result = do_run(config, on_step=lambda _: idle.kill(WORKER_IDLE), state=state)
    faults = [
        *(WORKER_KILLED, WORKER_HUNG, KEEPER_KILLED, KEEPER_HUNG, PROGRAM_KILLED),
        *(WORKER_IDLE, WORKER_LOADING, WORKER_SAVING),
    ]
    assert {file.name for file in claims.iterdir()} == set(programs.SCORING)
    assert idle.killed.keys() == {WORKER_IDLE, WORKER_LOADING, WORKER_SAVING}
    check_run(result, folder, claims)
    assert result.summary["filtered_by_reason"] == {"reward error": 2, "reward timeout": 2}
    return counted(result.summary, faults)


def faults_of_agents(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """Agents in processes, busy and idle, and an engine that dies in a second turn."""
    claims, state = prepare(folder, patch), RunState()
    patch.setenv(programs.FOLDER, str(claims))
    patch.setenv(programs.KEY_VARIABLE, "a-key-that-agents-must-not-get")
    idle = IdleKills(state, lambda run: agent_of(run)._processes)
    idle.arm(patch, AGENT_LOADING, AGENT_SAVING)
    turns = Turns(state, dies_in=f"{programs.SECOND}=")
    turns.arm(patch)

    keys = keep_keys(patch)

    def on_step(report: StepReport) -> None:
        keys.look(report)
        idle.kill(AGENT_IDLE)
        turns.may_kill_engine = report.step >= 2

    config = faulty_config(
        folder,
        "rollout.workflow={name: agent, fn: 'tests.fault_lab.programs:two_turns', "
        f"mode: subprocess, workers: 3, timeout_s: {HUNG_S}}}",
        "rollout.engines=2",
        f"gconfig.max_new_tokens={LONG}",
        "save_every_steps=1",
    )
    result = do_run(config, on_step=on_step, state=state)
    faults = [
        *(AGENT_BETWEEN, AGENT_ASKING, AGENT_STREAM, AGENT_HUNG),
        *(AGENT_IDLE, AGENT_LOADING, AGENT_SAVING, ENGINE_TURN),
    ]
    assert {file.name for file in claims.iterdir()} == set(programs.ACTING)
    assert idle.killed.keys() == {AGENT_IDLE, AGENT_LOADING, AGENT_SAVING}
    check_run(result, folder, claims)
    check_conversations(result, turns=2)
    assert keys.of_sessions > STEPS * GROUPS * SAMPLES
    keys.assert_not_in(result.folder)
    return counted(result.summary, faults)


def worker_hung_while_idle(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """A reward worker that hangs between two steps."""
    return _hung_while_idle(
        folder,
        patch,
        WORKER_IDLE_HUNG,
        lambda run: run.rollout.rewards,
        "reward.fn=tests.pipeline.rewards:even_digits",
        f"reward.timeout_s={HUNG_S}",
        "reward.workers=2",
    )


def agent_hung_while_idle(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """An agent's process that hangs between two steps."""
    return _hung_while_idle(
        folder,
        patch,
        AGENT_IDLE_HUNG,
        lambda run: agent_of(run)._processes,
        "rollout.workflow={name: agent, fn: 'tests.pipeline.programs:two_questions', "
        f"mode: subprocess, workers: 3, timeout_s: {HUNG_S}}}",
    )


def _hung_while_idle(
    folder: Path,
    patch: pytest.MonkeyPatch,
    fault: PartFault,
    of: Callable[[RunPerformer], RewardService],
    *overrides: str,
) -> Counted:
    claims, state = prepare(folder, patch), RunState()
    hung: list[int] = []

    def on_step(report: StepReport) -> None:
        if report.step == 1:
            assert state.performer is not None
            worker = next(one for one in of(state.performer)._alive if one.usable)
            os.kill(worker.child.pid, signal.SIGSTOP)
            hung.append(worker.child.pid)

    result = do_run(faulty_config(folder, *overrides), on_step=on_step, state=state)
    check_run(result, folder, claims)
    check_nothing_is_left(folder, hung)
    return counted(result.summary, [fault])


def engine_lost_between_tools(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """An engine that dies in the second turn of a sample that uses a tool."""
    claims, state = prepare(folder, patch), RunState()
    # The model cannot write calls: each of its texts counts as one, and as complete.
    call = Call("calculator", {"expression": "9 + 9"})
    notation = Notation(lambda _: [call], lambda _, results: f"{results[0]}\n=\n")
    patch.setattr(tool_use, "lines", lambda *_, **__: notation)
    patch.setattr(tool_use, "ended", lambda *_: "stop")
    turns = Turns(state, dies_in="18\n=\n")
    turns.arm(patch)

    def on_step(report: StepReport) -> None:
        turns.may_kill_engine = report.step >= 2

    config = faulty_config(
        folder,
        "rollout.workflow={name: tool_use, max_turns: 2}",
        "reward.fn=tests.pipeline.rewards:even_digits",
        "rollout.engines=2",
        f"gconfig.max_new_tokens={LONG}",
        "save_every_steps=1",
    )
    result = do_run(config, on_step=on_step, state=state)
    check_run(result, folder, claims)
    check_conversations(result, turns=2)
    return counted(result.summary, [ENGINE_TOOL])


def gateway_goes_deaf(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """The gateway's listening socket is closed; connections that there are stay."""
    prepare(folder, patch)
    gateways: list[asgi.GuestServer] = []
    startup = asgi.GuestServer.startup

    async def noted(gateway: asgi.GuestServer, sockets: Any = None) -> None:
        await startup(gateway, sockets)
        gateways.append(gateway)

    def on_step(_: StepReport) -> None:
        for listener in gateways[0].servers:
            listener.close()

    patch.setattr(asgi.GuestServer, "startup", noted)
    config = faulty_config(
        folder, "rollout.workflow={name: agent, fn: 'tests.pipeline.programs:two_questions'}"
    )
    with pytest.raises(RewardError, match=r"failed or timed out in 11 of .*(?s:.*)refused"):
        do_run(config, on_step=on_step)
    (run,) = (folder / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "refused" in summary["error"]
    assert summary["workflow"]["error"] >= 11
    check_nothing_is_left(folder, ())
    return {GATEWAY_DEAF: {}}


def run_is_killed(folder: Path, patch: pytest.MonkeyPatch) -> Counted:
    """A run is killed while agents compute in C, where none of their threads can notice it."""
    claims = prepare(folder, patch)
    patch.setenv(programs.FOLDER, str(claims))
    patch.setenv("TMPDIR", str(folder / "tmp"))
    config = faulty_config(
        folder,
        "rollout.workflow={name: agent, fn: 'tests.fault_lab.programs:keeps_all_threads', "
        "mode: subprocess, workers: 2}",
    )
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config.model_dump()))
    run = ForkedPopen(
        [sys.executable, "-m", "areal_lab.cli.app", "train", str(folder / "config.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while len(busy := list(claims.iterdir())) < 2:
            assert run.poll() is None, "the run ended early"
            time.sleep(programs.POLL_S)
        children = [one.pid for one in psutil.Process(run.pid).children(recursive=True)]
        assert {int(file.name) for file in busy} < set(children)
        memory = list(SHARED_MEMORY.glob(f"areal_lab-{run.pid}-*"))
        assert list((folder / "tmp").iterdir())
    finally:
        run.kill()
        run.wait()
    check_nothing_is_left(folder, children)
    assert memory
    assert not [one for one in memory if one.exists()]
    return {GATEWAY_KILLED: {}}


# --- faults --------------------------------------------------------------------------------------


@dataclass
class IdleKills:
    """Kills every idle worker of a service, once at each moment."""

    state: RunState
    of: Callable[[RunPerformer], RewardService]
    killed: Counter[PartFault] = field(default_factory=Counter)

    @property
    def service(self) -> RewardService:
        """The one whose workers are killed."""
        assert self.state.performer is not None
        return self.of(self.state.performer)

    def kill(self, fault: PartFault) -> None:
        """Kill them if this is the first such moment; returns when they are dead."""
        if self.killed[fault]:
            return
        for worker in list(self.service._idle._queue):  # type: ignore[attr-defined]
            if worker is not None and worker.usable:
                kill_and_wait(worker.child.pid)
                self.killed[fault] += 1

    def arm(self, patch: pytest.MonkeyPatch, loading: PartFault, saving: PartFault) -> None:
        """Kill while weights are loaded, and while a checkpoint is saved."""
        push, save = RunPerformer.push_weights, RunPerformer.save

        async def push_weights(performer: RunPerformer, version: int) -> None:
            pushing = asyncio.ensure_future(push(performer, version))
            await asyncio.sleep(0)  # it has begun
            self.kill(loading)
            await pushing

        async def save_checkpoint(performer: RunPerformer, version: int) -> Any:
            saving_now = asyncio.ensure_future(save(performer, version))
            await asyncio.sleep(0)
            self.kill(saving)
            return await saving_now

        patch.setattr(RunPerformer, "push_weights", push_weights)
        patch.setattr(RunPerformer, "save", save_checkpoint)


@dataclass
class Turns:
    """Strikes while an engine is stopped in the middle of a turn."""

    state: RunState
    dies_in: str
    """What ends the prompt of the turn in which the victim dies."""
    may_kill_engine: bool = False
    killed: int = 0
    """Engines."""
    _original: Callable[..., Any] = Rollout._generate_one

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Watch every turn."""

        async def generate(
            rollout: Rollout, engine: EngineId, request: GenerateRequest, partial: PartialSamples
        ) -> Generated:
            strike = self._strike(rollout, engine, request)
            turn = asyncio.ensure_future(self._original(rollout, engine, request, partial))
            if strike is None:
                generated: Generated = await turn
                return generated
            child = self._engine(engine)
            try:
                await stopped_in_the_middle(rollout, engine, request, turn, child)
                strike()
                result: Generated = await turn
                return result
            finally:
                turn.cancel()
                signal_group(child, signal.SIGCONT)

        patch.setattr(Rollout, "_generate_one", generate)

    def _strike(
        self, rollout: Rollout, engine: EngineId, request: GenerateRequest
    ) -> Callable[[], None] | None:
        """What is to happen in this turn, if anything is."""
        if not request.request_id.startswith("train"):
            return None
        prompt = rollout.codec.decode(request.prompt_tokens)
        agent = programs.process_that_asks(prompt)
        if agent is not None:
            return lambda: kill_and_wait(agent)
        second = prompt.endswith(self.dies_in)
        if self.may_kill_engine and engine == VICTIM and second and not self.killed:
            self.killed += 1
            return lambda: signal_group(self._engine(VICTIM), signal.SIGKILL)
        return None

    def _engine(self, number: EngineId) -> int:
        assert self.state.performer is not None
        child = self.state.performer.servers.alive[number].child
        assert child is not None
        return child.pid


async def stopped_in_the_middle(
    rollout: Rollout,
    engine: EngineId,
    request: GenerateRequest,
    turn: asyncio.Future[Any],
    child: int,
) -> None:
    """Stop an engine's process (SIGSTOP) while it generates this turn.

    The engine runs for `POLL_S` at a time, and stands while this loop reads what it sent: a busy
    loop could otherwise miss the whole turn.
    """
    while not turn.done():
        signal_group(child, signal.SIGSTOP)
        await asyncio.sleep(programs.POLL_S)
        received = rollout.engines.engine(engine).received([request.request_id])
        tokens = sum(len(s.tokens) for one in received.values() for s in one.segments)
        if tokens >= SHORT:
            return
        signal_group(child, signal.SIGCONT)
        time.sleep(programs.POLL_S)
    raise AssertionError("the turn ended before its engine was stopped")


def kill_and_wait(process: int) -> None:
    """Kill a process, and return when it is dead."""
    descriptor = os.pidfd_open(process)
    try:
        os.kill(process, signal.SIGKILL)
        assert select.select([descriptor], [], [], BOUND_MS / 1e3)[0]
    finally:
        os.close(descriptor)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, unless it has ended."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass


def agent_of(performer: RunPerformer) -> Agent:
    """The agent of a run."""
    workflow = performer.rollout.workflow
    assert isinstance(workflow, Agent)
    return workflow


# --- settings and checks -------------------------------------------------------------------------


def prepare(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A folder for claims, and one for temporary files."""
    for name in ("claims", "tmp"):
        (folder / name).mkdir()
    patch.setattr("areal_lab.host.processes.STOP_GRACE_S", 0.2)
    patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    return folder / "claims"


def faulty_config(folder: Path, *overrides: str) -> TrainConfig:
    """A few synchronous steps."""
    config = tiny_config(
        folder,
        f"total_train_steps={STEPS}",
        f"dataset.batch_size={GROUPS}",
        f"gconfig.n_samples={SAMPLES}",
        "eta=0",
        "save_every_steps=2",
        "evaluation.max_problems=0",
        *overrides,
    )
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return config


def check_run(result: RunResult, folder: Path, claims: Path) -> None:
    """What holds however many faults there were: no sample is lost or trained on twice, no token is
    missing, and nothing stays behind."""
    assert result.summary["status"] == "complete"
    seen = [(s["group"], s["sample"]) for step in trained_samples(result.folder) for s in step]
    assert len(set(seen)) == STEPS * GROUPS * SAMPLES
    log = read_log_file(result.folder / "events.jsonl")
    replay = check_replay(log)
    assert replay.agrees, replay.difference
    for group in log.groups:
        if group.turns:
            sampled = sum(turn.tokens for turn in group.turns)
            assert sampled == sum(tokens for one in group.segments for _, tokens in one)
    check_nothing_is_left(folder, programs.processes_of(claims))


def check_nothing_is_left(folder: Path, processes: Iterable[int]) -> None:
    """No process, no temporary file, no shared memory."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], BOUND_MS / 1e3)[0], f"{process} lives on"
        finally:
            os.close(descriptor)
    assert not list((folder / "tmp").iterdir())
    assert not list(SHARED_MEMORY.glob(f"areal_lab-{os.getpid()}-*"))


def check_conversations(result: RunResult, *, turns: int) -> None:
    """Every token's log-prob is that of the version that it names."""
    models = checkpoints(result.folder)
    for step in trained_samples(result.folder):
        for sample in step:
            assert len(sample["turns"]) == turns
            assert rescored_difference(models, sample)[0] < 1e-4


def counted(summary: Mapping[str, Any], faults: Sequence[PartFault]) -> Counted:
    """Check that the faults together count what each of them should."""
    expected: Counter[str] = Counter()
    for fault in faults:
        expected.update(fault.counts)
    names = {*expected, "rewards.error", "rewards.timeout", "filtered", "engine_losses"}
    found = {name: value_of(summary, name) for name in names}
    wanted = {name: expected[name] for name in names}
    assert found == wanted, (found, wanted)
    assert summary["engine_restarts"] == summary["version_mismatches"] == 0
    measured = {name: value_of(summary, name) for name in MEASURED}
    if any(fault.measured for fault in faults):
        assert all(measured.values()), measured
    return {fault: measured if fault.measured else dict(fault.counts) for fault in faults}


def value_of(summary: Mapping[str, Any], name: str) -> int:
    """A number by its dotted name; 0 if it is not there."""
    value: Any = summary
    for part in name.split("."):
        value = (value or {}).get(part, 0)
    return int(value)
