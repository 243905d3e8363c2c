"""System calls that Python lacks: clone, mounts, capabilities, landlock and seccomp.

Runs in the sandbox's processes. Numbers are those of `linux/*.h` and, of system calls, of x86_64
and aarch64.
"""

from __future__ import annotations

import ctypes
import errno
import os

# PyDLL and not CDLL: a process that is cloned in the middle of a call needs the interpreter's lock.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]

NEW_NAMESPACES = 0x7E02_0000
"""User, process ids, network, IPC, host name, mounts and cgroups."""
NEW_USER, NEW_MOUNTS = 0x1000_0000, 0x2_0000

RECURSIVE, BIND, REMOUNT, PRIVATE = 0x4000, 0x1000, 0x20, 0x4_0000
READ_ONLY, NO_SETUID, NO_DEVICES = 0x1, 0x2, 0x4
"""Flags of `mount`; the last three are also attributes of `make_read_only`."""

_SIGCHLD = 17
_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_CLONE3, _MOUNT_SETATTR = 435, 442
_NEWEST_KNOWN = 450
_X32 = 0x4000_0000
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_AF_UNIX = 1

_DENIED = """
ptrace 101 117                process_vm_readv 310 270      process_vm_writev 311 271
kcmp 312 272                  mount 165 40                  umount2 166 39
pivot_root 155 41             chroot 161 51                 open_tree 428 428
move_mount 429 429            fsopen 430 430                fsconfig 431 431
fsmount 432 432               fspick 433 433                mount_setattr 442 442
unshare 272 97                setns 308 268                 swapon 167 224
swapoff 168 225               reboot 169 142                sethostname 170 161
setdomainname 171 162         iopl 172 -                    ioperm 173 -
init_module 175 105           finit_module 313 273          delete_module 176 106
quotactl 179 60               quotactl_fd 443 443           acct 163 89
settimeofday 164 170          vhangup 153 58                clock_settime 227 112
adjtimex 159 171              clock_adjtime 305 266         syslog 103 116
personality 135 92            modify_ldt 154 -              kexec_load 246 104
kexec_file_load 320 294       add_key 248 217               request_key 249 218
keyctl 250 219                bpf 321 280                   perf_event_open 298 241
fanotify_init 300 262         lookup_dcookie 212 18         userfaultfd 323 282
name_to_handle_at 303 264     open_by_handle_at 304 265     io_uring_setup 425 425
io_uring_enter 426 426        io_uring_register 427 427     pidfd_getfd 438 438
process_madvise 440 440       process_mrelease 448 448      memfd_create 319 279
memfd_secret 447 447          shmget 29 194                 shmat 30 196
shmctl 31 195                 semget 64 190                 semctl 66 191
semop 65 193                  msgget 68 186                 msgsnd 69 189
msgrcv 70 188                 msgctl 71 187                 mq_open 240 180
migrate_pages 256 238         move_pages 279 239            vmsplice 278 75
uselib 134 -                  _sysctl 156 -                 nfsservctl 180 42
flock 73 32                   inotify_init 253 -            inotify_init1 294 26
"""
"""Names and numbers on both machines: other namespaces and mounts, other processes, modules and
clocks, memory that belongs to no process (memfd, System V), parts of the kernel that had
vulnerabilities, locks of read-only files, and resources counted per user on the whole machine."""
_LOCKS_OF_DESCRIPTORS = (37, 38, 1024)
"""Denied commands of fcntl, like flock: OFD locks and leases. POSIX locks are allowed: SQLite
needs them."""


def machine() -> str:
    """`x86_64` or `aarch64`."""
    name = os.uname().machine
    if name not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"the machine is {name}, but must be x86_64 or aarch64")
    return name


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. Only for a process with one thread."""
    return _call("clone", _CLONE[machine()], flags | _SIGCHLD, 0, 0, 0, 0)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """As mount(2); errors name the target."""
    status = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(status, f"mount {source} on {target}")


def make_read_only(path: str, *, recursive: bool, devices: bool = False) -> None:
    """Make a mount read-only, without setuid programs (mount_setattr, Linux 5.12).

    With `devices`, devices can be opened. They accept data on a read-only mount, too, but keep
    their owner, mode and times.
    """
    allowed = READ_ONLY | NO_SETUID | (0 if devices else NO_DEVICES)
    attributes = (ctypes.c_uint64 * 4)(allowed, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    size = ctypes.sizeof(attributes)
    _call("mount_setattr", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, size)


def swap_root() -> None:
    """Make the current folder, a mount, the root, and detach the old root."""
    _call("pivot_root", _PIVOT_ROOT[machine()], b".", b".")
    # The old root now lies on top of the new one: pivot_root(2), NOTES.
    _check(_libc.umount2(b".", _DETACH), "umount the old root")
    os.chdir("/")


def pivot_root(new: str, put_old: str) -> None:
    """As pivot_root(2)."""
    _call("pivot_root", _PIVOT_ROOT[machine()], new.encode(), put_old.encode())


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent has ended."""
    _prctl("PR_SET_PDEATHSIG", 1, 9)


