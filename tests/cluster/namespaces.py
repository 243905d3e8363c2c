"""Network namespaces as hosts: three machines at one switch, of which a test can pull a cable.

      run (root namespace)
       |
    bridge ---- al1 | eth0 of h1
           ---- al2 | eth0 of h2          cut(h2): al2 leaves the bridge, as at a switch that fails:
           ---- al3 | eth0 of h3          silence for open connections, and late bytes once healed

They share process ids, so that a test sees what runs on a host that is cut off; each has a folder
of its own for temporary files.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.cluster.scheduler import Invitation
from areal_lab.host.processes import Child, start_command

COUNT = 3
FIN_WAIT1 = 4
"""State of a TCP connection that was closed, and whose end has not been acknowledged."""


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """One of the machines."""

    name: str
    address: str
    namespace: str
    link: str
    """Its cable's end at the bridge."""
    folder: Path
    """For its temporary files."""

    def command(self, *words: str) -> list[str]:
        """A command that runs a program on this host, as the process that it is started as."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *words]


@dataclass(slots=True)
class Network:
    """Machines at one bridge."""

    address: str
    """Of the root namespace, at the bridge."""
    bridge: str
    hosts: dict[str, NetworkHost] = field(default_factory=dict)

    def cut(self, name: str) -> None:
        """Take a host off the network, without a sign of it."""
        _ip("link", "set", self.hosts[name].link, "nomaster")

    def heal(self, name: str) -> None:
        """Put it back."""
        _ip("link", "set", self.hosts[name].link, "master", self.bridge)


@dataclass(slots=True)
class NamespaceScheduler:
    """Starts an agent on each host of a network. A lost one comes back by itself."""

    network: Network
    log_folder: Path
    agents: dict[str, Child] = field(default_factory=dict)

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Start agents."""
        for host in list(self.network.hosts.values())[:hosts]:
            agent = [sys.executable, "-m", "areal_lab.cluster.agent.run", "--name", host.name]
            self.agents[host.name] = await start_command(
                f"host {host.name}",
                # No --address: an agent finds the one from which it reaches the run.
                host.command(*agent, "--join", invitation.run, "--rejoin-s", "120"),
                log_path=self.log_folder / f"host-{host.name}.log",
                environment={TOKEN_VARIABLE: invitation.token, "TMPDIR": str(host.folder)},
            )

    async def state(self) -> str:
        """How many there are."""
        return f"{len(self.agents)} agents were started in namespaces"

    async def replace(self, name: str) -> None:
        """Start nothing."""
        del name

    async def stop(self) -> None:
        """End all agents."""
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection as the kernel of a host sees it."""

    local_port: int
    remote_port: int
    state: int
    unsent_bytes: int
    """Written by the program, and not acknowledged by the other end."""
    unread_bytes: int
    """Received, and not read by the program."""


def connections(pid: int) -> list[Connection]:
    """Those of the network namespace of a process, listening sockets included."""
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, queues, *_ = line.split()
        unsent, unread = queues.split(":")
        found.append(
            Connection(
                local_port=int(local.rpartition(":")[2], 16),
                remote_port=int(remote.rpartition(":")[2], 16),
                state=int(state, 16),
                unsent_bytes=int(unsent, 16),
                unread_bytes=int(unread, 16),
            )
        )
    return found


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Running processes that were started with this environment variable."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get(variable) == value
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def why_not() -> str:
    """Why there can be no network namespaces here; empty if there can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("nsenter") is None:
        return "network namespaces need Linux, ip and nsenter"
    name = f"al-try-{os.getpid()}"
    added = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, check=False
    )
    if added.returncode:
        return f"network namespaces are not permitted here ({added.stderr.strip()})"
    _ip("netns", "delete", name)
    return ""


@contextmanager
def network_of_hosts(folder: Path, count: int = COUNT) -> Iterator[Network]:
    """Machines until the end of the block.

    Args:
        folder: for a folder of each.
        count: of machines.
    """
    with ExitStack() as stack:
        mark, subnet = _reserve_subnet()
        network = Network(address=f"{subnet}.254", bridge=f"al{mark}b")
        stack.callback(_ip, "link", "delete", network.bridge)
        # Its own address: by default it has that of one of its ports, and what arrives at that
        # port is then for this machine even after the port has left the bridge.
        _ip("link", "set", network.bridge, "address", f"02:{mark[:2]}:{mark[2:]}:00:00:fe")
        _ip("addr", "add", f"{network.address}/24", "dev", network.bridge)
        _ip("link", "set", network.bridge, "up")
        for number in range(1, count + 1):
            host = NetworkHost(
                name=f"h{number}",
                address=f"{subnet}.{number}",
                namespace=f"al{mark}h{number}",
                link=f"al{mark}{number}",
                folder=folder / f"h{number}",
            )
            host.folder.mkdir()
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
            peer = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("link", "add", host.link, *peer)
            _ip("link", "set", host.link, "master", network.bridge, "up")
            # Nor does this machine tell a host that is cut off that it is behind the cable's end.
            Path(f"/proc/sys/net/ipv4/conf/{host.link}/arp_ignore").write_text("1")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.namespace, "link", "set", device, "up")
            network.hosts[host.name] = host
        yield network


def _reserve_subnet() -> tuple[str, str]:
    """A mark and the subnet of that number, which is free: its bridge is made, or refused if there.

    The range is for tests of networks (RFC 2544). Tests run side by side, and two machines of one
    address would get each other's packets.
    """
    for number in random.sample(range(2 * 256), k=2 * 256):
        mark = f"{number:04x}"
        made = ["ip", "link", "add", f"al{mark}b", "type", "bridge"]
        done = subprocess.run(made, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return mark, f"198.{18 + number // 256}.{number % 256}"
        assert "File exists" in done.stderr, done.stderr
    raise AssertionError("all subnets of the range are taken by bridges of these tests")


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
