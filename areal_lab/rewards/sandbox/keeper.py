"""The keeper, the supervisor of one call: starts its cells, watches them from outside, and reports.

        request (0)                    stdin, stdout, stderr, link, status
    parent -----> keeper -----.-----> cell: init --> program
           <-----             '-----> cell: ...
        reply (1)       ends them all: at a limit, when the last cell ends, when the parent ends

The reply is followed by the files of their folder that could not be removed (level `unsafe`).

| watched | how |
| --- | --- |
| wall time | since the program's start |
| memory | resident sets of all processes of a cell, shared pages counted once, every 20 ms |
| processes | of a cell, every 20 ms: as root under bubblewrap the kernel does not count them |
| output | bytes of stdout and stderr together |

Cells start one after the other, and the job of a later one is read only then: a program that
searches the memory that it was forked with finds nothing about the others.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal, which is slow to import
import marshal
import os
import select
import time

from areal_lab.host.owned_folders import remove_tree
from areal_lab.rewards.sandbox import cell, confine, kernel

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

EXITED, CRASHED, TIMEOUT, MEMORY, PROCESSES, OUTPUT, STOPPED, REFUSED = range(8)
"""First byte of the report on a cell; REFUSED is followed by a text, and nothing else."""
_SAMPLE_S = 0.02
_START_S = 30.0
_MOST_TROUBLE = 100  # lines
CLEAN_S = 20.0
"""Longest time to remove the files of a program."""
_LINK_END_S = 0.2
_PIPE_BYTES = 1 << 16
_SIGXCPU = 24
_MORE_PROCESSES = 2  # more for a cell than for its program: bubblewrap's own, and init
_OUTSIDE_NOBODY = 65534


class Stop(BaseException):
    """The parent asked the keeper to stop, or is gone."""


class Refused(Exception):
    """A cell could not be created."""


class Cell:
    """One cell, seen from outside."""

    def __init__(self, setup: dict[str, Any], job: dict[str, Any], link: tuple[int, int]) -> None:
        self.limits = setup["limits"]
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.status, status = os.pipe()
        ends = [stdin, stdout, stderr, *link, status]
        self.to_write = memoryview(job.get("stdin", b""))
        self.output: dict[int, bytearray] = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.news = bytearray()
        self.made_s = time.monotonic()
        self.started_s = 0.0
        self.ended_s = 0.0
        self.end = -1
        self.cpu_s = 0.0
        self.pid = _START[setup["level"]](setup, job, ends)
        _inits.add(self.pid)
        for end in (stdin, stdout, stderr, status):
            os.close(end)
        for end in (self.stdin, self.stdout, self.stderr, self.status):
            os.set_blocking(end, False)

    @property
    def running(self) -> bool:
        """True if init has not ended."""
        return self.pid > 0

    def ended_before(self, age_s: float) -> bool:
        """Return whether it ended at least this long ago."""
        return not self.running and time.monotonic() > self.ended_s + age_s

    @property
    def output_bytes(self) -> int:
        """Output so far."""
        return sum(map(len, self.output.values()))

    def move(self, end: int) -> bool:
        """Read or write one of its pipes without blocking; returns whether there may be more."""
        if end == self.stdin:
            more = self._write_stdin()
            if not more:
                os.close(end)
            return more
        try:
            data = os.read(end, _PIPE_BYTES)
        except BlockingIOError:
            return True
        if end == self.status:
            self._read_status(data)
        elif (room := self.limits["output_bytes"] - self.output_bytes) < len(data):
            self.output[end] += data[:room]
            self.finish(OUTPUT)
        else:
            self.output[end] += data
        return bool(data)

    def _read_status(self, data: bytes) -> None:
        self.news += data
        if not self.started_s and self.news[:1] == b"S":
            self.started_s = time.monotonic()
        if not data:  # init has ended, and with it all of its namespace
            self.finish(EXITED)

    def _write_stdin(self) -> bool:
        try:
            self.to_write = self.to_write[os.write(self.stdin, self.to_write[:_PIPE_BYTES]) :]
        except BlockingIOError:
            return True
        except OSError:  # the program does not read it
            return False
        return bool(self.to_write)

    def deadline_s(self) -> float:
        """Time by which it must have ended, or started."""
        if self.started_s:
            return float(self.started_s + self.limits["timeout_s"])
        return self.made_s + _START_S

    def check(self) -> None:
        """Kill it if it is over a limit."""
        if not self.running:
            return
        if time.monotonic() >= self.deadline_s():
            if not self.started_s:
                raise Refused(f"the sandbox did not start a program within {_START_S:g} s")
            self.finish(TIMEOUT)
            return
        processes = list(family(self.pid))
        tasks = sum(tasks for _, tasks in processes)
        if tasks > self.limits["processes"] + _MORE_PROCESSES:
            self.finish(PROCESSES)
        elif memory_bytes([pid for pid, _ in processes], self.limits["memory_bytes"]):
            self.finish(MEMORY)

    def finish(self, end: int) -> None:
        """Kill the rest of it, wait for that, and record its end (the first record counts)."""
        if self.pid <= 0:
            return
        if self.end < 0:
            self.end = end
        self.ended_s = time.monotonic()
        _kill(self.pid)
        _, _, usage = os.wait4(self.pid, 0)
        _inits.remove(self.pid)
        self.pid = 0
        self.cpu_s = usage.ru_utime + usage.ru_stime + end_orphans()
        self.news += _rest(self.status)
        for one in self.output:
            rest, room = _rest(one), self.limits["output_bytes"] - self.output_bytes
            self.output[one] += rest[:room]
            if len(rest) > room and self.end == EXITED:
                self.end = OUTPUT

    def report(self) -> bytes:
        """Bytes of its report: see `run.read_reply`; raises Refused if its program was not
        started.
        """
        if self.news[:1] != b"S" and (self.news or self.end != STOPPED):
            why = self.news[1:] or bytes(self.output[self.stderr][-500:]) or b"no reason is known"
            raise Refused(why.decode(errors="replace").strip())
        end, code = self.end, 0
        if self.news[1:2] == b"E" and end in (EXITED, STOPPED):
            status = int.from_bytes(self.news[2:6], "little")
            end, code = EXITED, os.waitstatus_to_exitcode(status)
            if code < 0:
                end, code = (TIMEOUT, 0) if -code == _SIGXCPU else (CRASHED, -code)
            elif code == cell.OUT_OF_MEMORY:
                end = MEMORY
        elif end == EXITED:
            end, code = CRASHED, 9  # its init was killed: by the kernel, or by someone else
        outputs = [bytes(self.output[one]) for one in (self.stdout, self.stderr)]
        times_us = [int(1e6 * max(0.0, one)) for one in (self.ended_s - self.started_s, self.cpu_s)]
        numbers = [end, code, *times_us, *map(len, outputs)]
        return b"".join([*(one.to_bytes(8, "little") for one in numbers), *outputs])


def main(take: Callable[[], dict[str, Any]]) -> NoReturn:
    """Read a request from descriptor 0, run its cells, and write the reply to 1."""
    # Pipes get numbers above those that cells use.
    while os.dup(0) < cell.BUNDLE + 2:
        pass
    _signal.signal(_signal.SIGTERM, _stop)
    cells: list[Cell] = []
    folder = f"/tmp/areal-lab-code-{os.getpid()}-{os.urandom(4).hex()}"
    reply = b""
    try:
        run(take, cells, folder)
        reply = b"".join(one.report() for one in cells)
    except (Refused, OSError) as error:
        reply = REFUSED.to_bytes(8, "little") + f"{error}".encode()
    except Stop:
        pass
    finally:
        _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
        for one in cells:
            one.finish(STOPPED)
        end_orphans()  # and a cell that was being started
    stopped = not reply
    try:
        _answer(reply)  # before anything that could fail: it is paid for
        trouble = remove_tree(folder, timeout_s=CLEAN_S)
        _answer("\n".join(f"{folder}: {one}" for one in trouble[:_MOST_TROUBLE]).encode())
    finally:
        os._exit(stopped)


def _answer(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def run(take: Callable[[], dict[str, Any]], cells: list[Cell], folder: str) -> None:
    """Start and watch the cells of a request, which are added to `cells`."""
    setup = take()
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        raise Refused("the kernel does not list children (CONFIG_PROC_CHILDREN)")
    kernel.adopt_orphans()
    kernel.wake_with_parents_end()
    parent = os.pidfd_open(setup["parent"])
    if os.getppid() != setup["parent"]:
        raise Stop
    if setup["level"] == "unsafe":
        os.mkdir(folder, 0o700)
        setup["folder"] = folder
    for link in _links(setup["cells"]):
        cells.append(Cell(setup, take(), link))
        for end in link:
            if end >= 0:
                os.close(end)
    watch(cells, parent)
    for one in cells:
        one.finish(STOPPED)


def _stop(*_: object) -> None:
    raise Stop


def _links(count: int) -> list[tuple[int, int]]:
    """Ends to read and to write of each cell: none for one cell, crossed pipes for two."""
    if count == 1:
        return [(-1, -1)]
    (first_in, second_out), (second_in, first_out) = os.pipe(), os.pipe()
    return [(first_in, first_out), (second_in, second_out)]


# --- watching ------------------------------------------------------------------------------------


def watch(cells: list[Cell], parent: int) -> None:
    """Move data and check limits until the last of the cells has ended; the others end then.

    The others see the end of their link, and end themselves. Raises Stop when the process behind
    the descriptor `parent` has ended.
    """
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    of: dict[int, Cell] = {}
    for one in cells:
        for end in (one.stdout, one.stderr, one.status):
            poll.register(end, select.POLLIN)
            of[end] = one
        poll.register(one.stdin, select.POLLOUT)
        of[one.stdin] = one
    next_s = time.monotonic() + _SAMPLE_S
    while any(one.running for one in cells) and not cells[-1].ended_before(_LINK_END_S):
        now_s = time.monotonic()
        if now_s >= next_s:
            for one in cells:
                one.check()
            next_s = time.monotonic() + _SAMPLE_S
            continue
        for end, _ in poll.poll(1e3 * (next_s - now_s) + 1):
            if end == parent:
                raise Stop
            if not of[end].move(end):
                poll.unregister(end)


def family(pid: int) -> Iterator[tuple[int, int]]:
    """A process and its descendants, each with the number of its threads."""
    left = [pid]
    while left:
        one = left.pop()
        try:
            left += _children(one)
            yield one, len(os.listdir(f"/proc/{one}/task"))
        except OSError:
            continue  # it has ended


def memory_bytes(pids: list[int], limit: int) -> int:
    """Memory of the processes together if it is above the limit, else 0.

    Resident sets first, which are cheap but count shared pages once per process; if they are above
    the limit, proportional sets.
    """
    resident = sum(_resident(pid) for pid in pids)
    if resident <= limit:
        return 0
    proportional = sum(_proportional(pid) for pid in pids)
    return proportional if proportional > limit else 0


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _proportional(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            sizes = [line.split()[1] for line in file if line.startswith("Pss:")]
        return 1024 * int(sizes[0]) if sizes else 0
    except OSError:
        return _resident(pid)


def end_orphans() -> float:
    """Kill and reap processes that became the keeper's children; returns their CPU seconds.

    These are bubblewrap's init, and daemons without a namespace. Their ids are not reused
    meanwhile.
    """
    cpu_s = 0.0
    while orphans := [pid for pid in _children(os.getpid()) if pid not in _inits]:
        for pid in orphans:
            _kill(pid)
        for pid in orphans:
            usage = os.wait4(pid, 0)[2]
            cpu_s += usage.ru_utime + usage.ru_stime
    return cpu_s


_inits: set[int] = set()
"""First processes of running cells."""


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            found += map(int, children.read().split())
    return found


def _rest(end: int) -> bytes:
    """Remaining content of a pipe whose writers have ended."""
    data = b""
    try:
        while part := os.read(end, _PIPE_BYTES):
            data += part
    except BlockingIOError:
        pass
    return data


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


# --- starting ------------------------------------------------------------------------------------


def _start_namespaces(setup: dict[str, Any], job: dict[str, Any], ends: list[int]) -> int:
    ready, tell = os.pipe()
    pid = kernel.clone(kernel.NEW_NAMESPACES)
    if pid == 0:
        try:
            os.close(tell)
            if os.read(ready, 1):
                cell.enter(ends)
                cell.live(setup, job)
        finally:
            os._exit(1)
    try:
        _map_ids(pid)
        os.write(tell, b".")
    finally:
        os.close(ready)
        os.close(tell)
    return pid


def _map_ids(pid: int) -> None:
    """Map this user, and as root `nobody` too, into the user namespace of a new process."""
    outside = os.geteuid(), os.getegid()
    if outside[0] == 0:
        both = f"0 0 1\n{confine.USER} {_OUTSIDE_NOBODY} 1\n"
        try:
            for which in ("uid_map", "gid_map"):
                _write(f"/proc/{pid}/{which}", both)
        except PermissionError:
            pass  # a root without the right to become another user, in some containers
        else:
            return
    _write(f"/proc/{pid}/setgroups", "deny")
    for which, number in zip(("uid_map", "gid_map"), outside, strict=True):
        _write(f"/proc/{pid}/{which}", f"{confine.USER} {number} 1\n")


def _write(path: str, text: str) -> None:
    end = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(end, text.encode())
    finally:
        os.close(end)


def _start_bubblewrap(setup: dict[str, Any], job: dict[str, Any], ends: list[int]) -> int:
    bundle = os.memfd_create("bundle")
    for part in (setup["modules"], {**setup, "modules": ()}, job):
        data = marshal.dumps(part)
        os.write(bundle, len(data).to_bytes(8, "little"))
        while data:
            data = data[os.write(bundle, data) :]
    os.lseek(bundle, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        try:
            cell.enter([*ends, bundle])
            kernel.die_with_parent()
            confine.protect_devices()
            command = setup["command"]
            os.execv(command[0], command)
        except BaseException as error:
            os.write(2, f"{error}".encode())
        os._exit(1)
    os.close(bundle)
    return pid


def _start_unsafe(setup: dict[str, Any], job: dict[str, Any], ends: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            os.environ["HOME"] = os.environ["TMPDIR"] = setup["folder"]
            cell.enter(ends)
            cell.live(setup, job)
        finally:
            os._exit(1)
    return pid


_START = {
    "namespaces": _start_namespaces,
    "bubblewrap": _start_bubblewrap,
    "unsafe": _start_unsafe,
}
