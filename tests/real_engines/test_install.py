"""The installed engines: found, complete, and served by hand until Ctrl-C.

`make test-sglang` and `make test-vllm` have installed them before; here the installation is looked
at and used.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from areal_lab.engines.client.addresses import port_of
from areal_lab.engines.keys import authorization, key_for
from areal_lab.engines.launch.backends import INSTALLABLE
from areal_lab.engines.launch.environments import Condition, environment
from areal_lab.host.process_groups import members, shared_segments

pytestmark = pytest.mark.sglang
COMMAND = [sys.executable, "-m", "areal_lab.cli.app", "engine"]


@pytest.mark.parametrize("engine", INSTALLABLE)
def test_installing_again_does_nothing(engine: str) -> None:
    found = environment(engine)
    assert found.condition.usable, f"run: areal-lab engine install {engine}"
    if found.condition is Condition.MANUAL:
        pytest.fail(f"{found.folder} was not installed by: areal-lab engine install {engine}")
    run = subprocess.run(
        [*COMMAND, "install", engine, "--build", found.build],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.endswith("use --force to reinstall\n")
    assert found.version in run.stdout


@pytest.mark.parametrize("engine", INSTALLABLE)
def test_served_by_hand_until_ctrl_c(engine: str, tmp_path: Path) -> None:
    """With text, since the packaged model has a tokenizer; nothing is left when it ends."""
    log = tmp_path / "engine.log"
    arguments = ["serve", engine, "--port", "0", "--context-length", "1024", "--log", str(log)]
    with subprocess.Popen(
        [*COMMAND, *arguments, "--max-running-requests", "4", "--dtype", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        said = serving.stdout.readline()
        address = re.search(r"serves SmolLM2-135M-Instruct on (http://127\.0\.0\.1:\d+)", said)
        assert address is not None, serving.stderr.read()
        children = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
        (server,) = map(int, children)
        headers = authorization(key_for(port_of(address.group(1))))
        with httpx2.Client(
            base_url=address.group(1), headers=headers, timeout=60, trust_env=False
        ) as http:
            answer = http.post(
                "/v1/completions",
                json={
                    "model": http.get("/v1/models").json()["data"][0]["id"],
                    "prompt": "The capital of France is",
                    "max_tokens": 4,
                    "temperature": 0,
                },
            )
        assert "Paris" in answer.json()["choices"][0]["text"]
        segments = shared_segments(server)
        assert segments
        serving.send_signal(signal.SIGINT)
        assert serving.wait(30) == 0
    assert not any(members(server))
    assert not [segment for segment in segments if segment.exists()]
