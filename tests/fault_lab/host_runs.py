"""Whole runs on emulated machines whose hosts are killed, hang, or are cut off and healed.

A step begins when the one before it has ended (eta 0) and enough engines are there, so that the
faults of a run come one after the other, each at its moment.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Train
from areal_lab.pipeline.progress import Silent
from areal_lab.pipeline.state import RunState, StopSignal
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.replay import check_replay
from tests.cluster.namespaces import Network
from tests.fault_lab.host_faults import ENGINE_FAULTS, Blow, HostFault, Moment
from tests.fault_lab.machines import STANDING, Departures, Machine, connections_of
from tests.fault_lab.moments import POLL_S, Held, Moments
from tests.pipeline.rewards import even_digits
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
BUSY_S: Final = 10.0
"""Allowed besides, on a busy machine."""
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
        print(f"{time.monotonic() % 1000:.1f} STRIKE {fault.name}", flush=True)  # DEBUG
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
        print(f"{time.monotonic() % 1000:.1f} {text.splitlines()[0]}", flush=True)  # DEBUG

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


async def until(holds: Callable[[], bool], what: str, deadline_s: float = 40.0) -> None:
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
