"""Whole runs on emulated machines whose hosts are killed, hang, or are cut off and healed.

A step begins when the one before it has ended (eta 0) and enough engines are there, so that the
faults of a run come one after the other, each at its moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from omegaconf import OmegaConf

from areal_lab.cluster.host import HostLost
from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Train
from areal_lab.controllers.host_pool import host_pool
from areal_lab.controllers.rollout import AsyncRolloutController
from areal_lab.controllers.train import AsyncTrainController
from areal_lab.pipeline.progress import Display, Silent
from areal_lab.pipeline.resume.recovery import Recovery, find_recovery
from areal_lab.pipeline.run import RunResult, prepare, prepare_recovery, run
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.replay import check_replay
from tests.cluster.namespaces import Network
from tests.fault_lab.controller import EXACT_TOKENS
from tests.fault_lab.host_faults import (
    CONTROLLER_FAULTS,
    ENGINE_FAULTS,
    GATEWAY_FAULTS,
    ROLLOUT_FAULTS,
    TRAINER_FAULTS,
    Blow,
    HostFault,
    Moment,
)
from tests.fault_lab.host_client import CLIENTS
from tests.fault_lab.held_rewards import RELEASED, WANTED, who_scores
from tests.fault_lab.machines import (
    STANDING,
    Departures,
    Machine,
    connections_of,
    signal_if_there,
)
from tests.fault_lab.moments import POLL_S, Held, Moments
from tests.fault_lab.part_runs import TEMPLATE
from tests.pipeline.rewards import even_digits
from tests.pipeline.test_online_run import StartsAProgram
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    rescored_difference,
    tiny_config,
    trained_samples,
)

GROUPS, SAMPLES, TOKENS = 2, 3, 96
STEPS: Final = 200
"""More than the faults of a run take; it is stopped after them."""
SEEN_S: Final = 5.0
"""A lost host is seen within this time."""
LEASE_S: Final = 10.0
"""`cluster.lease_s`: a host ends what it runs for a controller that is lost."""
BUSY_S: Final = 10.0
"""Allowed besides, on a busy machine."""
EXACT: Final = ("rollout.max_running_requests=1", "checkpoint.resumable=true")
"""Responses depend on their seeds alone, and trained batches on these."""
PORT: Final = 6380
"""At which hosts join a run that has a machine of its own."""
ON_TWO_HOSTS: Final = (
    "cluster.n_nodes=2",
    "cluster.shared_files=never",
    "scheduler.type=manual",
    "scheduler.this_host=false",
)
ALONE: Final = ("cluster.n_nodes=1", "cluster.address=", "cluster.port=0", "scheduler.type=local")
ROLLOUT_COUNTS: Final = ("host_losses", "worker_losses", "lost_groups", "discarded_tokens")
COUNTS: Final = (
    *("host_losses", "engine_losses", "resubmitted_samples", "kept_tokens", "discarded_tokens"),
)
ESTABLISHED: Final = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run measured of a fault."""

    seen_s: float
    """From the fault until the run counts the host as lost."""
    gone_s: float
    """From the fault until the last process of the host has ended."""
    counts: dict[str, int]


Measured = dict[HostFault, Seen]


# --- an engine's host ----------------------------------------------------------------------------


def faults_of_engine_hosts(network: Network, folder: Path, patch: pytest.MonkeyPatch) -> Measured:
    """Every fault of an engine's host, at every moment of a run, one after the other."""
    machines = machines_of(network)
    struck = EngineFaults(list(ENGINE_FAULTS), machines, RunState(), StopSignal(), Heard())
    join, settings = meeting_point(network, patch, hosts=len(machines))
    struck.boot = lambda machine: machine.boot(join, os.environ[TOKEN_VARIABLE])
    struck.arm(patch)
    config = fault_config(folder, *settings, "rollout.engines=4", "rollout.max_engine_restarts=99")
    result = do_run(
        config,
        response_tokens=lambda *_: TOKENS,
        reward_fn=even_digits,
        display=struck.heard,
        state=struck.state,
        stop=struck.stop,
    )
    struck.departures.wait()
    end_of_all(machines)
    assert not [text for _, text in struck.heard.notes if "did not come back" in text]
    summary = result.summary
    assert summary["host_losses"] == summary["engine_losses"] == len(ENGINE_FAULTS)
    check_trained_once(result.folder)
    models = checkpoints(result.folder)
    for step in trained_samples(result.folder):
        for sample in step:
            assert rescored_difference(models, sample)[0] < 1e-4
    return struck.measured()


