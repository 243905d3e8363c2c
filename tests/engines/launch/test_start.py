"""Starting servers: taken ports, servers that die or never become ready, leftover files.

The server is a small HTTP server in its own process; a file says how it behaves.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from areal_lab.engines.keys import KEY_VARIABLE, authorization
from areal_lab.engines.launch import start as launch
from areal_lab.engines.launch.backends import EMBEDDED, SGLANG, VLLM, Backend, ServerOptions
from areal_lab.engines.launch.options import fit_to_machine, server_command
from areal_lab.engines.launch.start import (
    EngineProcess,
    PortTaken,
    Scratch,
    Start,
    bind,
    check_host,
    start_server,
)
from areal_lab.host.ports import Listener, who_listens
from areal_lab.host.process_groups import members
from areal_lab.host.processes import ChildDied

BOUND_S = 20.0
SERVER = """
import http.server, json, mmap, multiprocessing, os, pathlib, signal, sys, threading
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
attempt = len(list(folder.glob("attempt-*")))
(folder / f"attempt-{attempt}").write_text(str(port))
behavior = (folder / "behavior").read_text().split()
behavior = behavior[min(attempt, len(behavior) - 1)]
if behavior == "in_use":
    print("[Errno 98] error while attempting to bind: address already in use")
    sys.exit(1)
if behavior == "broken":
    sys.exit("the model is not a model")
if behavior == "waits":
    signal.pause()
def share(name):
    shared = open(f"/dev/shm/areal_lab_test-{os.getpid()}-{name}", "wb+")
    shared.truncate(4096)
    kept.append(mmap.mmap(shared.fileno(), 4096))
    (folder / name).write_text(shared.name)
environment = pathlib.Path("/proc/self/environ").read_bytes().decode().split("\\0")
(key,) = [one.partition("=")[2] for one in environment if one.startswith("AREAL_LAB_ENGINE_KEY=")]
assert "AREAL_LAB_ENGINE_KEY" not in os.environ, "its children would have it"
kept = []
share("shared")
lock = multiprocessing.get_context("spawn").Lock()
(folder / "semaphore").write_text(f"/dev/shm/sem.{lock._semlock.name.lstrip('/')}")
if "AREAL_LAB_SCRATCH" in os.environ:
    (folder / "scratch").write_text(os.environ["AREAL_LAB_SCRATCH"])
    (pathlib.Path(os.environ["TMPDIR"]) / "socket").touch()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if behavior != "open" and self.headers["authorization"] != f"Bearer {key}":
            return self.reply(401)
        if behavior == "dies":
            os.killpg(os.getpgid(0), signal.SIGKILL)
        if self.path == "/more":
            share("more")
        self.reply()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        (folder / "posted").write_text(json.dumps([self.path, body]))
        self.reply()
    def reply(self, status=200):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small_server.py").write_text(SERVER)
    return behaves(tmp_path, "serves")


def behaves(folder: Path, *attempts: str) -> Path:
    """Set the behavior of each attempt; the last one is for all further attempts."""
    (folder / "behavior").write_text(" ".join(attempts))
    return folder


def backend(folder: Path) -> Backend:
    return replace(
        SGLANG,
        module="small_server",
        arguments=lambda options: [str(folder), str(options.port)],
        environment=lambda _: {"PYTHONPATH": str(folder)},
    )


def start(
    folder: Path, port: int = 0, timeout_s: float = BOUND_S, like: Backend | None = None
) -> Awaitable[EngineProcess]:
    return start_server(
        Start(
            backend=like or backend(folder),
            python=Path(sys.executable),
            version="1.0",
            index=3,
            log_path=folder / "engine.log",
            ready_timeout_s=timeout_s,
            request_timeout_s=None,
        ),
        ServerOptions(model=folder, version="7", port=port),
    )


def attempts(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob("attempt-*"))]


def left_behind(folder: Path) -> list[Path]:
    """Remaining shared memory and temporary folder of the server."""
    names = ("shared", "semaphore", "more", "scratch")
    paths = [Path((folder / name).read_text()) for name in names if (folder / name).exists()]
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("", "it is empty"),
        ("nonsense.invalid", ""),
        ("192.0.2.1", "cannot assign requested address"),
        ("a..b", ""),
        ("::1", ""),
    ],
)
def test_a_host_is_an_address_of_this_machine(host: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"--host is '{host}', but must be an .*{reason}.*$"):
        check_host(host)
    check_host("127.0.0.1")
    check_host("0.0.0.0")


async def until_written(file: Path) -> str:
    async with asyncio.timeout(BOUND_S):
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
    return file.read_text()


