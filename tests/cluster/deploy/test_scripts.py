"""The shell scripts, run: with a stand-in for `areal-lab` that says how it was called."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from areal_lab.cluster.deploy.files import read_yaml_text
from areal_lab.cluster.deploy.kinds import DeployKind
from tests.cluster.deploy.asked import documents, files_of

Program = Callable[[str, str], None]
CLUSTER = "cluster.n_nodes=3 cluster.n_gpus_per_node=0"
TRAIN = (
    f"train {{config}} scheduler.type=manual {CLUSTER} scheduler.start_timeout_s=1800 "
    "cluster.port=6380"
)
WAITS = 'trap "echo asked; exit 130" TERM; echo ready; while :; do read -t 1 _ <> {fifo} || :; done'


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Put a program in bash on the scripts' PATH."""

    def put(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    put("areal-lab", 'echo "$(basename "$0") $*"; exit "${CODE:-0}"')
    return put


def environment(tmp_path: Path, **variables: str) -> Mapping[str, str]:
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(tmp_path), **variables}


def start_script() -> str:
    text = files_of(DeployKind.JOB, nodes=3)["job.yaml"]
    script: str = documents(text)["ConfigMap"]["data"]["start.sh"]
    return script


def run(script: str, tmp_path: Path, shell: str = "bash", **variables: str) -> tuple[int, str]:
    ended = subprocess.run(
        [shell, "-c", script],
        cwd=tmp_path,
        env=environment(tmp_path, **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ended.returncode, ended.stdout


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(("code", "exits"), [("0", 0), ("1", 42), ("2", 42), ("130", 42)])
def test_pod_0_is_the_controller_whose_failure_has_a_code_of_its_own(
    code: str, exits: int, tmp_path: Path
) -> None:
    found = run(start_script(), tmp_path, "sh", JOB_COMPLETION_INDEX="0", CODE=code)
    train = TRAIN.format(config="/etc/areal_lab/config.yaml")
    assert found == (exits, f"areal-lab {train}\n")


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("code", [0, 1])
def test_other_pods_are_hosts_that_join_it(code: int, tmp_path: Path) -> None:
    found = run(start_script(), tmp_path, "sh", JOB_COMPLETION_INDEX="2", CODE=str(code))
    assert found == (code, "areal-lab host --join-s 1800 --join tiny-0.tiny:6380\n")


def started(script: str, tmp_path: Path, shell: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [shell, "-c", script],
        cwd=tmp_path,
        env=environment(tmp_path, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and the rest of the output; what hangs is killed, with all that it has started."""
    try:
        said, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        said += "hung"
    return process.returncode, said


def test_a_pod_that_is_asked_to_end_lets_its_run_finish(tmp_path: Path, program: Program) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program("areal-lab", WAITS.format(fifo=shlex.quote(str(fifo))))
    pod = started(start_script(), tmp_path, "sh", JOB_COMPLETION_INDEX="0")
    assert pod.stdout is not None
    assert pod.stdout.readline() == "ready\n"
    pod.send_signal(signal.SIGTERM)
    # Once: a second request would end the run at once.
    assert end_of(pod) == (42, "asked\n")


@pytest.mark.usefixtures("program")
def test_skypilot_numbers_machines_and_the_first_address_is_the_controllers(tmp_path: Path) -> None:
    (task,) = read_yaml_text(files_of(DeployKind.SKYPILOT, nodes=3)["sky.yaml"])
    assert task["run"].endswith(':6380"\n')
    addresses = "10.0.0.5\n10.0.0.6\n10.0.0.7"
    for rank, said in (
        (0, TRAIN.format(config="deploy/config.yaml")),
        (2, "host --join-s 1800 --join 10.0.0.5:6380"),
    ):
        found = run(
            task["run"], tmp_path, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS=addresses
        )
        assert found == (0, f"areal-lab {said}\n")


SRUN = """\
echo "$*" >> srun.log
echo "$SRUN_CPUS_PER_TASK" > cores.log
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
RAY = """\
echo "$*" >> ray.log
while [ "$1" != -- ]; do shift; done
shift
"$@"
"""
"""As `ray symmetric-run`: a SIGTERM ends it, and not what it has started."""


@pytest.fixture
def slurm(program: Program, tmp_path: Path) -> Path:
    """Stand-ins for the programs of a batch script, and the FIFO that hosts wait at."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program("scontrol", 'printf "%s\\n" n1 n2 n3')
    program("openssl", "echo made-token")
    program("getent", 'printf "%s n1\\n" 127.0.1.1 10.0.0.1')
    program("srun", SRUN)
    program("ray", RAY)
    return fifo


def in_slurm(script: str, tmp_path: Path) -> subprocess.Popen[str]:
    return started(script, tmp_path, "bash", SLURM_JOB_NODELIST="n[1-3]", SLURM_CPUS_PER_TASK="4")


@pytest.mark.parametrize("file", ["run.sbatch", "ray.sbatch"])
def test_a_batch_script_ends_the_hosts_with_the_controller_and_has_its_exit_code(
    file: str, tmp_path: Path, program: Program, slurm: Path
) -> None:
    waits = WAITS.format(fifo=shlex.quote(str(slurm))).replace("echo", "echo host >> hosts.log; :")
    program(
        "areal-lab",
        f'if [ "$1" = host ]; then {waits}; fi\n'
        # Not before the step of the others has begun.
        "until [ -s hosts.log ] || grep -q 'true$' ray.log; do :; done 2> /dev/null\n"
        'echo "$*"\n'
        'echo "token $AREAL_LAB_CLUSTER_TOKEN, ray ${RAY_AUTH_TOKEN:-none}"\n'
        "exit 3",
    )
    code, output = end_of(in_slurm(files_of(DeployKind.SLURM, nodes=3)[file], tmp_path))
    said = output.splitlines()
    assert code == 3
    (step,) = (tmp_path / "srun.log").read_text().splitlines()
    assert step.startswith(
        "--no-kill --wait=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=n2,n3 "
    )
    assert (tmp_path / "cores.log").read_text() == "4\n"
    if file == "run.sbatch":
        assert said == [TRAIN.format(config="deploy/config.yaml"), "token made-token, ray none"]
        assert step.endswith("areal-lab host --join-s 1800 --join n1:6380")
    else:
        assert said[0].startswith("train deploy/config.yaml scheduler.type=ray cluster.n_nodes=3")
        assert said[1] == "token made-token, ray made-token"
        command = "symmetric-run --address 10.0.0.1:6379 --min-nodes 3 --resources"
        begun = (tmp_path / "ray.log").read_text().splitlines()
        assert len(begun) == 2
        assert all(line.startswith(command) for line in begun)


@pytest.mark.parametrize("file", ["run.sbatch", "ray.sbatch"])
def test_a_batch_job_that_is_asked_to_end_lets_its_run_finish(
    file: str, tmp_path: Path, program: Program, slurm: Path
) -> None:
    waits = WAITS.format(fifo=shlex.quote(str(slurm)))
    program("areal-lab", f'[ "$1" = train ] || exit 0\n{waits}')
    job = in_slurm(files_of(DeployKind.SLURM, nodes=3)[file], tmp_path)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGTERM)
    assert end_of(job) == (130, "asked\n")