@dataclass(slots=True)
class EngineFaults:
    """Strikes the hosts of engines, each fault at its moment."""

    left: list[HostFault]
    machines: dict[str, Machine]
    state: RunState
    stop: StopSignal
    heard: Heard
    boot: Callable[[Machine], Any] = lambda _: None
    departures: Departures = field(default_factory=Departures)
    seen_s: dict[HostFault, float] = field(default_factory=dict)
    before: dict[HostFault, dict[str, int]] = field(default_factory=dict)
    now: HostFault | None = None
    """A fault that has not been seen yet."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Watch for the moments of the faults, and boot the machines when the run is there."""
        Moments(self.state, self._claim, self._strike, self._enough_engines).arm(patch)
        self.heard.on_waiting = self._boot_all

    async def _boot_all(self) -> None:
        await asyncio.gather(*(self.boot(machine) for machine in self.machines.values()))

    async def _enough_engines(self) -> None:
        if self.left or self.now:
            await until(lambda: not self.now and len(self._alive) > 1, "two engines are there")
        elif not self.tasks:
            self.stop.request()

    @property
    def _alive(self) -> dict[int, Any]:
        assert self.state.performer is not None
        return self.state.performer.servers.alive

    def _claim(self, moment: Moment) -> bool:
        ready = self.now is None and self.state.performer is not None and len(self._alive) > 1
        if ready and self.left and self.left[0].moment is moment:
            self.now = self.left.pop(0)
            return True
        return False

    async def _strike(self, held: Held) -> None:
        fault = self.now
        assert fault is not None
        assert self.state.performer is not None
        number = max(self._alive) if held.engine is None else held.engine
        child: Any = self._alive[number].child
        machine = self.machines[child.host.name]
        self.before[fault] = self.state.performer.counts()
        began_s = time.monotonic()
        struck = strike(machine, fault.blow)
        if fault.blow is Blow.KILLED:
            self.departures.expect(fault.name, struck, began_s)
        if fault.blow is Blow.CUT and held.engine is not None:
            held.release()  # what it sends from here on is late
        port = int(str(self._alive[number].client.base_url).rpartition(":")[2])
        await self.heard.until(f"host {machine.name} ", "is lost")
        self.seen_s[fault] = time.monotonic() - began_s
        if held.engine is None:
            held.release()
        self.now = None
        after = self._afterwards(fault, machine, child.host, struck, began_s, port)
        task = asyncio.create_task(after)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _afterwards(
        self,
        fault: HostFault,
        machine: Machine,
        host: Any,
        struck: list[int],
        began_s: float,
        port: int,
    ) -> None:
        """Bring the host back; what it still sends is late."""
        await until(lambda: not talks_to(machine.host.address, port), "its connections are closed")
        if fault.blow is Blow.KILLED:
            await until(lambda: fault.name in self.departures.gone_s, "all of it is dead")
            await machine.end()
            await self.boot(machine)
            return
        late = fault.blow is Blow.CUT and fault.moment is Moment.GENERATING
        assert machine.late_bytes() or not late, "an answer is on its way"
        machine.wake(struck) if fault.blow is Blow.HUNG else machine.heal()
        self.departures.expect(fault.name, struck[STANDING:], began_s)
        await until(lambda: not machine.late_bytes(), "it has arrived, or was refused")

    def measured(self) -> Measured:
        """By fault."""
        assert self.state.performer is not None
        snapshots = [*self.before.values(), self.state.performer.counts()]
        return {
            fault: Seen(
                self.seen_s[fault],
                self.departures.gone_s[fault.name],
                {name: after[name] - before[name] for name in COUNTS},
            )
            for fault, before, after in zip(self.before, snapshots, snapshots[1:], strict=False)
        }


