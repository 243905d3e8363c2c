"""Children end with their parent, leave their words in a log, and take their descendants along."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal_lab.engines.keys import KEY_VARIABLE
from areal_lab.host import processes
from areal_lab.host.memory import group_peak_rss_bytes
from areal_lab.host.process_groups import group_of, members
from areal_lab.host.processes import (
    Child,
    ChildDied,
    heavy_imports,
    last_lines,
    start_child,
)

BOUND_MS = 20_000
"""How long a killed process may take to be gone, on a busy machine."""

# The children write a process id to the descriptor in their first argument once they are set up.

CHILDREN = {
    "speaks_and_fails": "print('first'); raise SystemExit('what went wrong')",
    "waits": "from areal_lab.host.processes import watch_parent\n"
    "import os, signal, sys\n"
    "watch_parent()\n"
    "os.write(int(sys.argv[1]), b'%d' % os.getpid())\n"
    "signal.pause()\n",
    "keeps_all_threads": "from areal_lab.host.processes import watch_parent\n"
    "import os, re, sys\n"
    "watch_parent(guarded=True)\n"
    "os.write(int(sys.argv[1]), b'%d' % os.getpid())\n"
    "re.match('(a+)+$', 'a' * 64 + 'b')\n",
    "is_stopped": "from areal_lab.host.processes import watch_parent\n"
    "import os, signal, sys\n"
    "watch_parent(guarded=True)\n"
    "os.write(int(sys.argv[1]), b'%d' % os.getpid())\n"
    "os.kill(os.getpid(), signal.SIGSTOP)\n",
    "ignores_sigterm": "import os, signal, sys\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "os.write(int(sys.argv[1]), b'%d' % os.getpid())\n"
    "while True: signal.pause()\n",
    "has_a_child": "import os, signal, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "os.write(int(sys.argv[1]), b'%d' % child.pid)\n"
    "signal.pause()\n",
    "holds_memory": "import os, signal, subprocess, sys\n"
    "mine, theirs = bytearray(b'x') * (48 << 20), 'bytearray(b\"x\") * (64 << 20)'\n"
    "source = f'import os, signal; block = {theirs}; os.write(1, b\"%d\" % os.getpid())'\n"
    "source += '; signal.pause()'\n"
    "child = subprocess.Popen([sys.executable, '-c', source], stdout=int(sys.argv[1]))\n"
    "signal.pause()\n",
}

PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from areal_lab.host.processes import start_child

async def main():
    hears, tells = os.pipe()
    child = await start_child(
        "child", sys.argv[3], [str(tells)], log_path=Path(sys.argv[1]), pass_fds=[tells]
    )
    word = os.read(hears, 20)
    if sys.argv[2] == "alone" or os.fork() > 0:
        os.write(1, word)
    signal.pause()

asyncio.run(main())
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in CHILDREN.items():
        (tmp_path / f"{name}.py").write_text(source)
    path = os.pathsep.join((str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


def ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(BOUND_MS))


async def start_and_hear(module: str, log_path: Path) -> tuple[Child, int]:
    """Start a child and wait for the process id that it tells."""
    hears, tells = os.pipe()
    child = await start_child("child", module, [str(tells)], log_path=log_path, pass_fds=[tells])
    os.close(tells)
    word = await asyncio.to_thread(os.read, hears, 20)
    os.close(hears)
    return child, int(word)


def test_the_end_of_a_child_is_told_with_its_last_words(modules: Path) -> None:
    async def scenario() -> ChildDied:
        child = await start_child(
            "reward 3", "speaks_and_fails", [], log_path=modules / "logs" / "a.log"
        )
        died = await child.died()
        await child.stop()
        return died

    message = str(asyncio.run(scenario()))
    assert message.startswith("reward 3 (process ")
    assert "exited with 1" in message
    assert message.endswith("first\nwhat went wrong")


def test_the_signal_that_killed_a_child_is_named(modules: Path) -> None:
    async def scenario() -> ChildDied:
        child, _ = await start_and_hear("waits", modules / "a.log")
        os.kill(child.pid, signal.SIGKILL)
        died = await child.died()
        await child.stop()
        return died

    assert "was killed by SIGKILL" in str(asyncio.run(scenario()))


def test_a_child_gets_the_key_of_an_engine_only_if_it_is_given(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (modules / "tells_its_key.py").write_text(f"import os; print(os.environ.get({KEY_VARIABLE!r}))")
    monkeypatch.setenv(KEY_VARIABLE, "inherited")

    async def scenario() -> None:
        for given in ({}, {KEY_VARIABLE: "given"}):
            child = await start_child(
                "child", "tells_its_key", [], log_path=modules / "log", environment=given
            )
            await child.process.wait()
            await child.stop()

    asyncio.run(scenario())
    assert (modules / "log").read_text() == "None\ngiven\n"


def test_stop_takes_descendants_along(modules: Path) -> None:
    async def scenario() -> int:
        child, grandchild = await start_and_hear("has_a_child", modules / "a.log")
        pidfd = os.pidfd_open(grandchild)
        await child.stop()
        return pidfd

    assert ended(asyncio.run(scenario()))


def test_stop_ends_a_child_that_ignores_sigterm(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_GRACE_S", 0.05)

    async def scenario() -> int | None:
        child, _ = await start_and_hear("ignores_sigterm", modules / "a.log")
        await child.stop()
        return child.process.returncode

    assert asyncio.run(scenario()) == -signal.SIGKILL


def test_a_second_stop_closes_no_other_descriptor(modules: Path) -> None:
    async def scenario() -> None:
        child, _ = await start_and_hear("waits", modules / "a.log")
        await child.stop()
        pipes = [os.pipe() for _ in range(4)]  # these take the numbers that became free
        await child.stop()
        for end in (end for pipe in pipes for end in pipe):
            os.close(end)  # an OSError if it had been closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("how", "child"),
    [
        ("alone", "waits"),
        ("fork", "waits"),
        ("alone", "keeps_all_threads"),
        ("alone", "is_stopped"),
    ],
)
def test_a_child_dies_when_its_parent_is_killed(modules: Path, how: str, child: str) -> None:
    """Even when another child of the parent, forked, still holds a copy of the lifeline, or when
    the child itself cannot notice it."""
    log = modules / "a.log"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log), how, child],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(os.read(parent.stdout.fileno(), 20)))
        try:
            parent.kill()
            assert ended(pidfd)
        finally:
            os.close(pidfd)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)  # what it forked


@pytest.mark.usefixtures("modules")
def test_a_program_started_by_hand_watches_no_parent() -> None:
    source = "from areal_lab.host.processes import watch_parent; watch_parent(); print('fine')"
    run = subprocess.run(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True
    )
    assert run.stdout == "fine\n"


def test_the_memory_of_a_child_is_that_of_its_descendants_too(modules: Path) -> None:
    async def scenario() -> tuple[int, int]:
        child, grandchild = await start_and_hear("holds_memory", modules / "a.log")
        pidfd = os.pidfd_open(grandchild)
        running = group_peak_rss_bytes(child.pid)
        await child.stop()
        assert ended(pidfd)
        return running, group_peak_rss_bytes(child.pid)

    running, stopped = asyncio.run(scenario())
    assert 48 + 64 < running / (1 << 20) < 48 + 64 + 2 * 40  # 40: an interpreter with its libraries
    assert stopped == 0


def test_members_of_a_group_are_found_without_reading_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []

    def process(pid: int) -> psutil.Process:
        read.append(pid)
        return original(pid)

    original, group = psutil.Process, os.getpgid(0)
    monkeypatch.setattr(psutil, "Process", process)
    with subprocess.Popen(["sleep", "60"], process_group=0) as other:
        try:
            found = {member.pid for member in members(group)}
        finally:
            other.kill()
    assert os.getpid() in found
    assert other.pid not in read
    assert {group_of(pid) for pid in read} <= {group, None}


def test_last_lines_of_what_is_not_there(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.touch()
    assert last_lines(empty) == "(the log is empty)"
    assert last_lines(tmp_path / "none.log").startswith("(no log: ")


def test_last_lines_are_the_last_ones_and_none_is_endless(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("first\nsettings " + "x" * 10_000 + "\nlast\n")
    settings, last = last_lines(log, count=2).splitlines()
    assert settings.startswith("settings xxx")
    assert settings.endswith(" ...")
    assert len(settings) < 400
    assert last == "last"


def test_garbage_is_looked_for_again_after_imports_that_fail_too() -> None:
    def import_much() -> None:
        with heavy_imports():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        import_much()
    assert gc.isenabled()
