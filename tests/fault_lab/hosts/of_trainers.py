"""Faults of the trainer's host: each ends the run, which then continues."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from areal_lab.cluster.host import HostLost
from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.config.schema import TrainConfig
from areal_lab.models.checkpoint_files import checkpoints_of
from areal_lab.pipeline.resume.positions import set_aside, trained_steps
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.run import RunResult
from areal_lab.pipeline.state import RunState
from tests.cluster.namespaces import Network
from tests.fault_lab.hosts.faults import (
    TRAINER_FAULTS,
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
    EXACT,
    Heard,
    Measured,
    Seen,
    check_trained_once,
    end_of_all,
    fault_config,
    machines_of,
    meeting_point,
    run_here,
    run_through,
    strike,
)
from tests.pipeline.tiny_run import (
    trained_samples,
)

_AT_WORK: Final = (Moment.TRAINING, Moment.SAVING)
"""Moments at which the trainer has a request."""


def faults_of_trainer_hosts(network: Network, folder: Path, patch: pytest.MonkeyPatch) -> Measured:
    """One fault of the trainer's host after the other; each ends the run, which then continues."""
    machines = machines_of(network)
    join, settings = meeting_point(network, patch, hosts=2)
    steps = 2 * len(TRAINER_FAULTS) + 2  # a run that is slow to save may take two before its fault
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
    heard: Heard = field(default_factory=Heard)
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
        if trained_steps(folder) and not checkpoints_of(folder):
            set_aside(folder)
        recovery = find_recovery(folder)
        return run_through(recovery.config, recovery, self.heard, self.state)

    def bring_back(self, run_folder: Path) -> None:
        """What was struck is there again; what it still sends is for a run that has ended."""
        machine, fault = self._machine, self.fault
        assert machine is not None
        assert fault is not None
        summary = json.loads((run_folder / "summary.json").read_text())
        assert summary["status"] == "failed"
        self.counts = {name: summary[name] - self.counts[name] for name in COUNTS}
        lost = f"host {machine.name} "
        notes = [at for at, text in self.heard.notes if text.startswith(lost) and "is lost" in text]
        self.seen_s = next(at for at in notes if at > self._began_s) - self._began_s
        if fault.blow is Blow.KILLED:
            return
        if fault.blow is Blow.CUT and fault.moment in _AT_WORK:
            assert machine.late_bytes(), "a reply is on its way"
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
        assert fault is not None
        assert performer is not None
        assert hosts is not None
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