# --- the trainer's host --------------------------------------------------------------------------


def faults_of_trainer_hosts(network: Network, folder: Path, patch: pytest.MonkeyPatch) -> Measured:
    """One fault of the trainer's host after the other; each ends the run, which then continues."""
    machines = machines_of(network)
    join, settings = meeting_point(network, patch, hosts=2)
    steps = len(TRAINER_FAULTS) + 2
    exact = (*EXACT, f"total_train_steps={steps}")
    alone = run_here(fault_config(folder / "alone", *exact))
    departures, measured, run_folder = Departures(), Measured(), None
    for fault in (*TRAINER_FAULTS, None):
        one = TrainerFault(fault, machines, join, departures)
        with pytest.MonkeyPatch.context() as armed:
            one.arm(armed)
            config = fault_config(folder, *exact, *settings)
            if fault is None:
                result = one.run(config, run_folder)
                break
            with pytest.raises(HostLost, match="trainer is lost with its host"):
                one.run(config, run_folder)
        (run_folder,) = (folder / "runs").iterdir()
        one.bring_back(run_folder)
        measured[fault] = one.seen_s, one.counts
    departures.wait()
    end_of_all(machines)
    assert result.summary["status"] == "complete"
    check_trained_once(result.folder)
    assert trained_samples(result.folder) == trained_samples(alone)
    return {
        fault: Seen(seen_s, departures.gone_s[fault.name], counts)
        for fault, (seen_s, counts) in measured.items()
    }


