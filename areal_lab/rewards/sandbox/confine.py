"""Confine the calling process: a private file system, limits, an ordinary user, few system calls.

    namespaces   make_root --> limit --> become_user --> landlock, seccomp
    bubblewrap                 limit -----------------> landlock where the kernel has it, seccomp
    unsafe                     limit, and an empty folder

Runs in init, process 1 of a cell; the program inherits it.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from areal_lab.rewards.sandbox import kernel

WORK = "/sandbox"
"""Folder of a program, the only writable one."""
USER = 1000
"""Its user and group id inside."""
DEVICES = ("null", "zero", "full", "random", "urandom")
_OPEN_FILES = 64
_INODES = 4096
_TASKS_OF_INIT = 1
_OF_THE_USER = (
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
    (resource.RLIMIT_SIGPENDING, 256),
)


def confine(setup: dict[str, object]) -> None:
    """Confine this process as `setup` says; see `run.request` for its keys."""
    limits, level = setup["limits"], setup["level"]
    assert isinstance(limits, dict)
    os.umask(0o022)
    if level == "unsafe":
        os.chdir(str(setup["folder"]))
        os.setsid()
        limit(limits)
        return
    readable, links = setup["readable"], setup["links"]
    assert isinstance(readable, list)
    assert isinstance(links, list)
    if level == "namespaces":
        # As bubblewrap does: signals and priorities of "its group" would reach the keeper's.
        os.setsid()
        make_root(readable, links, limits["disk_bytes"])
    os.chdir(WORK)
    limit(limits)
    # The kernel counts these per user, so the user's other programs would be refused them.
    for which, most in _OF_THE_USER:
        _set_limit(which, most)
    # Counted in the user namespace. Without one, all processes of the user would count.
    _set_limit(resource.RLIMIT_NPROC, int(limits["processes"]) + _TASKS_OF_INIT)
    if level == "namespaces":
        kernel.set_host_name("sandbox")
        become_user()
    kernel.drop_privileges()
    if level == "namespaces" or kernel.landlock_version():
        devices = [f"/dev/{name}" for name in DEVICES]
        kernel.restrict_files(readable, [WORK], devices)
    kernel.restrict_calls()


def make_root(readable: list[str], links: list[tuple[str, str]], disk_bytes: int) -> None:
    """Replace the root: `readable`, five devices, and one writable folder of limited size.

    No /proc: nothing here needs it, and containers do not allow mounting it. `readable` has
    absolute paths of folders and files. All binds are read-only.
    """
    flags = kernel.NO_SETUID | kernel.NO_DEVICES
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    # Two steps, because the old root must be reachable while the new one is filled.
    base = next(path for path in ("/tmp", "/run", "/usr") if os.path.isdir(path))
    kernel.mount("tmpfs", base, "tmpfs", flags, "mode=755,size=64k,nr_inodes=16")
    os.mkdir(f"{base}/old")
    os.mkdir(f"{base}/new")
    kernel.pivot_root(base, f"{base}/old")
    os.chdir("/")
    kernel.mount("tmpfs", "/new", "tmpfs", flags, "mode=755,size=256k,nr_inodes=1024")
    for path in readable:
        _bind(path)
    for name in DEVICES:
        _bind(f"/dev/{name}", device=True)
    for link, target in links:
        os.symlink(target, f"/new{link}")
    os.makedirs(f"/new{WORK}", exist_ok=True)
    options = f"mode=700,size={disk_bytes},nr_inodes={_INODES},uid={USER},gid={USER}"
    kernel.mount("tmpfs", f"/new{WORK}", "tmpfs", flags, options)
    os.chdir("/new")
    kernel.swap_root()
    kernel.make_read_only("/", recursive=False)


def _bind(path: str, *, device: bool = False) -> None:
    source, target = f"/old{path}", f"/new{path}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(source, target, flags=kernel.BIND | kernel.RECURSIVE)
    kernel.make_read_only(target, recursive=True, devices=device)


def protect_devices() -> None:
    """Make the devices read-only in a mount namespace of this process, if this user owns one.

    For bubblewrap, which binds them writable: root's programs could change their mode.
    """
    devices = [f"/dev/{name}" for name in DEVICES]
    user, group = os.geteuid(), os.getegid()
    if all(os.stat(device).st_uid != user for device in devices):
        return
    try:
        kernel.unshare(kernel.NEW_MOUNTS)
    except PermissionError:  # root of a container, or an ordinary user
        kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    for device in devices:
        kernel.mount(device, device, flags=kernel.BIND)
        kernel.make_read_only(device, recursive=False, devices=True)


def limit(limits: dict[str, float]) -> None:
    """Set the limits that the kernel enforces for each process."""
    # The lower limit sends a separate signal, which distinguishes it from other ends.
    _set_limit(resource.RLIMIT_CPU, -int(-limits["cpu_s"] // 1), above=1)
    _set_limit(resource.RLIMIT_AS, int(limits["memory_bytes"]))
    _set_limit(resource.RLIMIT_FSIZE, int(limits["disk_bytes"]))
    _set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    # Not 0: a program that the system starts for crashes would be started, core(5).
    _set_limit(resource.RLIMIT_CORE, 1)


def _set_limit(which: int, most: int, *, above: int = 0) -> None:
    hard = resource.getrlimit(which)[1]
    soft, hard = (
        one if hard == resource.RLIM_INFINITY else min(one, hard) for one in (most, most + above)
    )
    resource.setrlimit(which, (soft, hard))


def become_user() -> None:
    """Become the ordinary user of the cell, if this process is still its root.

    Started by root, that is `nobody` outside, so the kernel's limit of processes applies.
    """
    if os.getuid() == USER:
        return
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


_SYSTEM: Final = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_LOADER_CACHE: Final = "/etc/ld.so.cache"


@dataclass(frozen=True, slots=True)
class Visible:
    """Read-only mounts, at the same place. Lists, for marshal."""

    readable: list[str]
    links: list[tuple[str, str]]
    """Symbolic links, such as ("/lib", "usr/lib")."""


@cache
def visible_paths(folders: tuple[str, ...] = ()) -> Visible:
    """`/usr`, the interpreter's folder, and `folders`; of `/etc` only the cache of the loader."""
    for folder in folders:
        if not os.path.isabs(folder) or not os.path.isdir(folder):
            raise ValueError(f"{folder} must be the absolute path of a folder")
    links = [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]
    real = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    wanted = ["/usr", *real, os.path.realpath(sys.base_prefix), sys.base_prefix, *folders]
    readable: list[str] = []
    for path in sorted(set(wanted), key=len):
        if not any(path == one or path.startswith(f"{one}/") for one in readable):
            readable.append(path)
    if os.path.exists(_LOADER_CACHE):
        readable.append(_LOADER_CACHE)
    links.append(("/dev/shm", WORK))
    if not any(path.startswith("/tmp/") for path in readable):
        links.append(("/tmp", WORK))
    return Visible(readable, links)


def command(
    visible: Visible, disk_bytes: int, environment: Mapping[str, str], inner: Sequence[str]
) -> list[str]:
    """Command that runs `inner`, which is init, in new namespaces; FileNotFoundError without
    `bwrap`.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    shown = [word for path in visible.readable for word in ("--ro-bind", path, path)]
    links = [word for path, target in visible.links for word in ("--symlink", target, path)]
    devices = [f"/dev/{name}" for name in DEVICES]
    variables = [word for pair in environment.items() for word in ("--setenv", *pair)]
    return [
        program,
        *("--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox"),
        *shown,
        *(word for device in devices for word in ("--dev-bind", device, device)),
        *links,
        *("--size", str(disk_bytes), "--perms", "0700", "--tmpfs", WORK),
        *("--remount-ro", "/", "--chdir", WORK),
        *variables,
        "--",
        *inner,
    ]
