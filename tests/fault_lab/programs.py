"""Reward functions and agents of users on a bad day: each fault happens once, in its own group.

A fault is claimed by a file in a folder, which the test reads afterwards: the prompt of its group,
and the processes that must be gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from areal_lab.rewards.sandbox.levels import choose
from areal_lab.rewards.sandbox.run import Finished, Limits, Sandbox
from tests.pipeline.programs import ask

POLL_S: Final = 0.005
WORKER_KILLED, WORKER_HUNG = "worker killed", "worker hung"
KEEPER_KILLED, KEEPER_HUNG, PROGRAM_KILLED = "keeper killed", "keeper hung", "program killed"
SCORING: Final = (WORKER_KILLED, WORKER_HUNG, KEEPER_KILLED, KEEPER_HUNG, PROGRAM_KILLED)
BETWEEN, IN_STREAM, HUNG = "killed between two turns", "killed in mid-stream", "hung"
ASKING: Final = "killed while the model answers"
ACTING: Final = (BETWEEN, ASKING, IN_STREAM, HUNG)
FOLDER: Final = "FAULTS_OF_AGENTS"
"""Environment variable of agents: the folder of the claims."""
KEY_VARIABLE: Final = "AREAL_LAB_ENGINE_KEY"
THREADS: Final = 4
_LONG: Final = "import threading, time\n" + "\n".join(
    "threading.Thread(target=time.sleep, args=(3600,)).start()" for _ in range(THREADS - 1)
)


def claim(folder: Path, faults: Sequence[str], prompt: str) -> str:
    """The fault that is to happen now; empty if none is left, or the group had one already."""
    with open_locked(folder):
        taken = {file.name: json.loads(file.read_text()) for file in folder.iterdir()}
        left = [fault for fault in faults if fault not in taken]
        if not left or any(one["prompt"] == prompt for one in taken.values()):
            return ""
        noted = {"prompt": prompt, "processes": [os.getpid()]}
        (folder / left[0]).write_text(json.dumps(noted))
        return left[0]


@contextmanager
def open_locked(folder: Path) -> Iterator[None]:
    """One process at a time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def note_processes(folder: Path, fault: str, processes: Sequence[int]) -> None:
    """Add processes to those that must be gone."""
    file = folder / fault
    noted = json.loads(file.read_text())
    noted["processes"] += processes
    file.write_text(json.dumps(noted))


def processes_of(folder: Path) -> list[int]:
    """All that must be gone."""
    return [
        number for file in folder.iterdir() for number in json.loads(file.read_text())["processes"]
    ]


# --- rewards -------------------------------------------------------------------------------------


def score(completion: str, example: Mapping[str, Any], *, sandbox: Any, folder: str) -> float:
    """The number of even digits; a fault happens while it is counted."""
    fault = claim(Path(folder), SCORING, str(example["prompt"]))
    if fault == WORKER_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == WORKER_HUNG:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault:
        found = struck(choose(sandbox), Path(folder), fault)
        assert (found.end, found.code) == ("crashed", signal.SIGKILL), found
        return 0.0
    return float(sum(character in "02468" for character in completion))


def struck(sandbox: Sandbox, folder: Path, fault: str) -> Finished:
    """Run a program, and let the fault happen once it runs."""

    def strike() -> None:
        keeper, inside = running_cell()
        note_processes(folder, fault, [keeper.pid, *(one.pid for one in inside)])
        if fault == KEEPER_KILLED:
            keeper.kill()
        elif fault == KEEPER_HUNG:
            keeper.suspend()
        else:
            inside[-1].kill()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        return sandbox.run(_LONG, limits=Limits(timeout_s=600.0))
    finally:
        thread.join()


def running_cell() -> tuple[psutil.Process, list[psutil.Process]]:
    """The keeper of the program of this process, and the processes below it, the program last."""
    while True:
        for keeper in psutil.Process().children():
            inside = keeper.children(recursive=True)
            try:
                # Only the program has threads.
                inside.sort(key=lambda one: one.num_threads())
                if inside and inside[-1].num_threads() == THREADS:
                    return keeper, inside
            except psutil.NoSuchProcess:
                pass
        time.sleep(POLL_S)


# --- agents --------------------------------------------------------------------------------------


def two_turns(data: Mapping[str, Any]) -> float:
    """Ask two questions; one that is to be killed at the first tells its number in it."""
    own = Path("/proc/self/environ").read_bytes()
    assert KEY_VARIABLE not in os.environ
    assert KEY_VARIABLE.encode() not in own
    folder = Path(os.environ[FOLDER])
    url, key = data["base_url"], data["api_key"]
    fault = claim(folder, ACTING, str(data["prompt"]))
    messages = [{"role": "user", "content": f"{os.getpid()} =" if fault == ASKING else "+ ="}]
    if fault == IN_STREAM:
        begin_stream(url, key, messages)
        os.kill(os.getpid(), signal.SIGKILL)
    first = ask(url, key, messages)["choices"][0]["message"]["content"]
    if fault == BETWEEN:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == HUNG:
        os.kill(os.getpid(), signal.SIGSTOP)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": SECOND}]
    second = ask(url, key, messages)["choices"][0]["message"]["content"]
    return float(len(first + second) % 2)


SECOND: Final = "9 + 9 ="


def begin_stream(url: str, key: str, messages: Sequence[Mapping[str, str]]) -> None:
    """Ask for a stream, and read its first event."""
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps({"model": "any", "messages": list(messages), "stream": True}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.readline().startswith(b"data: ")


def process_that_asks(prompt: str) -> int | None:
    """The process whose number this prompt tells, if it tells one."""
    found = re.fullmatch(r"(\d+) ==", prompt)
    return None if found is None else int(found.group(1))


def keeps_all_threads(data: Mapping[str, Any]) -> float:
    """Asks, and then computes in C for ever."""
    ask(data["base_url"], data["api_key"], [{"role": "user", "content": "1 ="}])
    (Path(os.environ[FOLDER]) / str(os.getpid())).touch()
    re.match("(a+)+$", "a" * 64 + "b")
    return 0.0
