"""What a program can read: this interpreter, its library, the system's libraries and programs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Final

from areal_lab.rewards.sandbox.confine import WORK

_SYSTEM: Final = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_LOADER_CACHE: Final = "/etc/ld.so.cache"


@dataclass(frozen=True, slots=True)
class Visible:
    """Paths to show, read-only, at the same place. Lists, for marshal."""

    readable: list[str]
    links: list[tuple[str, str]]
    """Symbolic links, as ("/lib", "usr/lib")."""


@cache
def visible_paths(folders: tuple[str, ...] = ()) -> Visible:
    """`/usr`, the interpreter's folder, and `folders`; of `/etc` only the cache of the loader.

    Raises:
        ValueError: one of `folders` is no absolute path of a folder.
    """
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
