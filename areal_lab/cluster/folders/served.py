"""Folders that a host serves to others: a model, weights of a version, a checkpoint.

    register("weights-v7", path) --> listing: names, sizes, xxh3_128 --> files by name in it
                                 --folder is removed from the disk--> served no longer

A file is served only if the listing has exactly its name, and only as it was listed: a request's
path is never joined to a path on the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from areal_lab.cluster.folders.replies import Damaged, NotHeld, Refused

_READ_BYTES: Final = 8 << 20
_KEPT_CHECKSUMS: Final = 4096
"""So that each file is read once for its checksum, and versions of long runs do not add up."""
_Seen: TypeAlias = tuple[int, int, int, int]
"""Device, inode, size and time of the last change of a file."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file of a folder."""

    name: str
    """Relative to the folder, with `/`."""
    size_bytes: int
    checksum: str
    """xxh3_128, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder, by name."""

    files: tuple[ListedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {
            "size_bytes": self.size_bytes,
            "files": [[file.name, file.size_bytes, file.checksum] for file in self.files],
        }

    @staticmethod
    def from_json(value: Any) -> Listing:
        """Read a listing, and refuse names that lead out of a folder.

        Raises:
            Damaged: it is no listing, or has such a name.
        """
        try:
            files = tuple(
                ListedFile(str(name), int(size), str(checksum))
                for name, size, checksum in value["files"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"this is no listing of a folder: {error!r}") from error
        for file in files:
            parts = file.name.split("/")
            if {"", ".", ".."} & set(parts) or "\\" in file.name or "\0" in file.name:
                raise Damaged(f"a listing has file {file.name!r}, which leads out of the folder")
        return Listing(files)


class Checksums:
    """Checksums of files, each of which is read once as long as it is not changed. Safe in several
    threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[_Seen, Future[str]] = {}

    def of(self, descriptor: int, *, again: bool = False) -> str:
        """xxh3_128 of an open file, in hexadecimal digits. Blocks.

        Args:
            again: whether to read it in any case.
        """
        about = os.fstat(descriptor)
        seen = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        reading: Future[str] = Future()
        with self._lock:
            known = None if again else self._known.get(seen)
            if known is None:
                self._known[seen] = reading
                while len(self._known) > _KEPT_CHECKSUMS:
                    del self._known[next(iter(self._known))]
        if known is not None:
            return known.result()  # another thread may still be reading it
        try:
            reading.set_result(checksum_of(descriptor, about.st_size))
        except BaseException as error:
            with self._lock:
                self._known.pop(seen, None)
            reading.set_exception(error)
        return reading.result()


@dataclass(frozen=True, slots=True)
class _Folder:
    path: Path
    follow_links: bool


class Folders:
    """Registered folders by name. Safe in several threads."""

    def __init__(self, checksums: Checksums | None = None) -> None:
        """Serve nothing yet.

        Args:
            checksums: of files that may be known; None knows none.
        """
        self.checksums = checksums or Checksums()
        self._lock = threading.Lock()
        self._folders: dict[str, _Folder] = {}

    def register(self, name: str, path: Path, *, follow_links: bool = False) -> None:
        """Serve a folder from now on; a name that is in use is replaced.

        Args:
            name: in its URL.
            path: the folder.
            follow_links: whether files may be links that lead out of it, as in the cache of
                Hugging Face models.

        Raises:
            ValueError: the name has a slash, or there is no folder.
        """
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"a folder cannot be served as {name!r}; use a name without a slash")
        if not path.is_dir():
            raise ValueError(f"{path} cannot be served as {name!r}: it is no folder")
        with self._lock:
            self._there()[name] = _Folder(path.resolve(), follow_links)

    def names(self) -> tuple[str, ...]:
        """The registered names."""
        with self._lock:
            return tuple(sorted(self._there()))

    def listing(self, name: str) -> Listing:
        """The files of a folder; each is read once for its checksum. Blocks.

        Raises:
            NotHeld: no folder has that name.
            Refused: it has a link that leads out.
        """
        folder = self._folder(name)
        files = []
        for file, path in _walk(folder):
            with _opened(path, folder) as descriptor:
                files.append(self._listed(file, descriptor))
        return Listing(tuple(files))

    @contextmanager
    def reading(self, name: str, file: str) -> Iterator[tuple[int, ListedFile]]:
        """An open file of a folder, and its line of the listing. Blocks.

        Raises:
            NotHeld: there is no such folder or file.
        """
        folder = self._folder(name)
        path = dict(_walk(folder)).get(file)
        if path is None:
            raise NotHeld(f"folder {name!r} has no file {file!r}")
        with _opened(path, folder) as descriptor:
            yield descriptor, self._listed(file, descriptor)

    def _listed(self, name: str, descriptor: int) -> ListedFile:
        return ListedFile(name, os.fstat(descriptor).st_size, self.checksums.of(descriptor))

    def _folder(self, name: str) -> _Folder:
        with self._lock:
            folders = self._there()
            if name not in folders:
                raise NotHeld(f"no folder {name!r} is served here; there are {sorted(folders)}")
            return folders[name]

    def _there(self) -> dict[str, _Folder]:
        """Those that were not removed from the disk, as old versions and checkpoints are; the
        others are forgotten. To be called with the lock."""
        gone = [name for name, folder in self._folders.items() if not folder.path.is_dir()]
        for name in gone:
            del self._folders[name]
        return self._folders


def read_range(file: int, start: int, end: int) -> memoryview:
    """Bytes `[start, end)` of an open file.

    Raises:
        OSError: it ends before.
    """
    data = memoryview(bytearray(end - start))
    at = 0
    while at < len(data):
        count = os.preadv(file, [data[at:]], start + at)
        if not count:
            raise OSError(f"the file ends at byte {start + at:,}, before {end:,}")
        at += count
    return data


def checksum_of(descriptor: int, size_bytes: int) -> str:
    """xxh3_128 of an open file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for start in range(0, size_bytes, _READ_BYTES):
        digest.update(read_range(descriptor, start, min(start + _READ_BYTES, size_bytes)))
    return digest.hexdigest()


def _walk(folder: _Folder) -> Iterator[tuple[str, Path]]:
    """Name and path of each file, sorted."""
    found = []
    for parent, _, names in os.walk(folder.path):  # does not follow links to folders
        for name in names:
            path = Path(parent) / name
            if path.is_file() or not path.exists():  # broken links are an error, pipes are not
                found.append((path.relative_to(folder.path).as_posix(), path))
    yield from sorted(found)


@contextmanager
def _opened(path: Path, folder: _Folder) -> Iterator[int]:
    """The descriptor of a file while it is open."""
    real = path.resolve()
    if not folder.follow_links and not real.is_relative_to(folder.path):
        raise Refused(
            f"{path} is a link that leads out of the folder; register it with follow_links=True "
            "if that is meant"
        )
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise NotHeld(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
