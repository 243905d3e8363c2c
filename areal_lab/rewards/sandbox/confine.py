"""Confine the process that calls: its own file system, limits, an ordinary user, few system calls.

    namespaces   make_root --> limit --> become_user --> landlock, seccomp
    bubblewrap                 limit -----------------> landlock where the kernel has it, seccomp
    unsafe                     limit, and an empty folder

Runs in init, process 1 of a cell; the program inherits it.
"""

from __future__ import annotations

import os
import resource

from areal_lab.rewards.sandbox import kernel

WORK = "/sandbox"
"""The folder of a program, and all that it can write."""
USER = 1000
"""Its user and group id inside."""
DEVICES = ("null", "zero", "full", "random", "urandom")
_OPEN_FILES = 64
_INODES = 4096
_TASKS_OF_INIT = 1


def confine(setup: dict[str, object]) -> None:
    """Confine this process as `setup` says; see `run.request` for its keys.

    Raises:
        OSError: the kernel refuses a part of it.
    """
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
        make_root(readable, links, limits["disk_bytes"])
    os.chdir(WORK)
    limit(limits)
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

    No /proc: nothing here needs it, and containers do not let it be mounted.

    Args:
        readable: absolute paths of folders and files, bound read-only.
        links: symbolic links, as ("/lib", "usr/lib"); their folders exist.
        disk_bytes: size of the writable folder, which is memory.
    """
    flags = kernel.NO_SETUID | kernel.NO_DEVICES
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    # Two steps, so that the old root is reachable while the new one is filled.
    base = next(path for path in ("/tmp", "/run", "/usr") if os.path.isdir(path))
    kernel.mount("tmpfs", base, "tmpfs", flags, "mode=755,size=64k,nr_inodes=16")
    os.mkdir(f"{base}/old")
    os.mkdir(f"{base}/new")
    kernel.pivot_root(base, f"{base}/old")
    os.chdir("/")
    kernel.mount("tmpfs", "/new", "tmpfs", flags, "mode=755,size=256k,nr_inodes=1024")
    for path in readable:
        _bind(path, read_only=True)
    for name in DEVICES:
        _bind(f"/dev/{name}", read_only=False)
    for link, target in links:
        os.symlink(target, f"/new{link}")
    os.makedirs(f"/new{WORK}", exist_ok=True)
    options = f"mode=700,size={disk_bytes},nr_inodes={_INODES},uid={USER},gid={USER}"
    kernel.mount("tmpfs", f"/new{WORK}", "tmpfs", flags, options)
    os.chdir("/new")
    kernel.swap_root()
    kernel.make_read_only("/", recursive=False)


def _bind(path: str, *, read_only: bool) -> None:
    source, target = f"/old{path}", f"/new{path}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    kernel.mount(source, target, flags=kernel.BIND | kernel.RECURSIVE)
    if read_only:
        kernel.make_read_only(target, recursive=True)


def limit(limits: dict[str, float]) -> None:
    """Set the limits that the kernel keeps for each process."""
    # At the lower limit comes a signal of its own, which tells it apart from other ends.
    _set_limit(resource.RLIMIT_CPU, -int(-limits["cpu_s"] // 1), above=1)
    _set_limit(resource.RLIMIT_AS, int(limits["memory_bytes"]))
    _set_limit(resource.RLIMIT_FSIZE, int(limits["disk_bytes"]))
    _set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _set_limit(resource.RLIMIT_CORE, 0)


def _set_limit(which: int, most: int, *, above: int = 0) -> None:
    hard = resource.getrlimit(which)[1]
    soft, hard = (
        one if hard == resource.RLIM_INFINITY else min(one, hard) for one in (most, most + above)
    )
    resource.setrlimit(which, (soft, hard))


def become_user() -> None:
    """Become the ordinary user of the cell, if this process is still its root.

    Started by root, that is `nobody` outside, so that the kernel's limit of processes counts.
    """
    if os.getuid() == USER:
        return
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