def test_a_stopped_server_leaves_nothing_behind(folder: Path) -> None:
    async def scenario() -> None:
        engine = await start(folder)
        assert any(members(engine.child.pid))
        assert engine.base_url == f"http://127.0.0.1:{attempts(folder)[0]}"
        assert engine.version == "1.0"
        shared, semaphore, scratch = left_behind(folder)
        assert (shared.parent, semaphore.parent) == (Path("/dev/shm"),) * 2
        assert (scratch / "socket").exists()
        await engine.stop()
        assert not any(members(engine.child.pid))
        assert left_behind(folder) == []
        await engine.stop()

    asyncio.run(scenario())


def test_a_server_stopped_at_once_leaves_nothing_behind(folder: Path) -> None:
    async def scenario() -> None:
        engine = await start(folder)
        headers = authorization(engine.client.key)
        async with httpx2.AsyncClient(
            base_url=engine.base_url, headers=headers, trust_env=False
        ) as http:
            await http.get("/more")
        assert len(left_behind(folder)) == 4
        await engine.stop(at_once=True)
        assert left_behind(folder) == []

    asyncio.run(scenario())


def test_a_killed_server_leaves_nothing_behind(folder: Path) -> None:
    async def scenario() -> None:
        engine = await start(folder)
        os.killpg(engine.child.pid, signal.SIGKILL)
        await engine.child.died()
        assert len(left_behind(folder)) == 3
        await engine.stop()
        assert left_behind(folder) == []

    asyncio.run(scenario())


def test_a_server_that_dies_while_starting_leaves_nothing_behind(folder: Path) -> None:
    behaves(folder, "dies")
    with pytest.raises(ChildDied, match="SIGKILL"):
        asyncio.run(start(folder))
    assert (folder / "semaphore").exists()
    assert left_behind(folder) == []


def test_a_segment_that_another_process_uses_is_kept(folder: Path) -> None:
    async def scenario() -> None:
        engine = await start(folder)
        shared = Path((folder / "shared").read_text())
        other = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import mmap, signal, sys\n"
                "shared = open(sys.argv[1], 'rb+')\n"
                "kept = mmap.mmap(shared.fileno(), 4096)\n"
                "print('mapped', flush=True); signal.pause()",
                str(shared),
            ],
            stdout=subprocess.PIPE,
        )
        try:
            assert other.stdout is not None
            other.stdout.readline()
            await engine.stop()
            assert shared.exists()
        finally:
            other.kill()
            other.communicate()
            shared.unlink()

    asyncio.run(scenario())


def test_a_server_without_a_version_argument_gets_its_version_by_http(folder: Path) -> None:
    async def scenario() -> None:
        engine = await start(folder, like=replace(backend(folder), version_path="/version"))
        assert json.loads((folder / "posted").read_text()) == ["/version", {"new_version": "7"}]
        await engine.stop()

    asyncio.run(scenario())


