"""Commands and queries to Slurm: jobs, steps, nodes and partitions.

`squeue --json` would be one form for all, but it ignores `--jobs` (Slurm 22.05: every job of the
cluster is printed) and its fields change with the version. `--format` does neither.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from areal_lab.host.processes import inherited_environment

_OURS: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables that select the Slurm cluster."""
_FORMER: Final = ("SLURM_", "SRUN_", "PMI_", "PMIX_")
OVER: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States of a job that has ended."""
NEVER: Final = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
    }
)
"""Reasons for which a job stays pending until it is changed."""


class SlurmRefused(ValueError):
    """A command of Slurm failed, with this message."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job, as reported by `squeue`."""

    number: str
    state: str
    """State, such as `PENDING`."""
    reason: str
    """Reason of this state; `None` without one."""
    nodes: str
    """Nodes in Slurm's short form; `node_names` expands them."""

    def __str__(self) -> str:
        """Format for messages: `12: PENDING (Resources)`."""
        reason = f" ({self.reason})" if self.reason not in {"", "None"} else ""
        where = f" on {self.nodes}" if self.nodes and self.state == "RUNNING" else ""
        return f"{self.number}: {self.state}{reason}{where}"


def clean_environment(also: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of this process without `former_variables`, plus the variables in `also`."""
    former = former_variables()
    kept = {name: value for name, value in inherited_environment().items() if name not in former}
    return {**kept, **(also or {})}


def former_variables() -> list[str]:
    """Variables that Slurm set for the job and step of this process. `srun` would take them for
    options, and for agents they describe another task.
    """
    return [name for name in os.environ if name not in _OURS and name.startswith(_FORMER)]


async def ask(*words: str, also: Mapping[str, str] | None = None) -> str:
    """Run a command of Slurm, with the variables in `also`; returns its output."""
    if shutil.which(words[0]) is None:
        raise SlurmRefused(
            f"scheduler.type is slurm, but there is no {words[0]} on this machine; start the run "
            "on a machine of the cluster, such as its login node"
        )
    process = await asyncio.create_subprocess_exec(
        *words,
        env=clean_environment(also),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which then asks Slurm
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise SlurmRefused(_said(errors.decode(errors="replace")) or f"{words[0]} failed")
    return output.decode(errors="replace")


async def node_names(nodes: str) -> list[str]:
    """Nodes of a list in Slurm's short form, such as `n[1-3]`; raises as `ask`."""
    return (await ask("scontrol", "show", "hostnames", nodes)).split() if nodes else []


async def jobs(numbers: Sequence[str]) -> list[Job]:
    """These jobs, including recently ended ones; forgotten ones are omitted."""
    if not numbers:
        return []
    try:
        listed = await ask(
            "squeue",
            "--noheader",
            f"--jobs={','.join(numbers)}",
            "--states=all",
            "--format=%i|%T|%r|%N",
        )
    except SlurmRefused as error:
        if "Invalid job id" in str(error):  # it was the only one asked for
            return []
        raise
    return [Job(*line.split("|")) for line in listed.splitlines()]


async def steps(job: str) -> dict[str, str]:
    """Name of each running step of a job, by its number; raises as `ask`."""
    listed = await ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j")
    return dict(line.split("|", 1) for line in listed.splitlines())


async def what_there_is() -> str:
    """Description of the partitions; raises as `ask`."""
    listed = await ask("sinfo", "--noheader", "--format=%P|%D|%c|%G")
    parts: dict[str, list[str]] = {}
    for line in listed.splitlines():
        partition, nodes, cores, gres = line.split("|")
        devices = "" if gres == "(null)" else f" and {gres}"
        parts.setdefault(partition.rstrip("*"), []).append(
            f"{nodes} nodes of {cores} cores{devices}"
        )
    return "; ".join(f"partition {name} has {', '.join(of)}" for name, of in parts.items())


def _said(errors: str) -> str:
    """Output of a command, without its name before each line."""
    lines = [line.strip() for line in errors.splitlines()]
    for head in ("error: ", "fatal: "):
        lines = [line.partition(head)[2] or line for line in lines]
    return "; ".join(line for line in lines if line)


def allocation() -> str:
    """Job of this process; empty outside of one."""
    return os.environ.get("SLURM_JOB_ID", "")
