"""Programs that try to get out of a sandbox, or to cheat their tests; how to see that they fail.

Standard library only: `attacker.py` runs them as users who cannot reach the tests' interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ESCAPED = "ESCAPED"
MIB = 1 << 20
LOOSE = {"timeout_s": 20.0, "memory_bytes": 512 * MIB, "disk_bytes": 32 * MIB}
SHORT = {**LOOSE, "timeout_s": 0.5}


@dataclass(frozen=True, slots=True)
class World:
    """What a program may try to reach; its fields are globals of the program."""

    mark: str
    """Part of every name that belongs to this world."""
    victim: int
    """Process id of a process of the same user."""
    harness: int
    """Process id of the process that runs the sandbox."""
    port: int
    """On which somebody listens at 127.0.0.1."""
    secret: str
    """Path of a file that everybody may read."""
    target: str
    """Path of a file that everybody may write."""


def _kept(_: Any, __: World) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Attack:
    """A program, and what has to be true of its end beside that it did not print ESCAPED."""

    name: str
    """Its row in docs/sandbox.md."""
    outcome: str
    """What becomes of it."""
    program: str
    ends: tuple[str, ...] = ("exited",)
    limits: Mapping[str, float] = field(default_factory=lambda: LOOSE)
    holds: Callable[[Any, World], bool] = _kept


def _number(finished: Any) -> int:
    words = finished.stdout.split()
    return int(words[-1]) if words else 0


def _intact(_: Any, world: World) -> bool:
    return Path(world.target).read_text() == "untouched"


def _no_files_outside(finished: Any, world: World) -> bool:
    folders = [Path(one) for one in ("/", "/tmp", "/dev/shm", "/var/tmp")]
    outside = [path for one in folders for path in one.glob(f"{world.mark}-file-*")]
    return not outside and _number(finished) <= 32 * MIB


ATTACKS = (
    Attack(
        "200 forks",
        "at most 32 processes; killed by the keeper where root uses bubblewrap",
        """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    pass
print(made, flush=True)
""",
        ends=("exited", "processes"),  # as root, bubblewrap keeps root's uid, which has no limit
        holds=lambda finished, _: finished.end == "processes" or _number(finished) <= 32,
    ),
    Attack(
        "1.5 GB in one process",
        "MemoryError",
        "block = bytearray(1500 << 20)\nprint('ESCAPED')",
        ends=("memory",),
    ),
    Attack(
        "8 children of 100 MB each, with 256 MB allowed",
        "killed",
        """
import os, time
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(b"x") * (100 << 20)
        time.sleep(60)
time.sleep(60)
""",
        ends=("memory",),
        limits={**LOOSE, "memory_bytes": 256 * MIB},
    ),
    Attack(
        "280 MB in many files",
        "no space after 32 MB, in its own folder",
        """
written = 0
for number, folder in enumerate((".", "/tmp", "/dev/shm", "/var/tmp", "/")):
    try:
        for n in range(35):
            with open(f"{folder}/{mark}-file-{number}-{n}", "wb") as file:
                written += file.write(bytes(8 << 20))
    except OSError:
        pass
print(written)
""",
        holds=_no_files_outside,
    ),
    Attack(
        "TCP connection to loopback",
        "refused",
        """
import socket
try:
    socket.create_connection(("127.0.0.1", port), 1)
    print("ESCAPED")
except OSError:
    pass
""",
    ),
    Attack(
        "abstract unix socket",
        "refused",
        """
import socket
try:
    socket.socket(socket.AF_UNIX).connect("\\0" + mark)
    print("ESCAPED")
except OSError:
    pass
""",
    ),
    Attack(
        "sockets of families that have no namespace",
        "refused",
        """
import socket
for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(getattr(socket, family), kind)
            print("ESCAPED", family)
        except OSError:
            pass
""",
    ),
    Attack(
        "kill a process outside",
        "no such process",
        """
import os
for pid in (victim, harness):
    try:
        os.kill(pid, 9 if pid == victim else 0)
        print("ESCAPED")
    except OSError:
        pass
""",
    ),
    Attack(
        "signals to the first process inside",
        "ignored",
        """
import os, time
for number in range(1, 65):
    os.kill(1, number)
time.sleep(0.1)
print("alive")
""",
        holds=lambda finished, _: finished.stdout == "alive\n",
    ),
    Attack(
        "ptrace of the harness",
        "refused",
        """
import ctypes
libc = ctypes.CDLL(None)
for pid in (1, victim, harness):
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("ESCAPED")
""",
    ),
    Attack(
        "read a file that everybody may read",
        "not there",
        """
try:
    print("ESCAPED", open(secret).read())
except OSError:
    pass
""",
    ),
    Attack(
        "read /etc/shadow and the harness's environment",
        "not there",
        """
for path in ("/etc/shadow", "/etc/passwd", f"/proc/{harness}/environ", "/proc/1/environ"):
    try:
        print("ESCAPED", open(path, "rb").read())
    except OSError:
        pass