@dataclass(slots=True)
class TrainerFault:
    """Strikes the host of the trainer once, or not at all."""

    fault: HostFault | None
    machines: dict[str, Machine]
    join: str
    departures: Departures
    heard: Heard = field(default_factory=lambda: Heard())
    state: RunState = field(default_factory=RunState)
    seen_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    _left: bool = True
    _began_s: float = 0.0
    _machine: Machine | None = None
    _struck: list[int] = field(default_factory=list)
    _first: int | None = None
    """The newest checkpoint when the run began; 0 without one."""

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Watch for the moment, and boot the machines that are off when the run is there."""
        Moments(self.state, self._claim, self._strike, copying=True).arm(patch)
        self.heard.on_waiting = self._boot_all

    def run(self, config: TrainConfig, folder: Path | None) -> RunResult:
        """Begin a run, or continue one."""
        if folder is None:
            return run_through(config, None, self.heard, self.state)
        recovery = find_recovery(folder)
        return run_through(recovery.config, recovery, self.heard, self.state)

    def bring_back(self, run_folder: Path) -> None:
        """What was struck is there again; what it still sends is for a run that has ended."""
        machine, fault = self._machine, self.fault
        assert machine is not None and fault is not None
        summary = json.loads((run_folder / "summary.json").read_text())
        assert summary["status"] == "failed"
        self.counts = {name: summary[name] - self.counts[name] for name in COUNTS}
        lost = f"host {machine.name} "
        notes = [at for at, text in self.heard.notes if text.startswith(lost) and "is lost" in text]
        self.seen_s = next(at for at in notes if at > self._began_s) - self._began_s
        if fault.blow is Blow.KILLED:
            return
        late = fault.blow is Blow.CUT and machine.late_bytes()
        assert late or fault.blow is Blow.HUNG, "a reply is on its way"
        machine.wake(self._struck) if fault.blow is Blow.HUNG else machine.heal()
        self.departures.expect(fault.name, self._struck[STANDING:], self._began_s)

    async def _boot_all(self) -> None:
        off = [machine for machine in self.machines.values() if not machine.running]
        for machine in off:
            await machine.end()
        await asyncio.gather(*(one.boot(self.join, os.environ[TOKEN_VARIABLE]) for one in off))

    def _claim(self, moment: Moment) -> bool:
        performer = self.state.performer
        if self.fault is None or performer is None or not self._left:
            return False
        newest = performer.last_checkpoint or 0
        if self._first is None:
            self._first = newest
        if newest > self._first and moment is self.fault.moment:
            self._left = False
            return True
        return False

    async def _strike(self, held: Held) -> None:
        fault, hosts, performer = self.fault, self.state.hosts, self.state.performer
        assert fault is not None and hosts is not None and performer is not None
        assert hosts.trainer_host is not None
        self._machine = machine = self.machines[hosts.trainer_host.name]
        self.counts = performer.counts()
        self._began_s = time.monotonic()
        self._struck = strike(machine, fault.blow)
        if fault.blow is Blow.KILLED:
            self.departures.expect(fault.name, self._struck, self._began_s)
        if fault.blow is Blow.CUT or held.engine is not None:
            held.release()
        await asyncio.Event().wait()  # the run ends


def run_here(config: TrainConfig) -> Path:
    """The folder of a run on this machine, without faults."""
    return run_through(config, None, Silent(), RunState()).folder


def run_through(
    config: TrainConfig,
    recovery: Recovery | None,
    display: Display,
    state: RunState,
    reward_fn: RewardFunction | None = even_digits,
) -> RunResult:
    """Run to the end, from the beginning or from the newest checkpoint."""
    checked = (
        prepare(config) if recovery is None else prepare_recovery(recovery, None, reward_fn, None)
    )
    return asyncio.run(
        run(
            config,
            checked,
            on_step=lambda _: None,
            display=display,
            stop=StopSignal(),
            reward_fn=reward_fn,
            response_tokens=lambda *_: EXACT_TOKENS,
            state=state,
            recovery=recovery,
        )
    )


# --- the controller's host -----------------------------------------------------------------------


def faults_of_controller_hosts(
    network: Network, folder: Path, patch: pytest.MonkeyPatch
) -> Measured:
    """One run for each fault, on three machines of its own; each is then continued here."""
    machines = list(machines_of(network).values())
    patch.setenv(TOKEN_VARIABLE, secrets.token_urlsafe())
    exact = (*EXACT, "total_train_steps=3", "reward.fn=tests.fault_lab.held_rewards:held")
    rewards = f"reward.kwargs={{folder: '{folder}'}}"
    alone = run_here(fault_config(folder / "alone", *exact, rewards))
    faults = (*CONTROLLER_FAULTS, *GATEWAY_FAULTS)
    runs = [
        ControllerFault(fault, folder / f"run-{number}", exact, *machines[3 * number :][:3])
        for number, fault in enumerate(faults)
    ]

    async def all_of_them() -> None:
        starting = asyncio.Semaphore(2)
        async with asyncio.TaskGroup() as running:
            for one in runs:
                running.create_task(one.strike(starting))

    asyncio.run(all_of_them())
    for one in runs:
        one.departures.wait()
        end_of_all({machine.name: machine for machine in one.machines})
        resumed = one.resume()
        assert resumed.summary["status"] == "complete"
        check_trained_once(resumed.folder)
        assert one.is_online or trained_samples(resumed.folder) == trained_samples(alone)
        assert not one.controller.left_behind(), "a later run on the machine removes it"
    return {one.fault: one.seen() for one in runs}


@dataclass(slots=True)
class ControllerFault:
    """A run whose own machine is struck."""

    fault: HostFault
    folder: Path
    exact: Sequence[str]
    controller: Machine
    engine: Machine
    trainer: Machine
    departures: Departures = field(default_factory=Departures)
    client: subprocess.Popen[bytes] | None = None

    @property
    def machines(self) -> tuple[Machine, ...]:
        """All three."""
        return self.controller, self.engine, self.trainer

    @property
    def is_online(self) -> bool:
        """Whether programs on other hosts make the samples."""
        return self.fault in GATEWAY_FAULTS

    @property
    def hosts(self) -> tuple[Machine, Machine]:
        """The hosts of the run."""
        return self.engine, self.trainer

    async def strike(self, starting: asyncio.Semaphore) -> None:
        """Strike when the run is at the moment; returns when what was struck is there again."""
        async with starting:
            held = await self._until_moment()
        theirs = [one for host in self.hosts for one in host.processes()[STANDING:]]
        began_s = time.monotonic()
        struck = strike(self.controller, self.fault.blow)
        if self.fault.blow is Blow.CUT:
            signal_if_there(held, signal.SIGCONT)
        self.departures.expect("theirs", theirs, began_s)
        agents = [one for host in self.hosts for one in host.processes()]
        if self.client is not None:
            self.departures.expect("client", [self.client.pid], began_s)
        self.departures.expect("agents", agents, began_s)
        if self.fault.blow is not Blow.HUNG:
            self.departures.expect("struck", struck, began_s)
        if self.fault.blow is Blow.KILLED:
            return
        await until(lambda: "theirs" in self.departures.gone_s, "the leases are over")
        if self.fault.blow is Blow.HUNG:
            self.departures.expect("struck", struck, time.monotonic())
            self.controller.wake(struck)
        else:
            await until(lambda: "struck" in self.departures.gone_s, "the run has ended")
            self.controller.heal()

    async def _until_moment(self) -> int:
        report, join = self.folder / "report", f"{self.controller.host.address}:{PORT}"
        self.folder.mkdir()
        config = fault_config(
            self.folder,
            *self.exact,
            *((f"rollout.workflow={self._workflow()}",) if self.is_online else ()),
            f"reward.kwargs={{folder: '{self.folder}'}}",
            f"cluster.address={self.controller.host.address}",
            f"cluster.port={PORT}",
            *ON_TWO_HOSTS,
        )
        (self.folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
        (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(config.model_dump()))
        token = os.environ[TOKEN_VARIABLE]
        scoring = self.fault.moment is Moment.SCORING
        await self.controller.run(
            "tests.fault_lab.controller",
            [str(self.folder / "config.yaml"), "" if scoring else self.fault.moment, str(report)],
            {TOKEN_VARIABLE: token, "XDG_STATE_HOME": str(self.folder)},
        )
        await asyncio.gather(*(host.boot(join, token) for host in self.hosts))
        if self.is_online:
            await self._start_client()
        if scoring:
            saved = self.folder / "runs"
            await until(lambda: any(saved.glob("*/checkpoints/step-*")), "a checkpoint")
            (self.folder / WANTED).touch()
            await until(lambda: who_scores(self.folder) is not None, "it scores")
            return who_scores(self.folder) or 0
        await until(report.exists, f"the moment {self.fault.moment}")
        return int(report.read_text())

    def _workflow(self) -> str:
        return f"{{name: agent, mode: online, host: {self.controller.host.address}}}"

    async def _start_client(self) -> None:
        """On the trainer's machine, once the run says where its gateway is."""

        def place() -> Path | None:
            return next(self.folder.glob("runs/*/gateway.json"), None)

        await until(lambda: place() is not None, "the gateway is there")
        gateway = json.loads((place() or Path()).read_text())
        words = (sys.executable, "-m", "tests.fault_lab.host_client")
        told = (gateway["url"], gateway["admin_key_file"], str(self.folder / "client"))
        self.client = subprocess.Popen(self.trainer.host.command(*words, *told))

    def resume(self) -> RunResult:
        """Continue the run on one machine."""
        (self.folder / RELEASED).touch()
        (run_folder,) = (self.folder / "runs").iterdir()
        more, display = ALONE, Silent()
        if self.client is not None:
            self.client.wait()
            errors = (self.folder / "client").read_text().splitlines()
            assert len(errors) == CLIENTS, "each of them got an error, and no answer"
            more = (*ALONE, "rollout.workflow={name: agent, mode: online}")
            display = StartsAProgram()
        recovery = find_recovery(run_folder, more)
        assert recovery.version
        resumed = run_through(recovery.config, recovery, display, RunState(), reward_fn=None)
        if isinstance(display, StartsAProgram):
            assert [program.wait() for program in display.programs] == [0]
        return resumed

    def seen(self) -> Seen:
        """What was measured."""
        gone = self.departures.gone_s
        return Seen(gone.get("client", gone["theirs"]), max(gone["agents"], gone["struck"]), {})


