"""Run all attacks and cheats at one level as this user, and print what happened, as JSON.

    python attacker.py LEVEL FOLDER

Looks for what was left behind, too: processes, files, sockets, mounts, descriptors. FOLDER has a
copy of the packages, since the user may not be able to read the tests' own.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[2])

from areal_lab.rewards.python_tests import humaneval
from areal_lab.rewards.sandbox.run import Limits, Sandbox
from tests.rewards.sandbox.attacks import ATTACKS, CHEATS, ESCAPED, GOOD, PROBLEM, Attack, World

AT_ONCE = 6


def attacked(attack: Attack, sandbox: Sandbox, world: World, number: int) -> str:
    """Empty if the sandbox held, else what happened."""
    named = {name: getattr(world, name) for name in World.__slots__}
    if "prctl" in attack.program:
        named["mark"] += f"-{number}"  # names of processes; abstract sockets have the plain one
    lines = [f"{name} = {value!r}" for name, value in named.items()]
    program = "\n".join(lines) + "\n" + attack.program
    finished = sandbox.run(program, limits=Limits(**attack.limits))  # type: ignore[arg-type]
    seen = finished.end in attack.ends and ESCAPED not in finished.stdout
    failed_itself = finished.end == "exited" and finished.code != 0
    held = seen and not failed_itself and attack.holds(finished, world)
    return "" if held else repr(finished)[:2000]


def left_behind(world: World, before: dict[str, Any]) -> list[str]:
    """What was not there before."""
    found = [f"process {pid}" for pid in children() if pid != world.victim]
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            name = comm.read_text()
        except OSError:
            continue  # it has ended
        if world.mark in name:
            found.append(f"process {comm.parent.name} {name}")
    after = state()
    found += [f"{kind}: {after[kind]}" for kind in after if after[kind] != before[kind]]
    if Path("/proc/net/unix").read_text().count(world.mark) != 1:
        found.append("a socket")
    for folder in ("/", "/etc", "/usr", "/tmp", "/dev/shm", str(Path(world.target).parent)):
        found += [str(path) for path in Path(folder).glob(f"*{world.mark}*")]
    return found


def children() -> list[int]:
    """Processes whose parent, by birth or adoption, is this one."""
    texts = [one.read_text() for one in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for text in texts for pid in text.split()]


def state() -> dict[str, Any]:
    """Mounts and descriptors of this process."""
    return {
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": len([*Path("/tmp").glob(f"areal-lab-code-{os.getpid()}*")]),
    }


def main() -> None:
    """Run everything and print it."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become children of this process
    sandbox = Sandbox(sys.argv[1])  # type: ignore[arg-type]
    mark = f"atk{os.getpid()}"
    os.environ["SECRET_TOKEN"] = mark
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        os.chmod(folder, 0o777)
        secret, target = Path(folder, "secret"), Path(folder, "target")
        secret.write_text(mark)
        target.write_text("untouched")
        target.chmod(0o666)
        server, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
        server.bind(("127.0.0.1", 0))
        abstract.bind(f"\0{mark}")
        for one in (server, abstract):
            stack.enter_context(one).listen()
        sleep = [sys.executable, "-I", "-c", "import time; time.sleep(600)"]
        victim = stack.enter_context(subprocess.Popen(sleep))
        stack.callback(victim.kill)
        port = server.getsockname()[1]
        world = World(mark, victim.pid, os.getpid(), port, str(secret), str(target))
        before = state()
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = threads.map(
                lambda attack, n: attacked(attack, sandbox, world, n),
                ATTACKS,
                range(len(ATTACKS)),
            )
            rewards = threads.map(
                lambda code: humaneval(code, PROBLEM, sandbox=sandbox.level),
                [GOOD, *CHEATS.values()],
            )
            report = {
                "user": os.getuid(),
                "attacks": dict(zip([one.name for one in ATTACKS], found, strict=True)),
                "cheats": dict(zip(["good", *CHEATS], rewards, strict=True)),
            }
        print(
            json.dumps(
                {
                    **report,
                    "left": left_behind(world, before),
                    "victim_lives": victim.poll() is None,
                }
            )
        )


if __name__ == "__main__":
    main()