def test_each_server_gets_a_key_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of servers that the user may attach to, and not in a command line."""
    monkeypatch.setenv(KEY_VARIABLE, "of-another-server")

    async def scenario() -> None:
        engines = [await start(folder) for _ in range(2)]
        keys = {engine.client.key for engine in engines}
        assert len(keys - {"of-another-server"}) == 2
        for engine in engines:
            assert len(engine.client.key) >= 32
            for process in members(engine.child.pid):
                assert not keys & set(" ".join(process.cmdline()).split())
            assert engine.client.key not in repr(engine)
            assert engine.client.key not in (folder / "engine.log").read_text()
            await engine.stop()

    asyncio.run(scenario())


def test_a_server_that_replies_without_its_key_is_not_used(folder: Path) -> None:
    behaves(folder, "open")
    with pytest.raises(ValueError, match="engine 3 replies to requests without its key, so any"):
        asyncio.run(start(folder))
    assert left_behind(folder) == []


def test_a_port_taken_while_the_server_starts_is_an_error(folder: Path) -> None:
    behaves(folder, "waits")
    with bind(0) as free:
        port = free.getsockname()[1]

    async def scenario() -> None:
        starting = asyncio.ensure_future(start(folder, port))
        await until_written(folder / "attempt-0")
        with bind(port) as other:
            other.listen()
            with pytest.raises(PortTaken, match=rf"port {port} was taken by process {os.getpid()}"):
                await starting

    asyncio.run(scenario())
    assert attempts(folder) == [port]


def test_with_port_0_a_taken_port_is_replaced(folder: Path) -> None:
    behaves(folder, "waits", "serves")

    async def scenario() -> None:
        starting = asyncio.ensure_future(start(folder))
        taken_port = int(await until_written(folder / "attempt-0"))
        with bind(taken_port) as other:
            other.listen()
            engine = await starting
            assert attempts(folder)[0] == taken_port
            assert engine.base_url == f"http://127.0.0.1:{attempts(folder)[1]}"
            assert attempts(folder)[1] != taken_port
            await engine.stop()

    asyncio.run(scenario())


def test_a_server_that_reports_its_port_in_use_gets_another(folder: Path) -> None:
    behaves(folder, "in_use", "in_use", "serves")

    async def scenario() -> None:
        engine = await start(folder)
        assert len(set(attempts(folder))) == 3
        await engine.stop()

    asyncio.run(scenario())


def test_the_number_of_ports_tried_is_limited(folder: Path) -> None:
    behaves(folder, "in_use")
    with pytest.raises(PortTaken, match="while engine 3 was starting"):
        asyncio.run(start(folder))
    assert len(attempts(folder)) == launch.ATTEMPTS


def test_older_lines_of_the_log_are_ignored(folder: Path) -> None:
    behaves(folder, "broken")
    (folder / "engine.log").write_text("address already in use\n")
    with pytest.raises(ChildDied, match="the model is not a model"):
        asyncio.run(start(folder))
    assert len(attempts(folder)) == 1


def test_a_port_in_use_is_refused_before_anything_starts(folder: Path) -> None:
    with bind(0) as used:
        used.listen()
        port = used.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is not available for an engine"):
            asyncio.run(start(folder, port))
    assert attempts(folder) == []


def test_a_server_that_is_never_ready_times_out(folder: Path) -> None:
    behaves(folder, "waits")
    with pytest.raises(TimeoutError, match=r"engine 3 was not ready within 0\.3 s"):
        asyncio.run(start(folder, timeout_s=0.3))


def test_a_reserved_port_is_not_given_away_and_can_be_served() -> None:
    with bind(0) as reserved:
        port = reserved.getsockname()[1]
        taken = [bind(0) for _ in range(50)]
        assert port not in {other.getsockname()[1] for other in taken}
        assert who_listens(port, os.getpgid(0)) is Listener.NONE
        with socket.create_server(("127.0.0.1", port)):
            assert who_listens(port, os.getpgid(0)) is Listener.GROUP
            assert who_listens(port, os.getpgid(0) + 1) is Listener.OTHER
        for other in taken:
            other.close()


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.engines.launch.test_start import start

async def main():
    engine = await start(Path(sys.argv[1]))
    print(engine.child.pid, flush=True)
    if sys.argv[3] == "waits":
        signal.pause()
    os.killpg(engine.child.pid, signal.SIGKILL)

asyncio.run(main())
"""


COMMAND = [sys.executable, "-c", PARENT]


def test_a_server_dies_with_its_parent_and_leaves_nothing(folder: Path) -> None:
    command = [*COMMAND, str(folder), str(Path.cwd()), "waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(BOUND_S * 1000)
    os.close(pidfd)
    assert left_behind(folder) == []


def test_after_both_are_killed_the_next_start_removes_their_files(folder: Path) -> None:
    command = [*COMMAND, str(folder), str(Path.cwd()), "waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        os.killpg(int(parent.stdout.readline()), signal.SIGKILL)  # the parent waits for a signal
        parent.kill()
    assert len(left_behind(folder)) == 3
    next_one = Scratch.make()
    assert left_behind(folder) == []
    next_one.remove(group=0)


def test_a_killed_server_that_was_not_stopped_leaves_nothing_behind(
    folder: Path,
) -> None:
    subprocess.run([*COMMAND, str(folder), str(Path.cwd()), "ends"], check=True)
    assert (folder / "semaphore").exists()
    assert left_behind(folder) == []


@pytest.mark.parametrize("who", ["at exit", "the next start"])
def test_the_memory_of_a_server_is_removed_before_it_has_ended(folder: Path, who: str) -> None:
    async def scenario() -> None:
        engine = await start(folder)
        scratch = engine._scratch
        assert scratch is not None
        assert len(left_behind(folder)) == 3
        if who == "at exit":
            scratch.remove_at_exit()
            assert left_behind(folder) == []
        else:
            launch._remove_listed(scratch.folder)
            assert left_behind(folder) == [scratch.folder]
        await engine.stop()
        assert left_behind(folder) == []

    asyncio.run(scenario())


def test_an_engine_that_is_not_installed_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path))
    with pytest.raises(ValueError, match=r"not installed .*; run: areal-lab engine install vllm"):
        fit_to_machine(VLLM, ServerOptions(model=tmp_path))


def test_the_embedded_engine_runs_in_our_own_python() -> None:
    options = ServerOptions(model=Path("/m"), port=1)
    command = server_command(EMBEDDED, Path("/bin/python"), options)
    assert command[:3] == ["/bin/python", "-m", "areal_lab.engines.embedded.server"]