# --- rollout workers -----------------------------------------------------------------------------


def faults_of_rollout_hosts(network: Network, folder: Path, patch: pytest.MonkeyPatch) -> Measured:
    """Hosts of rollout workers, struck while a reward worker scores there."""
    machines = machines_of(network)
    join, settings = meeting_point(network, patch, hosts=len(machines))
    config = fault_config(
        folder,
        *settings,
        f"rollout.engines={len(machines) - 1}",
        "reward.fn=tests.fault_lab.held_rewards:held",
        f"reward.kwargs={{folder: '{folder}'}}",
    )
    faults = RolloutFaults(machines, folder, join)
    measured = asyncio.run(faults.run(config))
    faults.departures.wait()
    end_of_all(machines)
    return {
        fault: Seen(seen_s, faults.departures.gone_s[fault.name], counts)
        for fault, (seen_s, counts) in measured.items()
    }


@dataclass(slots=True)
class RolloutFaults:
    """A training loop on controllers; before each batch a host is struck."""

    machines: dict[str, Machine]
    folder: Path
    join: str
    departures: Departures = field(default_factory=Departures)
    heard: Heard = field(default_factory=lambda: Heard())

    async def run(self, config: TrainConfig) -> dict[HostFault, tuple[float, dict[str, int]]]:
        """One step for each fault."""
        self.heard.on_waiting = self._boot_all
        measured, trained = {}, Counter[int]()
        problems = prepare(config).train
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(
                host_pool(
                    config,
                    folder=self.folder / "controllers",
                    say=self.heard.note,
                    waiting=self.heard.phase,
                )
            )
            trainer = await AsyncTrainController.start(pool, config)
            stack.push_async_callback(trainer.close)
            rollouts = await AsyncRolloutController.start(pool, config, problems)
            stack.push_async_callback(rollouts.close)
            (self.folder / WANTED).touch()
            for fault in ROLLOUT_FAULTS:
                preparing = asyncio.create_task(rollouts.prepare_batch())
                scores = await self._scores()
                await until(lambda: len(rollouts._workers) > 1, "another worker is there")
                before = Counter({**rollouts.counts, "host_losses": pool.hosts.hosts.losses})
                seen_s = await self._strike(fault, scores)
                batch = await preparing
                trained.update(one.group for one in rollouts._given[batch.metadata.batch_id])
                await trainer.train(batch)
                if fault is not ROLLOUT_FAULTS[-1]:
                    (self.folder / WANTED).touch()
                await rollouts.update_weights(await trainer.export())
                await rollouts.free(batch)
                after = Counter({**rollouts.counts, "host_losses": pool.hosts.hosts.losses})
                measured[fault] = seen_s, {n: after[n] - before[n] for n in ROLLOUT_COUNTS}
                assert measured[fault][1]["worker_losses"] == 1
            assert trainer.version == len(ROLLOUT_FAULTS)
            assert trained == Counter(dict.fromkeys(range(GROUPS * len(ROLLOUT_FAULTS)), 1))
        return measured

    async def _boot_all(self) -> None:
        token = os.environ[TOKEN_VARIABLE]
        await asyncio.gather(*(one.boot(self.join, token) for one in self.machines.values()))

    async def _scores(self) -> int:
        await until(lambda: who_scores(self.folder) is not None, "a completion is scored")
        return who_scores(self.folder) or 0

    async def _strike(self, fault: HostFault, scores: int) -> float:
        """Strike the host of the process that scores; returns when that is seen."""
        machine = next(one for one in self.machines.values() if scores in one.processes())
        began_s = time.monotonic()
        struck = strike(machine, fault.blow)
        if fault.blow is Blow.KILLED:
            self.departures.expect(fault.name, struck, began_s)
        else:
            self.departures.expect(fault.name, struck[STANDING:], began_s)
        seen_s = await self.heard.until(f"host {machine.name} ", "is lost") - began_s
        (self.folder / RELEASED).touch()
        match fault.blow:
            case Blow.KILLED:
                await until(lambda: fault.name in self.departures.gone_s, "all of it is dead")
                await machine.end()
                await machine.boot(self.join, os.environ[TOKEN_VARIABLE])
            case Blow.CUT:
                await until(lambda: machine.late_bytes() > 0, "a scored group is on its way")
                machine.heal()
            case Blow.HUNG:
                machine.wake(struck)
        (self.folder / f"scores-{scores}").unlink()
        (self.folder / RELEASED).unlink()
        return seen_s


