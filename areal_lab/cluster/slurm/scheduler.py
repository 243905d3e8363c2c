"""Host agents on the nodes of a Slurm cluster.

    in an allocation      srun, one step a node --> agents        replace: a step on an unused
    outside               sbatch, one job       --> agents                 node, or the same one
    slurm_jobs=per_host   sbatch, a job a host  --> agents        replace: another job

`scancel` ends all jobs and steps that were started, and the scheduler waits for their end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.cluster.scheduler import Invitation, NoHosts
from areal_lab.cluster.slurm.commands import (
    NEVER,
    OVER,
    Job,
    SlurmRefused,
    allocation,
    ask,
    jobs,
    node_names,
    steps,
    what_there_is,
)
from areal_lab.cluster.slurm.script import (
    batch_script,
    probe_command,
    refused_option,
    step_command,
    step_name,
)
from areal_lab.config.sections import ClusterConfig, SchedulerConfig
from areal_lab.host.durable import replace_text
from areal_lab.host.processes import Child, last_lines, start_command

_GONE_WITHIN_S: Final = 60.0
"""Slurm kills processes that do not end within its KillWait, which is 30 s by default. A node
that does not respond keeps its job `COMPLETING` for minutes."""
_TELL_AFTER_S: Final = 2.0
_LOOK_S: Final = 0.2
_PROBE_S: Final = 20.0
_LOG_LINES: Final = 5
_TOGETHER: Final = 16
"""Number of steps that are started concurrently."""


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(slots=True)
class SlurmScheduler:
    """Start host agents with Slurm: in the allocation of this process, or as jobs."""

    config: SchedulerConfig
    cluster: ClusterConfig
    log_folder: Path
    """On a file system that the nodes share, unless the agents are steps of an allocation."""
    say: Callable[[str], None] = _to_stderr
    """Reports jobs that could not be ended."""
    submitted: list[str] = field(default_factory=list)
    """Jobs of agents, by their numbers."""
    _job: str = ""
    """Allocation in which agents can be started; empty with `slurm_jobs=per_host`."""
    _steps: dict[str, Child] = field(default_factory=dict)
    """`srun` process of each node's agent, if this process has started it."""
    _dropped: list[Child] = field(default_factory=list)
    """The same for lost hosts."""
    _free: list[str] = field(default_factory=list)
    """Nodes of the allocation without an agent in use."""
    _invitation: Invitation | None = None

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Start agents in the allocation, or submit jobs of agents."""
        if option := refused_option(self.config.slurm_args):
            raise ValueError(
                f"scheduler.slurm_args has {option}, but that follows from other settings; leave "
                "it out"
            )
        self._invitation = invitation
        per_host = self.config.slurm_jobs == "per_host"
        self._job = "" if per_host else allocation()
        if self._job:
            await self._start_in_allocation(hosts)
        elif per_host:
            for _ in range(hosts):
                await self._submit(1)
        else:
            await self._submit(hosts)
            self._job = self.submitted[0]

    async def state(self) -> str:
        """State of the jobs, such as `Slurm job 12: PENDING (Resources)`.

        Raises NoHosts if a job has ended, will never start, or does not start agents.
        """
        for node, step in self._steps.items():
            if not step.running:
                raise NoHosts(f"Slurm job {self._job} has no agent on {node}: {await step.died()}")
        if not self.submitted:
            return f"Slurm job {self._job}: agents start on {', '.join(self._steps)}"
        known = await jobs(self.submitted)
        for job in known:
            if job.state in OVER:
                log = self.log_folder / f"slurm-{job.number}.log"
                raise NoHosts(
                    f"Slurm job {job}; the last lines of {log}:\n{last_lines(log, _LOG_LINES)}"
                )
            if job.state == "PENDING" and job.reason in NEVER:
                raise NoHosts(
                    f"Slurm job {job}, and so will never start; {await _there()}; "
                    f"{self._what_to_change()}"
                )
        logs = f"; logs in {self.log_folder}" if any(job.nodes for job in known) else ""
        plural = "s" if len(known) > 1 else ""
        return f"Slurm job{plural} {', '.join(map(str, known)) or 'unknown'}{logs}"

    async def replace(self, name: str) -> None:
        """Start an agent on another node, or on the same one if that still starts tasks."""
        if not self._job:
            await self._cancel(
                job.number for job in await jobs(self.submitted) if job.nodes == name
            )
            await self._submit(1)
            return
        if (child := self._steps.pop(name, None)) is not None:
            self._dropped.append(child)
        await self._cancel(await self._step_numbers([name]))
        self._free.append(name)
        silent = []
        for node in list(self._free):
            if why := await self._why_not(node):
                silent.append(f"{node}: {why}")
                continue
            self._free.remove(node)
            await self._end_steps([node])
            await self._start_step(node)
            return
        raise NoHosts(
            f"Slurm job {self._job} has no node for it ({'; '.join(silent)}); allocate more nodes "
            "than cluster.n_nodes, set cluster.spare_nodes, or let Slurm look for another one with "
            "scheduler.slurm_jobs=per_host"
        )

    async def stop(self) -> None:
        """Cancel the jobs, or end the steps in the allocation, and wait until they are gone."""
        try:
            if self.submitted:
                await self._cancel(list(self.submitted))
                await self._wait_until_gone()
            elif self._job:
                await self._end_steps(list(self._steps))
        except SlurmRefused as error:
            started = ", ".join(self.submitted) or f"{self._job} (its agents)"
            self.say(f"Slurm job {started} could not be ended: {error}; see squeue, scancel")
        children = [*self._steps.values(), *self._dropped]
        self._steps.clear()
        self._dropped.clear()
        await asyncio.gather(*(child.stop() for child in children))

    # --- jobs ---

    async def _submit(self, hosts: int) -> None:
        """Submit a job of agents; an interrupted submission is still recorded."""
        assert self._invitation is not None, "started before"
        name = "host.sh" if self.config.slurm_jobs == "per_host" else "hosts.sh"
        file = self.log_folder.parent / "slurm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        self.log_folder.mkdir(parents=True, exist_ok=True)
        replace_text(
            file,
            batch_script(
                hosts,
                self._invitation.run,
                self.cluster,
                self.config.slurm_args,
                self.log_folder,
            ),
        )
        token = {TOKEN_VARIABLE: self._invitation.token}

        async def submit() -> None:
            # On the command line, because SBATCH_EXPORT would replace what the file says.
            said = await ask("sbatch", "--parsable", "--export=ALL", str(file), also=token)
            self.submitted.append(said.strip().partition(";")[0])

        submitting = asyncio.create_task(submit(), name="sbatch")
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            await asyncio.gather(submitting, return_exceptions=True)
            raise
        except SlurmRefused as error:
            raise ValueError(
                f"Slurm refused a job of {self._asked(hosts)} ({error}); {await _there()}; "
                f"{self._what_to_change()}"
            ) from error

    async def _cancel(self, numbers: Iterable[str]) -> None:
        """Cancel jobs of agents."""
        for number in numbers:
            try:
                await ask("scancel", number)
            except SlurmRefused:
                continue  # it has ended, or `_wait_until_gone` finds it

    async def _wait_until_gone(self) -> None:
        """Wait until none of the jobs has a process, and report those left after a while."""
        left: list[Job] = []
        tell_at_s = asyncio.get_running_loop().time() + _TELL_AFTER_S
        try:
            async with asyncio.timeout(_GONE_WITHIN_S):
                while left := [job for job in await jobs(self.submitted) if job.state not in OVER]:
                    if asyncio.get_running_loop().time() > tell_at_s:
                        self.say(f"waiting until Slurm has ended job {', '.join(map(str, left))}")
                        tell_at_s += _GONE_WITHIN_S
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            for job in left:
                self.say(
                    f"Slurm job {job} still, {_GONE_WITHIN_S:g} s after scancel: one of its nodes "
                    "does not respond; its agent ends there when its lease is over"
                )
        self.submitted.clear()

    # --- an allocation ---

    async def _start_in_allocation(self, hosts: int) -> None:
        there = [node for job in await jobs([self._job]) for node in await node_names(job.nodes)]
        if len(there) < hosts:
            raise ValueError(
                f"cluster.n_nodes is {hosts}, but the allocation (Slurm job {self._job}) has "
                f"{len(there)}: {', '.join(there)}; lower cluster.n_nodes, or allocate more nodes "
                "(salloc, sbatch --nodes)"
            )
        used, self._free = there[:hosts], there[hosts:]
        for first in range(0, hosts, _TOGETHER):
            await asyncio.gather(
                *(self._start_step(node) for node in used[first : first + _TOGETHER])
            )

    async def _start_step(self, node: str) -> None:
        assert self._invitation is not None, "started before"
        extra = [] if self.submitted else self.config.slurm_args  # those were for sbatch
        self._steps[node] = await start_command(
            f"srun of host {node}",
            step_command(self._job, node, self._invitation.run, self.cluster, extra),
            log_path=self.log_folder / f"host-{node}.log",
            environment={TOKEN_VARIABLE: self._invitation.token},
        )

    async def _why_not(self, node: str) -> str:
        """Why a node of the allocation starts no tasks; empty if it does."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await ask(*probe_command(self._job, node))
        except SlurmRefused as error:
            return str(error)
        except TimeoutError:
            return f"it started no task within {_PROBE_S:g} s"
        return ""

    async def _step_numbers(self, nodes: Sequence[str]) -> list[str]:
        """Steps with the agents of these nodes."""
        assert self._invitation is not None, "started before"
        names = {step_name(node, self._invitation.run) for node in nodes}
        return [number for number, name in (await steps(self._job)).items() if name in names]

    async def _end_steps(self, nodes: Sequence[str]) -> None:
        """End the agents of these nodes, and wait until their steps are gone."""
        left: list[str] = []
        try:
            async with asyncio.timeout(_GONE_WITHIN_S):
                await self._cancel(await self._step_numbers(nodes))
                while left := await self._step_numbers(nodes):
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            self.say(
                f"Slurm steps {', '.join(left)} are still there {_GONE_WITHIN_S:g} s after "
                "scancel: a node does not respond; its agent ends when its lease is over"
            )

    # --- words ---

    def _asked(self, hosts: int) -> str:
        gpus = self.cluster.n_gpus_per_node
        devices = f" with {gpus} GPUs each" if gpus else ""
        return f"{hosts} host{'s' if hosts > 1 else ''}{devices}"

    def _what_to_change(self) -> str:
        args = " ".join(self.config.slurm_args) or "none"
        return (
            "change cluster.n_nodes, cluster.n_gpus_per_node or the partition in "
            f"scheduler.slurm_args ({args})"
        )


async def _there() -> str:
    """Hint about the available partitions, if Slurm lists them."""
    try:
        return await what_there_is()
    except SlurmRefused as error:
        return f"sinfo does not say what there is ({error})"
