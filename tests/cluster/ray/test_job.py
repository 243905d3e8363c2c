"""A run that is submitted to a Ray cluster as a job."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.cluster.ray.lab import GONE_S, is_alive

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[3]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


ATTEMPTS = 3
SUBMISSIONS = 20
"""Minutes; the agent of a node is usually there at the first one."""


def test_a_submitted_job_has_its_hosts_on_the_cluster_that_runs_it() -> None:
    for _ in range(ATTEMPTS):
        submitted = submitted_to_a_new_cluster()
        if "No available agent" not in submitted.stderr + submitted.stdout:
            break  # else Ray gave up starting the agent, as it does on a very busy machine
    assert "host h1 has joined" in submitted.stdout, submitted.stdout + submitted.stderr
    assert submitted.returncode == 0


def submitted_to_a_new_cluster() -> subprocess.CompletedProcess[str]:
    """Start a cluster, submit the job, and end all that was started."""
    with TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": folder,
            "PYTHONPATH": str(ROOT),
        }
        dashboard = free_port()
        with subprocess.Popen(
            [
                *(*RAY, "start", "--head", "--block", "--disable-usage-stats"),
                *("--node-ip-address", "127.0.0.5", "--port", str(free_port())),
                *("--dashboard-host", "127.0.0.5", "--dashboard-port", str(dashboard)),
                *("--num-cpus", "2", "--object-store-memory", str(80 << 20)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as head:
            assert head.stdout is not None
            try:
                for line in head.stdout:
                    if "--block" in line:  # it is up
                        break
                submit = [
                    *(*RAY, "job", "submit", "--address", f"http://127.0.0.5:{dashboard}", "--"),
                    *(sys.executable, "-m", "tests.cluster.ray.job", "auto"),
                ]
                for _ in range(SUBMISSIONS):
                    submitted = subprocess.run(
                        submit, env=environment, capture_output=True, text=True, check=False
                    )
                    if "No available agent" not in submitted.stderr + submitted.stdout:
                        break  # else its dashboard was there before the agent that starts jobs
            finally:
                started = psutil.Process(head.pid).children(recursive=True)
                head.terminate()
                head.stdout.read()
        psutil.wait_procs(started, GONE_S)
        assert not [process for process in started if is_alive(process)]
    return submitted


def free_port() -> int:
    """Outside of the ports of Ray's workers, as Ray demands of a dashboard."""
    while True:
        with socket.create_server(("127.0.0.5", 0)) as listener:
            port: int = listener.getsockname()[1]
        if port > 20_000:
            return port