# --- what runs share -----------------------------------------------------------------------------


@dataclass
class Heard(Silent):
    """Notes of a run, with their times."""

    notes: list[tuple[float, str]] = field(default_factory=list)
    on_waiting: Callable[[], Any] | None = None
    """Called once, when the run waits for hosts."""
    _tasks: list[Any] = field(default_factory=list)

    def phase(self, text: str) -> None:
        """See `Display`."""
        if text.startswith("waiting for hosts") and self.on_waiting is not None:
            self._tasks.append(asyncio.ensure_future(self.on_waiting()))
            self.on_waiting = None

    def note(self, text: str) -> None:
        """See `Display`."""
        self.notes.append((time.monotonic(), text))

    async def until(self, *parts: str) -> float:
        """Wait for a note, from now on, that has all of these; returns its time."""
        first = len(self.notes)

        def found() -> list[float]:
            return [at for at, text in self.notes[first:] if all(part in text for part in parts)]

        await until(lambda: bool(found()), f"a note of {parts}; there are {self.notes[first:]}")
        return found()[0]


def machines_of(network: Network) -> dict[str, Machine]:
    """The machines of a network, by name."""
    return {name: Machine(network, host) for name, host in network.hosts.items()}


def meeting_point(
    network: Network, patch: pytest.MonkeyPatch, *, hosts: int
) -> tuple[str, list[str]]:
    """Where agents join a run on this machine, and its settings."""
    patch.setenv(TOKEN_VARIABLE, secrets.token_urlsafe())
    with socket.create_server((network.address, 0)) as free:
        port = free.getsockname()[1]
    return f"{network.address}:{port}", [
        f"cluster.n_nodes={hosts}",
        f"cluster.address={network.address}",
        f"cluster.port={port}",
        "cluster.shared_files=never",
        "scheduler.type=manual",
        "scheduler.this_host=false",
    ]


