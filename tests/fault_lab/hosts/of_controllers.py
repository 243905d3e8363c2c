"""Faults of the machine of the run itself: its gateway and reward workers are there, too."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from omegaconf import OmegaConf

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.run import RunResult
from areal_lab.pipeline.state import RunState
from areal_lab.shell.display import Silent
from tests.cluster.namespaces import Network
from tests.fault_lab.hosts.client import CLIENTS
from tests.fault_lab.hosts.faults import (
    CONTROLLER_FAULTS,
    GATEWAY_FAULTS,
    Blow,
    HostFault,
    Moment,
)
from tests.fault_lab.hosts.held_rewards import RELEASED, WANTED, who_scores
from tests.fault_lab.hosts.machines import (
    STANDING,
    Departures,
    Machine,
    signal_if_there,
)
from tests.fault_lab.hosts.runs import (
    ALONE,
    EXACT,
    ON_TWO_HOSTS,
    PORT,
    Cause,
    Measured,
    Seen,
    check_trained_once,
    end_of_all,
    fault_config,
    machines_of,
    run_here,
    run_through,
    strike,
    until,
)
from tests.fault_lab.part_runs import TEMPLATE
from tests.host.test_claim import contents
from tests.pipeline.test_online_run import StartsAProgram
from tests.pipeline.tiny_run import (
    trained_samples,
)

SILENT: Final = "has heard nothing from the run"
"""What an agent prints."""


def cause_in_controllers(cause: Cause, blow: Blow) -> None:
    """All faults of controllers by this blow, each in a run of its own on three machines."""
    faults = [one for one in (*CONTROLLER_FAULTS, *GATEWAY_FAULTS) if one.blow is blow]
    cause(partial(faults_of_controller_hosts, faults=faults), 3 * len(faults))


def faults_of_controller_hosts(
    network: Network, folder: Path, patch: pytest.MonkeyPatch, *, faults: Sequence[HostFault]
) -> Measured:
    """One run for each fault, on three machines of its own; each is then continued here, where the
    earlier process cannot be seen."""
    machines = list(machines_of(network).values())
    patch.setenv(TOKEN_VARIABLE, secrets.token_urlsafe())
    exact = (*EXACT, "total_train_steps=3", "reward.fn=tests.fault_lab.hosts.held_rewards:held")
    rewards = f"reward.kwargs={{folder: '{folder}'}}"
    alone = run_here(fault_config(folder / "alone", *exact, rewards))
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
        resumed = one.resume()
        if one.fault.blow is Blow.HUNG:
            one.wake(resumed.folder)
        end_of_all({machine.name: machine for machine in one.machines})
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
    struck: list[int] = field(default_factory=list)
    seen_s: float = 0.0
    """From the fault until the last of its hosts has said that it hears nothing."""
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
        self.struck = struck = strike(self.controller, self.fault.blow)
        if self.fault.blow is Blow.CUT:
            signal_if_there(held, signal.SIGCONT)
        self.departures.expect("theirs", theirs, began_s)
        agents = [one for host in self.hosts for one in host.processes()]
        if self.client is not None:
            self.departures.expect("client", [self.client.pid], began_s)
        self.departures.expect("agents", agents, began_s)
        if self.fault.blow is not Blow.HUNG:
            self.departures.expect("struck", struck, began_s)
        await until(lambda: all(SILENT in host.log for host in self.hosts), "they hear nothing")
        self.seen_s = time.monotonic() - began_s
        if self.fault.blow is Blow.CUT:
            await until(lambda: "theirs" in self.departures.gone_s, "the leases are over")
            await until(lambda: "struck" in self.departures.gone_s, "the run has ended")
            self.controller.heal()

    def wake(self, run_folder: Path) -> None:
        """The run has been continued elsewhere; what was struck continues, and finds that out."""
        before = contents(run_folder)
        departures = Departures()
        departures.expect("struck", self.struck, time.monotonic())
        self.controller.wake(self.struck)
        departures.wait()
        self.departures.gone_s |= departures.gone_s
        assert "has continued the run" in self.controller.log
        after = contents(run_folder)
        assert {name for name in after if after[name] != before.get(name)} <= {
            name for name in after if name.startswith("logs/")
        }
        # It may remove what it was writing under a temporary name when it was struck.
        gone = {name for name in before.keys() - after.keys() if "/." not in f"/{name}"}
        assert not gone, gone

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
            "tests.fault_lab.hosts.run_on_machine",
            [
                str(self.folder / "config.yaml"),
                "" if scoring else self.fault.moment,
                str(report),
                self.controller.name,
            ],
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
        words = (sys.executable, "-m", "tests.fault_lab.hosts.client")
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
        seen_s = min(self.seen_s, gone.get("client", self.seen_s))
        return Seen(seen_s, max(gone["agents"], gone["struck"]), {})
