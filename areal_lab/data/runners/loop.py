"""Serve one environment: requests and replies are lines of JSON on a socket.

    PYTHON -P loop.py FD    by the Python of the environment, 3.11 or newer; standard library only

    | call   | fields                          | value of the reply                              |
    | hello  | standard, name, args            | standard, version                               |
    | list   |                                 | tasks: id and prompt of each                    |
    | run    | task, base_url, key, model, ... | ok, reward, rewards, metrics, truncated, error  |
    | cancel | of: id of a `run`               | null; the `run` is canceled                     |
    | close  |                                 | none: the process ends                          |

Each request has an `id`, which its reply repeats, with `value` or `error`. Calls of `run` are
concurrent. A standard is a file with a class `Standard`:

    Standard(name, args)       raises ValueError for what it cannot serve
    version                    of the library
    tasks()                    [{"id": ..., "prompt": ...}]
    async start(), async run(request), async close()    start and close are optional

The process ends with its parent, and so does every process that it has started, also in another
session: all have a variable of the environment in common.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

MARK = "AREAL_LAB_RUNNER"
"""Variable of the environment that marks the processes of a runner."""
_LIFELINE = "AREAL_LAB_LIFELINE"
LINE_BYTES = 2**26
"""Maximum bytes of one line."""
_ROUNDS = 500
_ROUND_S = 0.01


def end_marked(mark: str) -> None:
    """Kill the processes whose environment has this mark, but not the caller; Linux."""
    wanted = f"{MARK}={mark}".encode()
    without = 0
    for _ in range(_ROUNDS):
        found = False
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    marked = wanted in file.read().split(b"\0")
                if marked:
                    os.kill(int(entry), signal.SIGKILL)
                    found = True
            except OSError:
                continue  # it has ended, or is another user's
        # One of them may have started another, whose variables cannot be read at once.
        without = 0 if found else without + 1
        if without == 2:
            return
        time.sleep(_ROUND_S)


def watch_parent() -> None:
    """End with the parent, however it ends.

    `areal_lab.host.processes.watch_parent` does the same for our own processes, and starts this one
    with the same variable. It cannot be imported here: this Python has no areal_lab.
    """
    lifeline = os.environ.pop(_LIFELINE, None)
    if lifeline is None:
        return
    fd, parent = map(int, lifeline.split(","))
    os.set_inheritable(fd, False)
    watched = [fd]
    try:
        watched.append(os.pidfd_open(parent))
    except (AttributeError, OSError):
        pass

    def wait() -> None:
        poll = select.poll()
        for one in watched:
            poll.register(one, select.POLLIN)
        if os.getppid() == parent:
            poll.poll()
        end_marked(os.environ.get(MARK, ""))
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


class _Server:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._standard: Any = None
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until `close`, or the end of the socket."""
        try:
            while line := await reader.readline():
                request = json.loads(line)
                if request["call"] == "close":
                    break
                await self._take(request)
        finally:
            for task in [*self._running.values()]:
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            if hasattr(self._standard, "close"):
                await self._standard.close()
            self._writer.close()

    async def _take(self, request: dict[str, Any]) -> None:
        call, number = request["call"], request["id"]
        if call == "run":
            task = asyncio.create_task(self._run(number, request))
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
            return
        try:
            value: Any = None
            if call == "hello":
                value = await self._hello(request)
            elif call == "list":
                value = {"tasks": list(self._standard.tasks())}
            elif call == "cancel":
                if request["of"] in self._running:
                    self._running[request["of"]].cancel()
            else:
                raise ValueError(f"no call is named {call!r}")
            self._reply({"id": number, "value": value})
        except Exception as error:
            traceback.print_exc()
            self._reply({"id": number, "error": _line(error)})
        await self._writer.drain()

    async def _hello(self, request: dict[str, Any]) -> dict[str, Any]:
        spec = importlib.util.spec_from_file_location("areal_lab_standard", request["standard"])
        if spec is None or spec.loader is None:
            raise ValueError(f"{request['standard']} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        self._standard = module.Standard(request["name"], request["args"])
        if hasattr(self._standard, "start"):
            await self._standard.start()
        return {"version": str(self._standard.version)}

    async def _run(self, number: int, request: dict[str, Any]) -> None:
        try:
            value = await self._standard.run(request)
            self._reply({"id": number, "value": value})
        except asyncio.CancelledError:
            self._reply({"id": number, "error": "canceled"})
        except Exception as error:
            traceback.print_exc()
            self._reply({"id": number, "error": _line(error)})

    def _reply(self, reply: dict[str, Any]) -> None:
        # One write: replies of samples that end together must not be mixed.
        self._writer.write(json.dumps(reply, default=str).encode() + b"\n")


def _line(error: BaseException) -> str:
    """One line of an error."""
    text = " ".join(str(error).split())[:2000]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=LINE_BYTES)
    try:
        await _Server(writer).serve(reader)
    except ConnectionError:
        pass  # the parent has closed it


if __name__ == "__main__":
    watch_parent()
    os.set_inheritable(int(sys.argv[1]), False)
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