def wake_with_parents_end() -> None:
    """Make the kernel continue this process, if it was stopped, when its parent has ended."""
    _prctl("PR_SET_PDEATHSIG", 1, 18)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end."""
    _prctl("PR_SET_CHILD_SUBREAPER", 36, 1)


def set_host_name(name: str) -> None:
    """Set the host name of the UTS namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def drop_privileges() -> None:
    """Give up all capabilities, and the ways by which programs could regain them."""
    for capability in range(64):
        _libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; the kernel knows fewer than 64
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _prctl("PR_SET_NO_NEW_PRIVS", 38, 1)


# --- landlock: linux/landlock.h ------------------------------------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 0x1, 0x2, 0x4, 0x8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_RIGHTS_BY_ABI = (13, 14, 15, 15, 16)
"""Number of rights on files by version of the interface; later ones have as many as the last."""


def landlock_version() -> int:
    """Version of the kernel's landlock; 0 if it has none."""
    try:
        return _call("landlock", _CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def restrict_files(readable: list[str], writable: list[str], devices: list[str]) -> None:
    """Irrevocably deny this process all files but these, and TCP and outside signals and
    sockets.
    """
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "the kernel has no landlock")
    handled = (1 << _RIGHTS_BY_ABI[min(version, len(_RIGHTS_BY_ABI)) - 1]) - 1
    tcp = 0b11 if version >= 4 else 0
    scoped = 0b11 if version >= 6 else 0  # abstract sockets, signals
    attributes = (ctypes.c_uint64 * 3)(handled, tcp, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call("landlock_create_ruleset", _CREATE_RULESET, attributes, size, 0)
    read = _EXECUTE | _READ_FILE | _READ_DIR
    device = _READ_FILE | _WRITE_FILE
    _allow(ruleset, "/", _READ_DIR)  # all existing rights may be listed
    for rights, paths in ((read, readable), (handled & ~_IOCTL, writable), (device, devices)):
        for path in paths:
            _allow(ruleset, path, rights & handled)
    _call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # not on every machine, such as /lib64
    if not os.path.isdir(path):
        rights &= _OF_FILES
    rule = rights.to_bytes(8, "little") + beneath.to_bytes(4, "little")  # packed: 12 bytes
    _call("landlock_add_rule", _ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0)
    os.close(beneath)


# --- seccomp: linux/seccomp.h, linux/bpf_common.h ------------------------------------------------

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("rows", ctypes.c_char_p)]


def restrict_calls() -> None:
    """Irrevocably deny this process system calls that a program does not need.

    No namespaces, mounts, tracing, modules, keys, memory without a process; only unix sockets; only
    POSIX locks. System calls newer than this list fail with ENOSYS. Needs `drop_privileges` before.
    """
    rows = b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for code, yes, no, value in _filter(machine())
    )
    program = _Program(len(rows) // 8, rows)
    _check(_libc.prctl(22, 2, ctypes.addressof(program), 0, 0), "PR_SET_SECCOMP")


def _filter(name: str) -> list[tuple[int, int, int, int]]:
    """Rows of (code, jump if true, jump if false, value) of classic BPF."""
    deny, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    rows = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT_ARCH[name]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, _NEWEST_KNOWN),  # and those of x32, which are above
        (_RETURN, 0, 0, unknown),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are in memory; C libraries then use clone
        (_RETURN, 0, 0, unknown),
    ]
    for number in denied_calls(name).values():
        rows += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, deny)]
    locks = zip((2, 1, 0), _LOCKS_OF_DESCRIPTORS, strict=True)
    for number, argument, tests in (
        (_CLONE[name], _FIRST_ARGUMENT, [(_ANY_BIT, 0, 1, NEW_NAMESPACES)]),
        # vsock, for one, has no namespace.
        (_SOCKET[name], _FIRST_ARGUMENT, [(_EQUAL, 1, 0, _AF_UNIX)]),
        (
            _FCNTL[name],
            _SECOND_ARGUMENT,
            [(_EQUAL, left, int(not left), one) for left, one in locks],
        ),
    ):
        rows += [(_EQUAL, 0, len(tests) + 3, number), (_LOAD, 0, 0, argument), *tests]
        rows += [(_RETURN, 0, 0, deny), (_RETURN, 0, 0, _ALLOW)]
    return [*rows, (_RETURN, 0, 0, _ALLOW)]


def denied_calls(name: str) -> dict[str, int]:
    """Numbers of the denied system calls of a machine, by name."""
    words = _DENIED.split()
    column = 1 if name == "x86_64" else 2
    numbers = zip(words[::3], words[column::3], strict=True)
    return {call: int(number) for call, number in numbers if number != "-"}


# --- calls ---------------------------------------------------------------------------------------


def _prctl(name: str, option: int, value: int) -> None:
    _check(_libc.prctl(option, value, 0, 0, 0), name)


def _call(name: str, number: int, *arguments: object) -> int:
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *given)
    return _check(result, name)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
