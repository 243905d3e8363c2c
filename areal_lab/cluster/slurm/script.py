"""The batch script of host agents, and the command that starts one on a node of an allocation.

One step on each node rather than one step of many tasks: a step can be ended and started alone, so
a host can be replaced while the others continue.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from areal_lab.cluster.slurm.commands import former_variables
from areal_lab.config.sections import ClusterConfig

_AGENT: Final = "areal_lab.cluster.agent.run"
_JOIN_S: Final = 60
"""The run listens before any agent is started."""
_STEP: Final = (
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # with anything else that runs in the allocation, such as the run itself
    "--no-kill",
    "--wait=0",
    "--kill-on-bad-exit=0",
    "--cpu-bind=none",  # its processes use every core of the job there
    "--mem=0",  # the same for memory
    "--export=ALL",
)
_DECIDED: Final = frozenset(
    {
        "--array",
        "--export",
        "--export-file",
        "--jobid",
        "--nodelist",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--output",
        "--parsable",
        "--wait",
        "-N",
        "-W",
        "-a",
        "-n",
        "-o",
        "-w",
    }
)
"""Options that follow from other settings."""


def step_name(node: str, run: str) -> str:
    """Name of the step with the agent of a node: an allocation may hold several runs."""
    return f"areal-lab-{node}-{run}"


def step_command(
    job: str, node: str, run: str, cluster: ClusterConfig, extra: Sequence[str]
) -> list[str]:
    """Command that runs an agent on a node of an allocation, until it ends.

    `job` is the allocation, `run` is `ADDRESS:PORT` of the run, and `extra` has further options of
    `srun`.
    """
    return [
        "env",
        # The pipe to the run (`host.processes`) does not reach another machine.
        *(f"--unset={name}" for name in ("AREAL_LAB_LIFELINE", *former_variables())),
        "srun",
        f"--jobid={job}",
        *_STEP,
        *_gpus(cluster, extra),
        f"--job-name={step_name(node, run)}",
        f"--nodelist={node}",
        *extra,
        *_agent(run),
        node,
    ]


def probe_command(job: str, node: str) -> list[str]:
    """Command that tests whether a node of an allocation starts tasks."""
    return ["srun", f"--jobid={job}", *_STEP, f"--nodelist={node}", "--immediate=10", "true"]


def batch_script(
    hosts: int, run: str, cluster: ClusterConfig, extra: Sequence[str], log_folder: Path
) -> str:
    """Job of host agents on this many nodes. It has no secret: the token is in the environment.

    `run` is `ADDRESS:PORT` of the run. The options of `sbatch` in `extra` replace those above them.
    `log_folder` gets the output of Slurm and the agents.
    """
    options = [
        "--job-name=areal-lab-hosts",
        f"--nodes={hosts}",
        "--ntasks-per-node=1",
        "--exclusive",  # a host is a whole node
        *([] if _has(extra, "--mem") else ["--mem=0"]),
        "--no-kill",
        "--no-requeue",
        f"--output={_literal(log_folder)}/slurm-%j.log",
        *_gpus(cluster, extra),
        *extra,
    ]
    step = shlex.join(_STEP)
    names = f'--job-name="{step_name("$node", run)}" --nodelist="$node"'
    gpus = "".join(f" {option}" for option in _gpus(cluster, extra))
    output = f'--output={shlex.quote(f"{_literal(log_folder)}/host-")}"$node".log'
    return "\n".join(
        [
            "#!/bin/bash",
            "# Host agents of a run of areal_lab, submitted with `sbatch --export=ALL`: the token",
            "# of the run is in the environment.",
            *(f"#SBATCH {shlex.quote(option)}" for option in options),
            "",
            'for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do',
            f"    srun {step}{gpus} \\",
            f"        {names} \\",
            f"        --open-mode=append {output} \\",
            f'        {shlex.join(_agent(run))} "$node" &',
            "done",
            "wait",
            "",
        ]
    )


def refused_option(extra: Sequence[str]) -> str:
    """First option that contradicts other settings; empty without one."""

    def decided(given: str) -> bool:
        long = given.startswith("--")
        return (given.partition("=")[0] if long else given[:2]) in _DECIDED

    return next(filter(decided, extra), "")


def _agent(run: str) -> list[str]:
    """Command of an agent without the name of the host, which is appended."""
    return [sys.executable, "-m", _AGENT, "--join", run, "--join-s", str(_JOIN_S), "--name"]


def _gpus(cluster: ClusterConfig, extra: Sequence[str]) -> list[str]:
    """`--gres` and not `--gpus-per-node`, which only one of Slurm's two selectors supports."""
    if not cluster.n_gpus_per_node or _has(extra, "--gres") or _has(extra, "--gpus"):
        return []
    return [f"--gres=gpu:{cluster.n_gpus_per_node}"]


def _has(extra: Sequence[str], option: str) -> bool:
    return any(given.startswith(option) for given in extra)


def _literal(path: Path) -> str:
    """Path in which Slurm finds no placeholder."""
    return str(path.absolute()).replace("%", "%%")
