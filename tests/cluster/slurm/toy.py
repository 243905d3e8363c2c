"""A real Slurm cluster on this machine: munged, slurmctld and three slurmd, in a folder of its own.

Debian's slurmd accepts `-N node`, so several run on one host, each with a port of its own. Every
node pretends to have 4 cores and 4 GPUs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NODES = ("n1", "n2", "n3")
GPUS = 4
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "setpriv")
_DAEMONS = ("munged", "slurmctld", "slurmd", "slurmscriptd", ": slurmscriptd")
_UP_WITHIN_S = 30.0
_LOOK_S = 0.05
_BLOCK_OF_PORTS = 1 + len(NODES)


def why_not() -> str:
    """Why there can be no Slurm cluster here; empty if there can."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "a Slurm cluster on this machine needs Linux and root"
    lacking = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"Slurm is not installed (no {', '.join(lacking)}): make slurm" if lacking else ""


def until(fact: Callable[[], bool], what: str, within_s: float = _UP_WITHIN_S) -> None:
    """Look again until something holds; fails with what did not."""
    end_s = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < end_s, f"not within {within_s:g} s: {what}"
        time.sleep(_LOOK_S)


@dataclass(slots=True)
class ToySlurm:
    """The cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Its slurmctld and munged, and the slurmd of each node by the node's name."""

    @property
    def conf(self) -> Path:
        """Its configuration, which every command of Slurm finds by the variable SLURM_CONF."""
        return self.folder / "slurm.conf"

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def command(self, *words: str) -> str:
        """Run a command of Slurm; returns what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands."""
        kept = {name: value for name, value in os.environ.items() if "SLURM" not in name}
        return {**kept, "SLURM_CONF": str(self.conf), "PATH": _path()}

    def cancel(self, job: str) -> None:
        """End a job, and wait until it is over."""
        self.command("scancel", job)
        until(lambda: job not in self.jobs(), f"job {job} is over")

    def jobs(self) -> list[str]:
        """The jobs that are not over, by their numbers."""
        return self.command("squeue", "--noheader", "--format=%i").split()

    def processes(self) -> list[psutil.Process]:
        """What runs in jobs of this cluster, and commands that start it there."""
        mine = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("SLURM_CONF") == str(self.conf)
                    and process.name() not in _DAEMONS
                    and process.status() != psutil.STATUS_ZOMBIE
                    and process.pid != os.getpid()
                ):
                    mine.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return mine

    def agents(self) -> list[psutil.Process]:
        """The host agents that run in jobs of this cluster."""
        agent = ["-m", "areal_lab.cluster.agent.run"]
        return [process for process in self.processes() if process.cmdline()[1:3] == agent]

    def agent_on(self, node: str) -> psutil.Process:
        """The host agent on a node."""
        return next(one for one in self.agents() if one.environ()["SLURMD_NODENAME"] == node)

    def start(self) -> None:
        """Start all daemons, and wait until every node is idle."""
        for name in ("state", "log", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        first = _free_ports(_BLOCK_OF_PORTS)
        self.conf.write_text(_slurm_conf(self.folder, first))
        pretended = f"NodeName=n[1-{len(NODES)}] Name=gpu File=/dev/tty[0-{GPUS - 1}]\n"
        (self.folder / "gres.conf").write_text(pretended)
        socket_path = self.folder / "munge.sock"
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={socket_path}",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        until(socket_path.exists, "munged opens its socket")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        until(self._all_idle, f"all nodes are idle; see {self.folder}/log")

    def kill_node(self, node: str) -> None:
        """Kill the slurmd of a node; the tasks there continue."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def stop(self) -> None:
        """End every daemon, and whatever is left of the jobs."""
        for name in (*NODES, "slurmctld", "munged"):
            if (daemon := self.daemons.pop(name, None)) is not None:
                daemon.send_signal(signal.SIGKILL if name in NODES else signal.SIGTERM)
                try:
                    daemon.wait(5)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _all_idle(self) -> bool:
        for name, daemon in self.daemons.items():
            if daemon.poll() is not None:
                said = (self.folder / "log" / f"{name}.out").read_text()
                raise AssertionError(f"{name} exited with {daemon.returncode}:\n{said[-2000:]}")
        states = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return states.stdout.split() == ["idle"] * len(NODES)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                # They end with the tests, also with those that are killed.
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextmanager
def toy_slurm(folder: Path) -> Iterator[ToySlurm]:
    """A cluster until the end of the block, in an empty folder."""
    with ExitStack() as stack:
        cluster = ToySlurm(folder)
        stack.callback(cluster.stop)
        cluster.start()
        yield cluster


def _path() -> str:
    """Debian's daemons are in /usr/sbin, which may not be on a user's path."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> int:
    """The first of several consecutive ports that are free, below those of outgoing connections."""
    while True:
        first = secrets.choice(range(10_000, 30_000))
        try:
            with ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first


def _slurm_conf(folder: Path, first_port: int) -> str:
    lines = [
        "ClusterName=toy",
        f"SlurmctldHost={socket.gethostname()}(127.0.0.1)",
        f"SlurmctldPort={first_port}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.sock",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/ctl.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/ctl.log",
        f"SlurmdLogFile={folder}/log/%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "MpiDefault=none",
        "ReturnToService=2",
        "SlurmdTimeout=5",
        "KillWait=5",
        "SlurmdParameters=config_overrides",
        "GresTypes=gpu",
        *(
            f"NodeName={node} NodeAddr=127.0.0.1 Port={first_port + 1 + number} CPUs=4 "
            f"RealMemory=4000 Gres=gpu:{GPUS}"
            for number, node in enumerate(NODES)
        ),
        "PartitionName=all Nodes=ALL Default=YES State=UP",
        "PartitionName=small Nodes=n1 State=UP",
    ]
    return "\n".join(lines) + "\n"
