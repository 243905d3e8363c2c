"""Folders that are removed with the process that created them, or by a later one if it was
killed.

make_owned_folder(parent) --> a folder with a locked file in it --> removed when the process exits
                                    killed: the lock is free   --> remove_abandoned_folders(parent)

`remove_tree` removes folders that others filled, of any depth, modes, names and number of files. It
goes down and up (`..`) with one open folder, so that neither recursion, nor the length of a path,
nor the number of descriptors limits the depth. Links are removed and not followed; mounts
inside stay. The sandbox's processes import this, too: standard library only, and little of it.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import stat
import time

TYPE_CHECKING = False  # typing is slow to import, and so is pathlib
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

_PREFIX = "areal_lab-"
_LOCK = ".alive"
_locks: dict[Path, int] = {}
_PASSES = 100  # while something still creates files
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NAME = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def nearest_existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists; absolute."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def make_owned_folder(parent: Path, *, mode: int = 0o777) -> Path:
    """Create a folder in `parent` that is removed when this process exits normally."""
    name = f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    # Lock it before it gets the name that `remove_abandoned_folders` searches for.
    aside = parent / f".{name}"
    aside.mkdir(mode)
    lock = os.open(aside / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = parent / name
    aside.rename(folder)
    _locks[folder] = lock
    atexit.register(remove_owned_folder, folder)
    return folder


def remove_owned_folder(folder: Path) -> None:
    """Remove the folder with everything in it. Idempotent."""
    remove_tree(folder)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def remove_abandoned_folders(parent: Path, first: Callable[[Path], None] = lambda _: None) -> None:
    """Remove this user's folders in `parent` whose owner is dead."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # not an owned folder, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner is alive
        else:
            first(folder)
            remove_tree(folder)
        finally:
            os.close(lock)


# --- strangers' folders ---------------------------------------------------------------------------


def remove_tree(path: str | os.PathLike[str], *, timeout_s: float = float("inf")) -> list[str]:
    """Remove a folder with everything in it. A link, a file, and a missing folder are left.

    Returns:
        Files that could not be removed, one line each; empty if the folder is gone. Nothing is
        raised.
    """
    above, name = os.path.split(os.path.abspath(path))
    deadline_s = time.monotonic() + timeout_s
    trouble: list[str] = []
    opened: list[int] = []
    try:
        opened.append(os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        opened.append(_open(name, opened[0]))
        for _ in range(_PASSES):
            trouble = list(_emptied(opened[1], deadline_s))
            try:
                os.rmdir(name, dir_fd=opened[0])
                return []
            except OSError:
                if trouble:
                    return trouble
    except (FileNotFoundError, NotADirectoryError):
        return trouble
    except OSError as error:
        return [*trouble, f"{path}: {error.strerror}"]
    finally:
        for one in opened:
            os.close(one)
    return [f"{path}: something still writes there"]


def _emptied(top: int, deadline_s: float) -> Generator[str, None, None]:
    """Empty an open folder once; yield what could not be removed."""
    mount, here = _mount(top), os.dup(top)
    above: list[tuple[str, int, list[str]]] = []  # name, inode of its parent, folders left there
    try:
        left = yield from _without_files(here)
        while left or above:
            if time.monotonic() >= deadline_s:
                yield "there was no time left for the rest"
                return
            if left:
                name = left.pop()
                try:
                    inside = _open(name, here, mount)
                except OSError as error:
                    yield f"{name!r}: {error.strerror}"
                    continue
                above.append((name, os.fstat(here).st_ino, left))
                os.close(here)
                here = inside
                left = yield from _without_files(here)
                continue
            name, inode, left = above.pop()
            outside = os.open("..", _OPEN, dir_fd=here)
            os.close(here)
            here = outside
            if os.fstat(here).st_ino != inode:
                yield f"{name!r} was moved meanwhile"
                return
            try:
                os.rmdir(name, dir_fd=here)
            except OSError as error:
                yield f"{name!r}: {error.strerror}"
    finally:
        os.close(here)


def _without_files(folder: int) -> Generator[str, None, list[str]]:
    """Remove files and links; yield those that stay, and return the folders."""
    folders = []
    for name in os.listdir(folder):
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if _is_folder(name, folder):
                folders.append(name)
            else:
                yield f"{name!r}: {error.strerror}"
    return folders


def _is_folder(name: str, parent: int) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    except OSError:
        return False


def _open(name: str, parent: int, mount: str = "") -> int:
    """Open a folder for reading, after taking the rights to empty it; never through a link."""
    found = os.open(name, _NAME, dir_fd=parent)
    try:
        # Before anything is changed: it may be a folder of the system.
        if mount and _mount(found) != mount:
            raise OSError(errno.EBUSY, "something is mounted there")
        link = f"/proc/self/fd/{found}"  # this folder, whatever has its name by now
        try:
            os.chmod(link, 0o700)
        except PermissionError:
            pass  # not ours; it may be writable
        return os.open(link, _OPEN)
    finally:
        os.close(found)


def _mount(folder: int) -> str:
    """Number of the mount of an open folder; for a bind mount, the device number is not enough."""
    with open(f"/proc/self/fdinfo/{folder}") as file:
        return next((line for line in file if line.startswith("mnt_id")), "")