def fault_config(folder: Path, *overrides: str) -> TrainConfig:
    """Synchronous steps, each saved."""
    return tiny_config(
        folder,
        f"total_train_steps={STEPS}",
        f"dataset.batch_size={GROUPS}",
        f"gconfig.n_samples={SAMPLES}",
        f"gconfig.max_new_tokens={TOKENS}",
        "eta=0",
        "save_every_steps=1",
        "evaluation.max_problems=0",
        *overrides,
    )


def strike(machine: Machine, blow: Blow) -> list[int]:
    """Strike a machine; returns the processes that it has."""
    match blow:
        case Blow.KILLED:
            return machine.kill()
        case Blow.HUNG:
            return machine.hang()
        case Blow.CUT:
            return machine.cut()


def talks_to(address: str, port: int) -> bool:
    """Whether this process has an open connection to a port of a machine."""
    del address  # ports of the machines of a test differ
    return any(
        one.remote_port == port and one.state == ESTABLISHED for one in connections_of(os.getpid())
    )


async def until(holds: Callable[[], bool], what: str, deadline_s: float = 90.0) -> None:
    """Wait until something holds."""
    try:
        async with asyncio.timeout(deadline_s):
            while not holds():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {deadline_s:g} s: {what}") from None


def check_trained_once(folder: Path) -> None:
    """No sample is lost or trained on twice, and the log replays."""
    log = read_log_file(folder / "events.jsonl")
    groups = [g for r in log.actions if isinstance(r.action, Train) for g in r.action.groups]
    assert sorted(groups) == list(range(len(groups)))
    seen = [(s["group"], s["sample"]) for step in trained_samples(folder) for s in step]
    assert sorted(seen) == [(group, one) for group in sorted(groups) for one in range(SAMPLES)]
    replay = check_replay(log)
    assert replay.agrees, replay.difference


def end_of_all(machines: Mapping[str, Machine]) -> None:
    """Every agent ends by itself, and leaves neither temporary files nor shared memory."""
    departures = Departures()
    for machine in machines.values():
        departures.expect(machine.name, machine.every, time.monotonic())
    departures.wait()
    for machine in machines.values():
        asyncio.run(machine.end())
        assert not (left := machine.left_behind()), left
