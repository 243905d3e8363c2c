"""Machines of a test at one switch: booted, killed, hung, cut off, and back again.

boot --agent joins--> works --kill--> nothing runs --boot--> another agent
                            --hang (SIGSTOP)--> silent --wake--> continues, with what it had
                            --cut--> runs on, unheard --heal--> its late bytes arrive
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.host.processes import Child, start_child
from tests.cluster.namespaces import Connection, Network, NetworkHost, connections

GONE_S: Final = 30.0
"""Within which no process of a lost host is left."""
STANDING: Final = 2
"""The agent, and the process of which it forks others."""
_LOOK_S: Final = 0.1
_MACHINE: Final = "tests.fault_lab.hosts.machine"
_AGENT: Final = "areal_lab.cluster.agent.run"


@dataclass(slots=True)
class Machine:
    """One machine, with everything that runs there."""

    network: Network
    host: NetworkHost
    main: Child | None = None
    """The process that started everything else there."""
    every: set[int] = field(default_factory=set)
    """Process ids that were seen there."""

    @property
    def name(self) -> str:
        """As the run calls it."""
        return self.host.name

    async def boot(self, join: str, token: str) -> None:
        """Start the agent, as a person does by hand."""
        await self.run(_AGENT, ["--name", self.name, "--join", join], {TOKEN_VARIABLE: token})

    async def run(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        """Run a module there."""
        self.main = await start_child(
            f"machine {self.name}",
            _MACHINE,
            [self.host.namespace, module, *arguments],
            log_path=self.host.folder.parent / f"machine-{self.name}.log",
            environment={"TMPDIR": str(self.host.folder), **environment},
        )

    @property
    def log(self) -> str:
        """What its first process has printed."""
        return (self.host.folder.parent / f"machine-{self.name}.log").read_text()

    @property
    def running(self) -> bool:
        """Whether its first process runs."""
        return self.main is not None and self.main.running

    def processes(self) -> list[int]:
        """What runs there now, in order of their start: the first `STANDING` run as long as the
        machine does."""
        if self.main is None or ended(self.main.pid):
            return []
        first = psutil.Process(self.main.pid)
        found = [first, *sorted(first.children(recursive=True), key=psutil.Process.create_time)]
        self.every.update(one.pid for one in found)
        return [one.pid for one in found]

    async def end(self) -> None:
        """End what is left of it."""
        if self.main is not None:
            await self.main.stop(at_once=True)

    def kill(self) -> list[int]:
        """Everything there dies at once; returns what did."""
        return self._signal(signal.SIGKILL)

    def hang(self) -> list[int]:
        """Everything there stops; returns what did."""
        return self._signal(signal.SIGSTOP)

    def wake(self, processes: Iterable[int]) -> None:
        """What was stopped continues."""
        for process in processes:
            signal_if_there(process, signal.SIGCONT)

    def cut(self) -> list[int]:
        """Nothing passes its cable any more; returns what runs there."""
        self.network.cut(self.name)
        return self.processes()

    def heal(self) -> None:
        """What was sent meanwhile arrives."""
        self.network.heal(self.name)

    def late_bytes(self) -> int:
        """Bytes that its programs have written and nothing has acknowledged."""
        assert self.main is not None
        return sum(one.unsent_bytes for one in connections_of(self.main.pid))

    def left_behind(self) -> list[Path]:
        """Temporary files, and shared memory of processes that were seen."""
        return [*self.host.folder.glob("*"), *memory_of(self.every)]

    def _signal(self, number: signal.Signals) -> list[int]:
        found = self.processes()
        for process in found:
            signal_if_there(process, number)
        return found


@dataclass(slots=True)
class Departures:
    """Notes when processes end, in a thread of its own."""

    _waited: dict[str, tuple[float, set[int]]] = field(default_factory=dict)
    gone_s: dict[str, float] = field(default_factory=dict)
    """Seconds after which all of a name were gone."""
    _closed: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def expect(self, name: str, processes: Iterable[int], since_s: float) -> None:
        """These are to end.

        Args:
            since_s: monotonic time from which their seconds count.
        """
        self._waited[name] = since_s, set(processes)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all have ended.

        Raises:
            AssertionError: some live on.
        """
        while self._waited:
            now_s = time.monotonic()
            for name, (since_s, left) in list(self._waited.items()):
                told = [one for one in left if not ended(one)]
                assert now_s < since_s + GONE_S or not told, f"{name}: {told} live on"
            time.sleep(_LOOK_S)
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for name, (since_s, left) in list(self._waited.items()):
                if left := {one for one in left if not ended(one)}:
                    self._waited[name] = since_s, left
                    continue
                self.gone_s[name] = time.monotonic() - since_s
                del self._waited[name]


def ended(process: int) -> bool:
    """Whether a process has ended."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def signal_if_there(process: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def memory_of(processes: Iterable[int]) -> list[Path]:
    """Shared memory that belongs to processes."""
    return [file for one in processes for file in SHARED_MEMORY.glob(f"areal_lab-{one}-*")]


def connections_of(process: int) -> list[Connection]:
    """Those of a process's network namespace; none if it has ended."""
    try:
        return connections(process)
    except (FileNotFoundError, ProcessLookupError):
        return []


def unread_bytes(process: int, port: int) -> int:
    """Bytes that have arrived at a port of a process's namespace and were not read."""
    return sum(
        one.unread_bytes
        for one in connections_of(process)
        if port in (one.local_port, one.remote_port) and one.remote_port
    )