""",
    ),
    Attack(
        "inherited environment and descriptors",
        "none but three",
        """
import os
print("ESCAPED" if any("SECRET" in name for name in os.environ) else "")
for number in range(3, 64):
    try:
        os.fstat(number)
        print("ESCAPED", number)
    except OSError:
        pass
""",
    ),
    Attack(
        "symbolic link out of the folder, and write through it",
        "no such path",
        """
import os
os.symlink(target, "link")
try:
    open("link", "w").write("touched")
except OSError:
    pass
""",
        holds=_intact,
    ),
    Attack(
        "write to /tmp outside, /etc, /usr and the library",
        "no such path, or read-only",
        """
import os
for folder in (os.path.dirname(target), "/etc", "/usr", os.path.dirname(os.__file__), "/"):
    try:
        open(f"{folder}/{mark}-written", "w")
        print("ESCAPED", folder)
    except OSError:
        pass
""",
        holds=_intact,
    ),
    Attack(
        "mode, owner, times and attributes of devices and of what is visible",
        "refused",
        """
import os
visible = ["/", "/dev", "/usr", "/usr/bin/env", "/etc", "/etc/ld.so.cache", os.__file__]
for path in [*visible, *(f"/dev/{name}" for name in os.listdir("/dev") if name != "shm")]:
    if not os.path.exists(path):
        continue
    found = os.stat(path)
    for change, *given in (
        (os.chmod, found.st_mode & 0o7777),
        (os.utime, (found.st_atime, found.st_mtime)),
        (os.chown, -1, os.getgid()),
        (os.setxattr, "user.mark", b"1"),
        (os.link, f"/sandbox/{mark}"),
        (os.rename, f"{path}-moved"),
        (os.truncate, 0),
    ):
        try:
            change(path, *given)
            print("ESCAPED", path, change.__name__)
        except OSError:
            pass
with open("/dev/null", "w") as null, open("/dev/urandom", "rb") as random:
    null.write("x")
    random.read(8)
""",
    ),
    Attack(
        "locks and leases on files that are visible",
        "refused, but for POSIX locks to read",
        """
import fcntl, os
for path in ("/usr/bin/env", os.__file__, "/dev/null", "/"):
    end = os.open(path, os.O_RDONLY)
    for lock, *given in (
        (fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB),
        (fcntl.flock, fcntl.LOCK_SH | fcntl.LOCK_NB),
        (fcntl.lockf, fcntl.LOCK_EX | fcntl.LOCK_NB),
        (fcntl.fcntl, 1024, fcntl.F_RDLCK),  # a lease
        (fcntl.fcntl, 37, bytes(32)),  # F_OFD_SETLK
    ):
        try:
            lock(end, *given)
            print("ESCAPED", path, lock.__name__, *given)
        except OSError:
            pass
import sqlite3
base = sqlite3.connect("base.db")
base.execute("create table t (a)")
base.commit()
""",
    ),
    Attack(
        "signals and priorities of the keeper's group",
        "a separate group",
        """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.getpgrp() != 1 or os.getsid(0) != 1:
    print("ESCAPED")
os.setpriority(os.PRIO_PGRP, 0, 9)
os.killpg(0, signal.SIGTERM)
print("alive")
""",
        holds=lambda finished, _: finished.stdout == "alive\n",
    ),
    Attack(
        "what the kernel counts for all programs of a user",
        "refused, or few",
        """
import ctypes, resource
libc = ctypes.CDLL(None)
if libc.inotify_init1(0) >= 0 or libc.mlock(ctypes.create_string_buffer(65536), 65536) == 0:
    print("ESCAPED")
if resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] > 1000:
    print("ESCAPED")
if resource.getrlimit(resource.RLIMIT_CORE) != (1, 1):
    print("ESCAPED")  # 0 would start the system's handler of crashes
""",
    ),
    Attack(
        "flood of output",
        "cut at 64 kB and killed",
        "while True: print('x' * 10_000)",
        ends=("output",),
        holds=lambda finished, _: len(finished.stdout) <= 1 << 16,
    ),
    Attack("endless loop", "killed at the wall limit", "while True: pass", ("timeout",), SHORT),
    Attack(
        "sleep", "killed at the wall limit", "__import__('time').sleep(60)", ("timeout",), SHORT
    ),
    Attack(
        "all signals ignored",
        "killed at the wall limit",
        """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
""",
        ends=("timeout",),
        limits=SHORT,
    ),
    Attack(
        "daemon by two forks and a new session",
        "gone with the program",
        """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        ctypes.CDLL(None).prctl(15, mark.encode(), 0, 0, 0)
        time.sleep(600)
    os._exit(0)
os.wait()
""",
    ),
    Attack(
        "daemon that keeps the output open",
        "gone with the program",
        """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, mark.encode(), 0, 0, 0)
        time.sleep(600)
    os._exit(0)
