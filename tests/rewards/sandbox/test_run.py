"""Programs, their limits and their ends; from threads, from an event loop, and after a kill."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from areal_lab.host.isolation import Level
from areal_lab.rewards.sandbox import keeper
from areal_lab.rewards.sandbox.run import (
    Finished,
    Limits,
    Sandbox,
    SandboxError,
    _Call,
    _read,
    read_reply,
)
from tests.rewards.sandbox.test_attacks import LEVELS

MIB = 1 << 20
EVERY: tuple[Level, ...] = (*LEVELS, "unsafe")
SHORT = Limits(timeout_s=0.5)
DAEMON = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"{mark}", 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
time.sleep(600)
"""


def processes(name: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["name"]) if one.info["name"] == name]


@pytest.mark.parametrize("level", EVERY)
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print(6 * 7)", Finished(end="exited", stdout="42\n")),
        ("print(input()[::-1])", Finished(end="exited", stdout="cba\n")),
        ("import sys; sys.exit(3)", Finished(end="exited", code=3)),
        ("import sys; sys.exit('no')", Finished(end="exited", code=1, stderr="no\n")),
        ("import os; os.abort()", Finished(end="crashed", code=signal.SIGABRT)),
        ("import os; os.kill(os.getpid(), 9)", Finished(end="crashed", code=signal.SIGKILL)),
        ("while True: pass", Finished(end="timeout")),
        ("while True: print('x' * 1000)", Finished(end="output", stdout="x" * 1000 + "\n")),
        (
            "if __name__ == '__main__': print(__file__ if '__file__' in vars() else 'no file')",
            Finished(end="exited", stdout="no file\n"),
        ),
        ("import atexit; atexit.register(print, 'late')", Finished(end="exited", stdout="late\n")),
        (
            "import threading as t; t.Timer(0.05, print, ['thread']).start()",
            Finished(end="exited", stdout="thread\n"),
        ),
    ],
)
def test_how_a_program_ends(level: Level, program: str, expected: Finished) -> None:
    found = Sandbox(level).run(program, stdin="abc\n", limits=SHORT)
    assert (found.end, found.code) == (expected.end, expected.code)
    assert found.stdout[: len(expected.stdout)] == expected.stdout
    assert found.stderr == expected.stderr


@pytest.mark.parametrize("level", EVERY)
def test_an_error_shows_the_program_alone(level: Level) -> None:
    found = Sandbox(level).run("def f():\n    1 / 0\nf()")
    assert (found.end, found.code, found.passed) == ("exited", 1, False)
    lines = found.stderr.splitlines()
    assert [line.strip() for line in lines if line.startswith("  File")] == [
        'File "program.py", line 3, in <module>',
        'File "program.py", line 2, in f',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "SyntaxError" in Sandbox(level).run("1 +").stderr


@pytest.mark.parametrize("level", EVERY)
def test_memory_of_children_is_summed(level: Level) -> None:
    program = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(b"x") * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""
    limits = Limits(timeout_s=30, memory_bytes=160 * MIB)
    assert Sandbox(level).run(program, limits=limits).end == "memory"


@pytest.mark.parametrize("level", EVERY)
def test_shared_memory_counts_once(level: Level) -> None:
    program = """
import os, time
block = bytearray(b"x") * (60 << 20)
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.2)
        os._exit(0)
for _ in range(4):
    os.wait()
"""
    limits = Limits(timeout_s=30, memory_bytes=160 * MIB)
    assert Sandbox(level).run(program, limits=limits).passed


@pytest.mark.parametrize("level", EVERY)
def test_a_program_starts_in_an_empty_folder_that_is_removed(level: Level) -> None:
    program = """
import os, sys
assert os.listdir(".") == []
open("file", "w").close()
assert "SECRET" not in str(os.environ)
print(os.getcwd(), sorted(os.environ))
"""
    found = Sandbox(level).run(program)
    assert found.passed, found
    assert not Path(found.stdout.split()[0], "file").exists()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("bwrap") is None,
    reason="devices are root's, whose programs could change them; needs make bubblewrap",
)
def test_devices_are_kept_from_programs_of_a_root_without_capabilities() -> None:
    """Such as that of a container: mounts need a user namespace of their own then."""
    program = "import os\nos.chmod('/dev/null', 0o666)"
    worker = (
        "from areal_lab.rewards.sandbox.run import *\n"
        f"print(Sandbox('bubblewrap').run({program!r}).stderr)"
    )
    become = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"]
    command = [*become, sys.executable, "-c", worker]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Read-only file system: '/dev/null'" in ended.stdout, ended.stderr


def test_no_files_of_a_program_cost_its_result() -> None:
    """Level unsafe: elsewhere its folder is memory that goes with its namespace."""
    program = """
import os
for _ in range({depth}):
    os.mkdir("d")
    open("file", "w").close()
    os.chmod(".", {mode})
    os.chdir("d")
print("done")
"""
    for depth, mode in ((1200, 0o755), (3, 0o300)):  # Python recurses 1000 times
        found = Sandbox("unsafe").run(program.format(depth=depth, mode=mode))
        assert (found.end, found.stdout, found.left) == ("exited", "done\n", ())
    assert not [*Path("/tmp").glob("areal-lab-code-*/d")]


def test_a_result_is_kept_if_the_clean_up_fails(caplog: pytest.LogCaptureFixture) -> None:
    ended = b"".join(number.to_bytes(8, "little") for number in (keeper.EXITED, 0, 1, 1, 3, 0))
    (found,) = read_reply(ended + b"yes" + b"/tmp/x: it stays\n/tmp/y: too", 1)
    assert (found.stdout, found.left) == ("yes", ("/tmp/x: it stays", "/tmp/y: too"))
    assert "2 files or folders of a program could not be removed: /tmp/x: it stays" in caplog.text
    assert _read(_Call(b"", 1, 1.0), -9, ended + b"yes", b"killed")[0].stdout == "yes"
    with pytest.raises(SandboxError, match="cut off"):
        read_reply(ended + b"ye", 1)


