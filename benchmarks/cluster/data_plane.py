"""Measure the data plane: weights from one agent to one to four receivers, three ways."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import uvicorn

from areal_lab.cluster.folders.connections import Agent
from areal_lab.cluster.folders.mirror import folder_url
from areal_lab.cluster.folders.server import DataPlane, Host
from areal_lab.engines.keys import new_key
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.host.processes import start_child, watch_parent
from benchmarks.cluster.receiver import WAYS
from benchmarks.harness import spread

WEIGHT_BYTES: Final = 270_000_000
RECEIVERS: Final = (1, 2, 4)
KEY_VARIABLE: Final = "BENCHMARK_KEY"
INCARNATION: Final = "1"


def measure(*, quick: bool, repeats: int) -> dict[str, Any]:
    """Figures and rows of this part."""
    scale = 50 if quick else 1
    receivers = (1, 2) if quick else RECEIVERS
    rows: list[dict[str, Any]] = []
    spreads: dict[str, Any] = {}
    with ExitStack() as stack:
        place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
        (folder / "weights").mkdir()
        weights = np.random.default_rng(0).integers(0, 256, WEIGHT_BYTES // scale, np.uint8)
        (folder / "weights" / "model.safetensors").write_bytes(weights.data)
        key = new_key()
        agent, process = stack.enter_context(_serving(key, folder))
        fetching = [stack.enter_context(_receiver(key)) for _ in range(max(receivers))]
        url = folder_url(agent, "weights")
        for count in receivers:
            asked = [{"url": url, "destination": str(folder / f"mirror {i}")} for i in range(count)]
            times: dict[str, list[tuple[float, float, float, int]]] = {way: [] for way in WAYS}
            for repeat in range(repeats + 1):  # the first one warms up
                for way in WAYS:
                    one = _once(asked, way, fetching[:count], process)
                    times[way] += [one] if repeat else []
            for way, found in times.items():
                seconds, sender_s, receiver_s, size = zip(*found, strict=True)
                spreads[f"weights {count} {way}"] = spread(seconds)
                rows.append(
                    {
                        "what": "weights",
                        "receivers": count,
                        "way": way,
                        "seconds": statistics.median(seconds),
                        "gb_per_s": size[0] / statistics.median(seconds) / 1e9,
                        "sender_cpu_s": statistics.median(sender_s),
                        "receivers_cpu_s": statistics.median(receiver_s),
                    }
                )
    return {
        "rows": rows,
        "spread": spreads,
        "weight_bytes": len(weights),
        "inputs": {"stream_bytes_per_s": _stream(rows)},
        "httpx_to_readinto": _ratio(rows, "httpx", "readinto"),
        "four_streams_to_readinto": _ratio(rows, "four streams", "readinto"),
    }


def _once(
    asked: Sequence[dict[str, Any]],
    way: str,
    receivers: Sequence[subprocess.Popen[str]],
    sender: psutil.Process,
) -> tuple[float, float, float, int]:
    """Seconds, CPU seconds of the sender and of all receivers, and bytes."""
    before_s = _cpu_s(sender)
    begun_s = time.perf_counter()
    for receiver, one in zip(receivers, asked, strict=True):
        _tell(receiver, {**one, "way": way})
    replies = [_reply(receiver) for receiver in receivers]
    seconds = time.perf_counter() - begun_s
    cpu_s = sum(reply["cpu_s"] for reply in replies)
    return seconds, _cpu_s(sender) - before_s, cpu_s, sum(reply["bytes"] for reply in replies)


def _stream(rows: Sequence[dict[str, Any]]) -> float:
    """Bytes a second of one connection to one receiver."""
    one = ("weights", 1, "readinto")
    rates = [r["gb_per_s"] for r in rows if (r["what"], r["receivers"], r["way"]) == one]
    return 1e9 * float(rates[0])


def _ratio(rows: Sequence[dict[str, Any]], way: str, to: str) -> dict[str, float]:
    """Seconds of one way over those of another, by what and number of receivers."""
    seconds = {(row["what"], row["receivers"], row["way"]): row["seconds"] for row in rows}
    return {
        f"{what} {count}": seconds[what, count, way] / seconds[what, count, to]
        for what, count, other in seconds
        if other == to
    }


@contextmanager
def _receiver(key: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.receiver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _tell(process, {"key": key})
        yield process
    finally:
        process.communicate()  # its input ends, and so does it


def _tell(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _reply(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a receiver failed; its error is above")
    found: dict[str, Any] = json.loads(line)
    return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _serving(key: str, folder: Path) -> Iterator[tuple[Agent, psutil.Process]]:
    """An agent in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener, asyncio.Runner() as runner:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        child = runner.run(
            start_child(
                "agent",
                "benchmarks.cluster.data_plane",
                [str(listener.fileno()), address, str(folder / "weights")],
                log_path=folder / "agent.log",
                environment={KEY_VARIABLE: key},
                pass_fds=[listener.fileno()],
            )
        )
        try:
            yield Agent(address, INCARNATION), psutil.Process(child.pid)
        finally:
            runner.run(child.stop())


def _serve(descriptor: int, address: str, folder: Path) -> None:
    """The agent's process."""
    watch_parent()
    plane = DataPlane(Host("n1", address, INCARNATION))
    plane.folders.register("weights", folder)
    app = plane.app(os.environ[KEY_VARIABLE])
    config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
