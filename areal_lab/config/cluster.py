"""Settings of a run on several hosts: who starts the host agents, and how a lost host is found."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from areal_lab.config.record import About, Count, Positive, Record, Whole

SchedulerType = Literal["local", "ray", "slurm", "manual"]


class SchedulerConfig(Record):
    """Who brings a host agent to each host."""

    type: SchedulerType = "local"
    """`local` starts them as processes of this machine, and none for `cluster.n_nodes=1`; `ray` in
    a placement group of a Ray cluster; `slurm` as one task on each node, in the allocation that the
    run has or in one that it asks for; `manual` waits for agents that were started by hand or by
    a container's command (`areal-lab host --join`)."""
    this_host: bool = True
    """Whether the machine of the run is one of its hosts (`type=manual`)."""
    ray_address: str = "auto"
    """Ray cluster to use (`type=ray`): `HOST:PORT`, `auto` for the one that this machine is a node
    of, or `local` for a private one on this machine alone, to try."""
    ray_resources: dict[str, Positive] = Field(default_factory=dict[str, float])
    """Resources that each host needs besides one CPU and its GPUs (`type=ray`), by the names that
    `ray start --resources` gave them, as `{engine: 1}`."""
    slurm_args: list[str] = Field(default_factory=list)
    """Further options of `sbatch`, or of `srun` in an allocation (`type=slurm`), as
    `[--partition=gpu, --time=12:00:00]`."""
    slurm_jobs: Literal["one", "per_host"] = "one"
    """`one` starts the agents in the allocation that the run has, or else in one job; with
    `per_host` each agent is a job of its own, which Slurm replaces on any node (`type=slurm`)."""
    start_timeout_s: Positive = 300.0
    """Longest wait for all hosts to join, and for a host in place of a lost one."""


class ClusterConfig(Record):
    """The hosts of a run."""

    n_nodes: Count = 1
    """Hosts, of which the last ones train (`trainer_nodes`) and the others generate. One host does
    both."""
    n_gpus_per_node: Whole = 0
    """GPUs that each host must have; with 0 the run computes on CPUs."""
    trainer_nodes: Whole = 0
    """Hosts that train; 0 takes as few as hold the trainer's processes."""
    spare_nodes: Whole = 0
    """Hosts, of `n_nodes`, that take the place of lost ones and have no work until then."""
    address: str = ""
    """Address of this machine at which the hosts reach the run; empty takes that of the interface
    with the default route, and the loopback address with `scheduler.type=local`."""
    port: Annotated[int, Ge(0), Le(65535), About(hint="0 takes a free one")] = 0
    """Port at which hosts join."""
    heartbeat_s: Positive = 1.0
    """Interval at which each host is asked whether it is there, and longest wait for the reply."""
    lost_after: Count = 3
    """Heartbeats in a row without a reply after which a host is lost."""
    lease_s: Positive = 10.0
    """A host that was not asked for this long ends its processes: the run counts it as lost."""
    shared_files: Literal["auto", "never"] = "auto"
    """Whether hosts read folders of each other by their paths: `auto` tries it with a file,
    `never` fetches all folders over HTTP."""
