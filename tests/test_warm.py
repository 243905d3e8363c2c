"""A forked child sees the same environment as a started one."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_lab.host.processes import start_child
from tests.warm import children_from_a_warm_interpreter, run_forked

FACTS = """
import json, os, signal, sys, threading
with os.fdopen(int(sys.argv.pop(1)), "w") as tells:
    lifeline, parent = map(int, os.environ.pop("AREAL_LAB_LIFELINE").split(","))
    listed = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [os.readlink(file) for file in listed if os.path.exists(file)]
    facts = {
        "name": __name__,
        "main": vars(sys.modules["__main__"]) is globals(),
        "arguments": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "parent": os.getppid() - parent,
        "session and group": [os.getsid(0) - os.getpid(), os.getpgid(0) - os.getpid()],
        "standard files": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)],
        "all files": sorted(file.split(":")[0] for file in files),
        "signals": {n: str(signal.getsignal(n)) for n in signal.valid_signals()},
        "blocked": [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "threads": threading.active_count(),
        "umask": os.umask(0),
    }
    json.dump(facts, tells)
print("some words")
sys.exit(int(sys.argv[1]))
"""


async def facts_of_a_child(log_path: Path, exit_code: int) -> tuple[dict[str, Any], int, str]:
    """Facts reported by a child, its exit and its log."""
    hears, tells = os.pipe()
    child = await start_child(
        "child", "facts", [str(tells), str(exit_code)], log_path=log_path, pass_fds=[tells]
    )
    os.close(tells)
    with os.fdopen(hears) as reply:
        facts = json.loads(await asyncio.to_thread(reply.read))
    code = await child.process.wait()
    await child.stop()
    return facts, code, log_path.read_text()


def test_a_forked_child_sees_the_same_as_a_started_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(Path.cwd()))))

    def facts(exit_code: int) -> tuple[dict[str, Any], int, str]:
        (tmp_path / "log").unlink(missing_ok=True)
        (tmp_path / str(exit_code)).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / str(exit_code))
        for other in (0, 7):
            monkeypatch.delenv(f"CODE_{other}", raising=False)
        monkeypatch.setenv(f"CODE_{exit_code}", "is asked for")
        return asyncio.run(facts_of_a_child(tmp_path / "log", exit_code))

    started = [facts(code) for code in (0, 7)]
    with children_from_a_warm_interpreter(["facts"]):
        forked = [facts(code) for code in (0, 7)]
    assert forked == started
    assert [rest for _, *rest in forked] == [[0, "some words\n"], [7, "some words\n"]]


def test_a_forked_command_has_its_folder_its_search_path_and_its_output(tmp_path: Path) -> None:
    (tmp_path / "searched").mkdir()
    (tmp_path / "searched" / "says.py").write_text(
        "import os, sys; print(os.getcwd(), *sys.argv[1:]); sys.exit('no')"
    )
    done = run_forked(
        [sys.executable, "-m", "says", "a"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "searched")},
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, f"{tmp_path} a\n", "no\n")
