"""Batch scripts of Slurm: hosts by `srun`, or Ray inside of the allocation."""

from __future__ import annotations

import json
import shlex
from typing import Final

from areal_lab.cluster.deploy.files import File, comments
from areal_lab.cluster.deploy.request import (
    Request,
    head_of,
    host_command,
    train_command,
)
from areal_lab.cluster.deploy.scripts import run_and_wait
from areal_lab.cluster.records import TOKEN_VARIABLE

_RAY_PORT: Final = 6379
_END_OTHERS: Final = 'kill -TERM "$others" 2> /dev/null || true'
_EXIT: Final = 'exit "$code"'
_STOP_S: Final = 300
"""Seconds before the time limit at which the run is asked to end: it then finishes its step."""


def slurm_files(request: Request) -> list[File]:
    """A script with hosts of our own, and one with Ray."""
    files = [File("run.sbatch", _script(request, ray=False), "the run under Slurm alone")]
    if request.shape.n_nodes > 1:
        what = "the same run with Ray inside of the allocation"
        files.append(File("ray.sbatch", _script(request, ray=True), what))
    return files


def _script(request: Request, *, ray: bool) -> str:
    """Start the hosts on all nodes but the first, the controller on the first; end both with it.

    A node that is lost takes its host along and nothing else: `--no-kill` for the job and for its
    steps, and `--wait=0` so that one host that ends does not end the others. The controller is a
    child of the script, which runs on the first node: `srun` kills a step when it gets SIGTERM, and
    Ray does not pass it on.
    """
    title = "A run on nodes of Slurm" + (", with Ray inside." if ray else ".")
    head = head_of(request, f"{title} Submit it in the folder in which it was written.")
    machine = request.machine
    options = [
        f"job-name={request.name}",
        f"nodes={request.shape.n_nodes}",
        "ntasks-per-node=1",
        f"cpus-per-task={machine.cpus}",
        f"mem={machine.memory_gib}G",
        *([f"gpus-per-node={machine.gpus}"] if machine.gpus else []),
        f"time={request.time_h}:00:00",
        "no-kill",
        "no-requeue",
        f"signal=B:TERM@{_STOP_S}",
        "output=%x-%j.log",
    ]
    lines = [
        "#!/bin/bash",
        comments(head).rstrip("\n"),
        *(f"#SBATCH --{option}" for option in options),
        "set -euo pipefail",
        "# Steps do not inherit this from the job.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    ]
    train = train_command(request, request.config_path, "ray" if ray else "manual")
    if request.shape.n_nodes == 1:
        return "\n".join([*lines, *run_and_wait(shlex.join(train)), _EXIT, ""])
    lines += [
        "",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'controller="${nodes[0]}"',
        'hosts=$(IFS=,; echo "${nodes[*]:1}")',
        "",
        "# A new token for each job; srun hands it on in the environment, and no file has it.",
        f'export {TOKEN_VARIABLE}="${{{TOKEN_VARIABLE}:-$(openssl rand -hex 32)}}"',
    ]
    others = request.shape.n_nodes - 1
    there = (
        f"srun --no-kill --wait=0 --nodes={others} --ntasks={others} --ntasks-per-node=1 "
        '--nodelist="$hosts"'
    )
    if ray:
        lines += [
            "export RAY_AUTH_MODE=token",
            f'export RAY_AUTH_TOKEN="${TOKEN_VARIABLE}"',
            f"export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT={request.start_timeout_s}",
            "# Its address: some systems resolve their own name to 127.0.1.1, which Ray refuses.",
            "address=$(getent ahostsv4 \"$controller\" | awk '$1 !~ /^127\\./ { print $1; exit }')",
            ": \"${address:=$(hostname -I | awk '{ print $1 }')}\"",
        ]
        start = _ray_command(request)
        lines += [
            f"{there} {start} true &",
            "others=$!",
            "# The run's process id, by which it is asked to end; until it starts, Ray is.",
            'pid_file="$(mktemp --dry-run)"',
        ]
        inner = shlex.quote('echo $$ > "$0" && exec "$@"')
        run = (
            "# shellcheck disable=SC2016  # for the inner shell\n"
            f'{start} bash -c {inner} "$pid_file" {shlex.join(train)}'
        )
        waiting = run_and_wait(run, process='"$(cat "$pid_file" 2> /dev/null || echo "$run")"')
        return "\n".join([*lines, *waiting, 'rm -f "$pid_file"', _END_OTHERS, _EXIT, ""])
    *words, address = host_command("$controller", request)
    lines += [f'{there} {shlex.join(words)} "{address}" &', "others=$!"]
    return "\n".join([*lines, *run_and_wait(shlex.join(train)), _END_OTHERS, _EXIT, ""])


def _ray_command(request: Request) -> str:
    """What starts Ray on a node, up to the command that only the first node runs."""
    names = {name: count for group in request.groups for name, count in group.resources.items()}
    resources = shlex.quote(json.dumps(names))
    return (
        f'ray symmetric-run --address "$address:{_RAY_PORT}" '
        f"--min-nodes {request.shape.n_nodes} --resources {resources} --"
    )


def slurm_commands(request: Request, folder: str) -> list[str]:
    """Commands that submit the run and end it."""
    scripts = [f"sbatch {shlex.quote(f'{folder}/run.sbatch')}"]
    if request.shape.n_nodes > 1:
        scripts.append(f"sbatch {shlex.quote(f'{folder}/ray.sbatch')}    # the same with Ray")
        direct = shlex.join(train_command(request, request.config_path, "slurm"))
        scripts.append(f"{direct}    # without a script: it submits itself")
    stop = "scancel --batch --signal=TERM JOB    # finishes its step and saves"
    return [*(f"export {name}=..." for name in request.secrets), *scripts, stop]
