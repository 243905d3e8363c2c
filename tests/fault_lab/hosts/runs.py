"""What the runs with faults of hosts share: settings, notes, checks.

A step begins when the one before it has ended (eta 0), so that the faults of a run come one after
the other, each at its moment.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Train
from areal_lab.host.ports import free_port
from areal_lab.pipeline.resume.recovery import Recovery, resolve_recovery
from areal_lab.pipeline.run import RunResult, run
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.resolved import resolve
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.replay import check_replay
from areal_lab.shell.display import Display, Silent
from areal_lab.shell.stop import StopSignal
from tests.cluster.namespaces import Network
from tests.fault_lab.hosts.faults import (
    Blow,
    HostFault,
)
from tests.fault_lab.hosts.machines import (
    Departures,
    Machine,
    connections_of,
)
from tests.fault_lab.hosts.moments import POLL_S
from tests.fault_lab.hosts.run_on_machine import EXACT_TOKENS
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import (
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
Faults = Callable[[Network, Path, pytest.MonkeyPatch], Measured]
"""Causes faults of machines, one after the other or in runs of their own."""
Cause = Callable[[Faults, int], None]
"""The fixture `cause`: takes the faults and how many machines they need."""


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
    port = free_port(network.address)
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


def talks_to(port: int) -> bool:
    """Whether this process has an open connection to a port, which no two machines share."""
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
    resolved = (
        resolve(config, reward_fn=reward_fn)
        if recovery is None
        else resolve_recovery(recovery, None, reward_fn)
    )
    return asyncio.run(
        run(
            resolved,
            on_step=lambda _: None,
            display=display,
            stop=StopSignal(),
            response_tokens=lambda *_: EXACT_TOKENS,
            state=state,
            recovery=recovery,
        )
    )