os.wait()
""",
    ),
    Attack(
        "setuid(0) and mounts",
        "refused",
        """
import ctypes, os
try:
    os.setuid(0)
    print("ESCAPED")
except OSError:
    pass
libc = ctypes.CDLL(None)
if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0 or libc.umount2(b"/tmp", 2) == 0:
    print("ESCAPED")
if libc.mount(None, b"/", None, 0x1020, None) == 0 or libc.chroot(b"/tmp") == 0:
    print("ESCAPED")
""",
    ),
    Attack(
        "nested user namespace",
        "refused",
        """
import ctypes
libc = ctypes.CDLL(None)
for flags in (0x10000000, 0x10020000, 0x40000000, 0x20000, 0x20000000):
    if libc.unshare(flags) == 0:
        print("ESCAPED", hex(flags))
""",
    ),
    Attack(
        "memory that belongs to no process",
        "refused",
        """
import ctypes, os
try:
    os.memfd_create("x")
    print("ESCAPED")
except OSError:
    pass
libc = ctypes.CDLL(None)
if libc.shmget(0, 1 << 20, 0o1600) != -1 or libc.msgget(0, 0o1600) != -1:
    print("ESCAPED")
""",
    ),
)


# --- cheats --------------------------------------------------------------------------------------

PROBLEM = {
    "source": "def add(a, b):\n    '''Sum.'''\n",
    "entry_point": "add",
    "test": (
        "def check(candidate):\n"
        "    assert candidate(1, 2) == 3\n"
        "    assert set([candidate(20, 22)]) == set([42])\n"
        "    cases = [(1, 2), (20, 22)]\n"
        "    assert all(map(lambda one: candidate(*one) == sum(one), cases))\n"
    ),
}
GOOD = "    return a + b\n"

CHEATS: Mapping[str, str] = {
    "sys.exit(0)": "import sys\nsys.exit(0)\ndef add(a, b): pass",
    "os._exit(0)": "import os\nos._exit(0)\ndef add(a, b): pass",
    "raise SystemExit": "raise SystemExit\ndef add(a, b): pass",
    "an object that equals everything": """
class Equal:
    def __eq__(self, other): return True
    def __hash__(self): return 42
def add(a, b): return Equal()
""",
    "a number that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Equal(7)
""",
    "another interpreter without asserts": """
import os, sys
os.execv(sys.executable, [sys.executable, "-O", "-c", "print('passed')"])
def add(a, b): pass
""",
    "expected values in the caller's code": """
import sys
def add(a, b):
    frame, found = sys._getframe(), []
    while frame := frame.f_back:
        found += [one for one in frame.f_code.co_consts if isinstance(one, int)]
        found += [one for one in frame.f_locals.values() if isinstance(one, int)]
    return max(found, default=0)
""",
    "expected values in memory": """
import gc, re
def add(a, b):
    texts = [one for one in gc.get_objects() if isinstance(one, (str, bytes, dict, list, tuple))]
    found = re.search(rf"candidate\\({a}, {b}\\)\\W*== (?:set..)?([0-9]+)", repr(texts))
    return int(found.group(1)) if found else None
""",
    "a secret from stdin": """
import sys
print(sys.stdin.read())
def add(a, b): return sys.stdin.read()
""",
    "StopIteration where the tests iterate": """
count = 0
def add(a, b):
    global count
    count += 1
    if count <= 2:
        return [3, 42][count - 1]
    raise StopIteration
""",
    "a reply that says StopIteration": """
import os
count = 0
def add(a, b):
    global count
    count += 1
    if count <= 2:
        return [3, 42][count - 1]
    os.write(4, b"('raise', ['StopIteration', 'Exception'], [], '')\\n")
""",
    "builtins.AssertionError replaced": """
import builtins
class Quiet(BaseException):
    def __new__(cls, *args): raise SystemExit(0)
builtins.AssertionError = Quiet
def add(a, b): return 0
""",
    "files of the tests rewritten": """
import os
for folder, _, files in os.walk("/"):
    for name in files:
        if name.endswith(".py"):
            try:
                open(os.path.join(folder, name), "w").write("print('passed')")
            except OSError:
                pass
    if folder.count("/") > 3:
        break
def add(a, b): return 0
""",
    "print and json patched, and a verdict printed": """
import builtins, json, os
builtins.print = lambda *args, **more: None
json.loads = json.dumps = lambda *args, **more: "passed"
os.write(1, b"passed\\n")
def add(a, b): return 0
""",
    "names of the tests redefined": """
from builtins import len as set
def set(values): return 0
def check(candidate): pass
def add(a, b): return 3
""",
    "replies without being asked": """
import os
os.write(4, b"('names', {'add': Ref(0)}, {})\\n" + b"passed\\n" * 1000)
def add(a, b): return 0
""",
    "the tests' process and pipes closed": """
import os
for number in range(10): 
    try:
        os.close(number)
    except OSError:
        pass
def add(a, b): return 0
""",
}
