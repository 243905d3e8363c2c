"""Faults of hosts that generate: every one at every moment, in one run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.pipeline.state import RunState
from areal_lab.shell.stop import StopSignal
from tests.cluster.namespaces import Network
from tests.fault_lab.hosts.faults import (
    ENGINE_FAULTS,
    Blow,
    HostFault,
    Moment,
)
from tests.fault_lab.hosts.machines import (
    STANDING,
    Departures,
    Machine,
)
from tests.fault_lab.hosts.moments import Held, Moments
from tests.fault_lab.hosts.runs import (
    COUNTS,
    TOKENS,
    Heard,
    Measured,
    Seen,
    check_trained_once,
    end_of_all,
    fault_config,
    machines_of,
    meeting_point,
    strike,
    talks_to,
    until,
)
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    rescored_difference,
    trained_samples,
)


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
    for task in struck.afterwards:
        task.result()
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
    afterwards: list[asyncio.Task[None]] = field(default_factory=list)
    """One for each fault so far: its host comes back."""
    stepped: bool = True
    """Whether a step began since the last fault: all that it cost is counted then."""

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Watch for the moments of the faults, and boot the machines when the run is there."""
        Moments(self.state, self._claim, self._strike, self._enough_engines).arm(patch)
        self.heard.on_waiting = self._boot_all

    async def _boot_all(self) -> None:
        await asyncio.gather(*(self.boot(machine) for machine in self.machines.values()))

    async def _enough_engines(self) -> None:
        self.stepped = True
        if self.left or self.now:
            await until(lambda: not self.now and len(self._alive) > 1, "two engines are there")
        elif all(task.done() for task in self.afterwards):
            self.stop.request()

    @property
    def _alive(self) -> dict[int, Any]:
        assert self.state.performer is not None
        return self.state.performer.servers.alive

    def _claim(self, moment: Moment) -> bool:
        ready = self.state.performer is not None and len(self._alive) > 1
        if self.now is not None or not (self.stepped and ready):
            return False
        if self.left and self.left[0].moment is moment:
            self.now, self.stepped = self.left.pop(0), False
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
        after = self._afterwards(fault, machine, struck, began_s, port)
        self.afterwards.append(asyncio.create_task(after))

    async def _afterwards(
        self, fault: HostFault, machine: Machine, struck: list[int], began_s: float, port: int
    ) -> None:
        """Bring the host back; what it still sends is late."""
        await until(lambda: not talks_to(port), "its connections are closed")
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