def test_cpu_time_is_limited() -> None:
    limits = Limits(cpu_s=0.5, timeout_s=600)  # a second, rounded up
    found = Sandbox(LEVELS[-1]).run("while True: pass", limits=limits)
    assert (found.end, found.code) == ("timeout", 0)
    assert found.cpu_s > 0.5  # the kernel counts ticks


def test_a_large_input_reaches_the_program_and_need_not_be_read() -> None:
    sandbox, text = Sandbox(LEVELS[0]), "line\n" * 200_000
    found = sandbox.run("import sys; print(len(sys.stdin.read()))", stdin=text)
    assert found.stdout == "1000000\n"
    assert sandbox.run("print(1)", stdin=text).stdout == "1\n"


def test_processes_can_talk_to_each_other() -> None:
    program = """
import multiprocessing
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(double, [1, 2, 3]))
"""
    for level in LEVELS:
        assert Sandbox(level).run(program, limits=Limits(timeout_s=30)).stdout == "[2, 4, 6]\n"


def test_packages_can_be_made_visible(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # programs that root starts are nobody's
    (tmp_path / "mine.py").write_text("answer = 42")
    program = "import mine\nprint(mine.answer)\nopen(mine.__file__, 'w')"
    for level in LEVELS:
        found = Sandbox(level, folders=(str(tmp_path),)).run(program)
        assert found.stdout == "42\n"
        assert "Error" in found.stderr
    assert (tmp_path / "mine.py").read_text() == "answer = 42"
    with pytest.raises(ValueError, match="must be the absolute path of a folder"):
        Sandbox(LEVELS[0], folders=("mine",)).run("")


@pytest.mark.parametrize("level", EVERY)
def test_time_of_a_program_is_measured(level: Level) -> None:
    found = Sandbox(level).run("while __import__('time').process_time() < 0.1: pass")
    assert found.wall_s > 0.05
    assert found.cpu_s > 0.05


def test_many_run_at_once_in_threads() -> None:
    sandbox = Sandbox(LEVELS[0])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: sandbox.run(f"print({n})").stdout, range(24)))
    assert found == [f"{n}\n" for n in range(24)]


@pytest.mark.parametrize("level", EVERY)
def test_many_run_at_once_in_an_event_loop(level: Level) -> None:
    async def main() -> list[str]:
        sandbox = Sandbox(level)
        runs = [sandbox.run_async("print(input())", stdin=str(n)) for n in range(8)]
        return [one.stdout for one in await asyncio.gather(*runs)]

    assert asyncio.run(main()) == [f"{n}\n" for n in range(8)]


@pytest.mark.parametrize("level", EVERY)
def test_a_call_that_is_cancelled_ends_its_program(level: Level) -> None:
    mark = f"cxl-{level[:5]}-{os.getpid() % 10_000}"

    async def main() -> None:
        call = asyncio.create_task(
            Sandbox(level).run_async(DAEMON.format(mark=mark), limits=Limits(timeout_s=600))
        )
        while not processes(mark):
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert processes(mark) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("level", EVERY)
def test_programs_end_with_the_process_that_runs_them(level: Level, how: signal.Signals) -> None:
    mark = f"end-{level[:5]}-{os.getpid() % 10_000}"
    program = DAEMON.format(mark=mark)
    worker = (
        "from areal_lab.rewards.sandbox.run import *\n"
        f"Sandbox({level!r}).run({program!r}, limits=Limits(timeout_s=600))"
    )
    with subprocess.Popen([sys.executable, "-c", worker], stderr=subprocess.DEVNULL) as process:
        while not processes(mark):
            assert process.poll() is None
        process.send_signal(how)
    _, left = psutil.wait_procs(processes(mark), timeout=30)
    assert left == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_keeper_that_is_killed_takes_its_program_along(level: Level) -> None:
    mark = f"kpr-{level[:5]}-{os.getpid() % 10_000}"
    with ThreadPoolExecutor(1) as thread:
        sandbox, program = Sandbox(level), DAEMON.format(mark=mark)
        run = thread.submit(sandbox.run, program, limits=Limits(timeout_s=600))
        while not (found := processes(mark)):
            time.sleep(0.01)
        outside = next(one for one in found[0].parents() if one.ppid() == os.getpid())
        outside.kill()
        with pytest.raises(SandboxError, match="the sandbox failed"):
            run.result()
    _, left = psutil.wait_procs(found, timeout=30)
    assert left == []


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="timeout_s is 0, but must be > 0 and finite"):
        Limits(timeout_s=0)
    with pytest.raises(ValueError, match="memory_bytes is -1, but must be > 0"):
        Limits(memory_bytes=-1)
    with pytest.raises(ValueError, match="timeout_s is inf"):
        Limits(timeout_s=float("inf"))


def test_a_program_may_be_any_text() -> None:
    found = Sandbox(LEVELS[0]).run("print('\udc80\u20ac')", stdin="\udc80")
    assert found.stdout == "?\u20ac\n"
    assert "null bytes" in Sandbox(LEVELS[0]).run("print(1)\0").stderr


def test_a_reply_that_is_none_is_refused() -> None:
    with pytest.raises(SandboxError, match="ended without a reply"):
        read_reply(b"", 1)
    with pytest.raises(SandboxError, match=r"^out of room$"):
        read_reply(keeper.REFUSED.to_bytes(8, "little") + b"out of\n room", 1)
